"""Two peers of one run, one on the device and one on the processor: the same anchor, and what a round holds training.

python -m experiments.cuda.rounds --device cuda --million 31.5 --overlap 2
python -m experiments.cuda.rounds --device cpu --million 1 --rounds 4

Each is a process of its own, on loopback. An inner step moves every parameter by chance and needs no gradient: what is
measured is the rounds'. ``held`` is what ``status`` says, the median over rounds; before each boundary the device is
waited for, so that inner steps are not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch
from torch import nn

import decentral
from decentral.manifest import Manifest, preset_manifest
from experiments.holding.large import said

WIDTH, SEATS = 1024, 2


class Wandering(torch.optim.Optimizer):
    """Every parameter takes a random step of a thousandth."""

    def __init__(self, model: nn.Module, seed: int, pause: float) -> None:
        super().__init__(model.parameters(), {"lr": 1e-3})
        self._pause, self._device = pause, next(model.parameters()).device
        self._chance = torch.Generator(self._device).manual_seed(seed)

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        """One for all tensors, turned over for every second one."""
        step = torch.randn(WIDTH, WIDTH, generator=self._chance, device=self._device)
        for number, parameter in enumerate(self.param_groups[0]["params"]):
            parameter.add_(step, alpha=1e-3 if number % 2 else -1e-3)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        threading.Event().wait(self._pause)


def options() -> argparse.Namespace:
    """The command line's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--million", type=float, default=31.5)
    parser.add_argument("--preset", default="sparseloco")
    parser.add_argument("--overlap", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--pause", type=float, default=0.05, help="s of an inner step")
    parser.add_argument("--seat", type=int, default=None)
    parser.add_argument("--folder", type=Path, default=None)
    parser.add_argument("--invite", default=None)
    return parser.parse_args()


def main() -> None:
    """See above."""
    given = options()
    if given.seat is not None:
        take_part(given)
        return
    with tempfile.TemporaryDirectory() as folder:
        peers = [start(given, Path(folder), 0, None)]
        invite = str(said(peers[0])["invite"])
        peers.append(start(given, Path(folder), 1, invite))
        found = [said(peer) for peer in peers]
        for peer in peers:
            peer.wait()
    digests = {one["digest"] for one in found}
    print(json.dumps({"preset": given.preset, "million": given.million, "overlap": given.overlap,
                      "equal": len(digests) == 1, "peers": found}), flush=True)  # fmt: skip
    if len(digests) != 1:
        raise SystemExit("the anchors differ")


def start(given: argparse.Namespace, folder: Path, seat: int, invite: str | None) -> subprocess.Popen[str]:
    """One peer as a process of its own."""
    command = [sys.executable, "-m", "experiments.cuda.rounds", "--seat", str(seat), "--folder", str(folder)]
    for name in ("million", "preset", "overlap", "rounds", "pause"):
        command += [f"--{name}", str(getattr(given, name))]
    command += ["--device", "cpu" if seat else given.device, *([] if invite is None else ["--invite", invite])]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def terms(given: argparse.Namespace) -> Manifest:
    """A run of both or none."""
    return preset_manifest(
        given.preset,
        run={"rounds": given.rounds, "salt": "devices"},
        inner={"steps": 4, "warmup": 0},
        outer={"overlap": given.overlap},
        swarm={"min_peers": 2, "deadline_floor": 30.0, "deadline_ceiling": 60.0, "lease": 60.0},
    )


def take_part(given: argparse.Namespace) -> None:
    """Train to the end of the run, and say what it took."""
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(max(1, round(given.million * 1e6 / WIDTH**2)))]
    model = nn.Sequential(*layers).to(given.device)
    optimizer = Wandering(model, given.seat, given.pause)
    where = {"out": given.folder / str(given.seat), "listen": ("/ip4/127.0.0.1/tcp/0",), "lan": False}
    settings = {"quiet": True, "checkpoint_every": 10_000, "join_timeout": 120.0, "transport": "native"}
    with decentral.join(given.invite or terms(given), model, optimizer, **where, **settings, alone=True) as peer:
        if given.invite is None:
            say(invite=peer.invite)
        peer.wait_for_company()
        began = time.monotonic()
        status = peer.status()
        while not peer.done:
            optimizer.step()
            status = peer.status() if peer.round < given.rounds else status
        seconds, digest = time.monotonic() - began, peer.anchor_digest
        held = peer.status().held_seconds or status.held_seconds
        places = sorted({one_N.device.type for one_N in peer.swarm.node.replica.own_tensors().values()})
    most = (
        torch.cuda.max_memory_allocated() / sum(map(torch.numel, model.parameters())) if given.device == "cuda" else 0
    )
    say(device=given.device, digest=digest, held_ms=None if held is None else round(1000 * held, 2), owed_on=places,
        seconds_a_round=round(seconds / given.rounds, 3), device_bytes_a_parameter=round(most, 1))  # fmt: skip


def say(**line: object) -> None:
    """To the process that started this one."""
    os.write(1, f"{json.dumps(line)}\n".encode())


if __name__ == "__main__":
    main()
