"""How long one checkpoint holds the training thread: a peer alone, AdamW, a checkpoint every second round.

python -m experiments.holding.checkpoint --million 31.5
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

from decentral.manifest import preset_manifest
from decentral.peer import join
from decentral.peer.saved import Saver
from decentral.swarm.identity import Identity
from decentral.training.schedule import SyncSchedule
from decentral.transport.memory import MemoryNetwork

WIDTH, ROUNDS = 1024, 9


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--million", type=float, default=31.5, help="parameters")
    million = parser.parse_args().million
    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(round(million * 1e6 / WIDTH**2))]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1)
    run = {"rounds": 1000, "salt": "held"}
    terms = preset_manifest("sparseloco", run=run, inner={"steps": 1}, swarm={"min_peers": 1})
    seconds = timed()
    with tempfile.TemporaryDirectory() as folder:
        transport = MemoryNetwork().transport(Identity.load_or_create(Path(folder) / "identity.key").signer)
        out = {"out": folder, "transport": transport, "quiet": True, "checkpoint_every": 2}
        with join(terms, model, optimizer, **out, alone=True) as peer:
            while peer.round < ROUNDS:
                for parameter in model.parameters():
                    parameter.grad = torch.full_like(parameter, 1e-3)
                optimizer.step()
    shown = ", ".join(f"{one:.3f}" for one in seconds)
    print(f"{million} M: held {statistics.median(seconds):.3f} s, median of {len(seconds)} checkpoints: {shown}")


def timed() -> list[float]:
    """Seconds in ``Saver.save`` from now on, of those that began a checkpoint: also of versions that wrote it there."""
    found, save = list[float](), Saver.save

    def timing(saver: Saver, schedule: SyncSchedule) -> bool:
        began = time.perf_counter()
        if saved := save(saver, schedule):
            found.append(time.perf_counter() - began)
        return saved

    Saver.save = timing  # type: ignore[method-assign]
    return found


if __name__ == "__main__":
    main()
