"""Inner-step throughput while a round is in flight, against no swarm at all, in the same two processes.

Both processes train the demo's model on one thread each. Blocks of steps alternate: without a swarm, then as two
peers of one run with tau > 0, then without again. A step counts as "in flight" when a contribution of this peer was
waiting for its commit at the step's end; the hook's own work (reading, encoding, merging) is inside the step's time.

    OMP_NUM_THREADS=1 python experiments/overlap/measure.py --preset diloco --overlap 20 --batch 16
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch

from decentral.manifest import Manifest, load_manifest, preset_manifest
from decentral.peer import join
from decentral.tasks.batches import batch_at
from decentral.tasks.corpus import load_corpus
from decentral.tasks.language_model import build_language_model
from decentral.tasks.sizing import LanguageModelConfig, demo_tables

STEPS = 60  # per block


class Trainer:
    def __init__(self, manifest: Manifest, seed: int, batch_size: int) -> None:
        self.batch_size = batch_size
        sizes = manifest.model
        config = LanguageModelConfig(
            hidden=sizes.hidden, layers=sizes.layers, heads=sizes.heads, context=sizes.context, tie_embeddings=True
        )
        self.model: Any = build_language_model(config, seed=0)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.corpus = load_corpus(None)
        self.context, self.seed, self.number = sizes.context, seed, 0

    def step(self) -> float:
        began = time.perf_counter()
        batch = batch_at(
            self.corpus.train,
            seed=self.seed,
            peer=bytes(32),
            step=self.number,
            batch_size=self.batch_size,
            context=self.context,
        )
        self.model(**batch).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.number += 1
        return time.perf_counter() - began


def work(number: int, folder: str, blocks: int, batch_size: int, barrier: Any, answers: Any) -> None:
    torch.set_num_threads(1)
    root = Path(folder)
    manifest = load_manifest(root / "run.toml")
    trainer = Trainer(manifest, number, batch_size)
    for _ in range(10):
        trainer.step()
    alone: list[float] = []
    flying: list[float] = []
    joined: list[float] = []
    barrier.wait()
    alone += [trainer.step() for _ in range(STEPS)]
    barrier.wait()
    for_whom = manifest if number == 0 else wait_for(root / "invite")
    listen = ("/ip4/127.0.0.1/tcp/0",)
    with join(
        for_whom, trainer.model, trainer.optimizer, out=root / f"peer{number}", listen=listen, alone=True
    ) as peer:
        if number == 0:
            (root / "invite.part").write_text(peer.invite)
            (root / "invite.part").rename(root / "invite")
        while len(peer.status().members) < 2:
            trainer.step()
        for _ in range(STEPS):  # the DHT is imported now, once: about a second of processor time
            trainer.step()
        barrier.wait()
        for _ in range(blocks * STEPS):
            joined.append(trainer.step())
            if peer.in_flight:
                flying.append(joined[-1])
        barrier.wait()
        commits = peer.round
    barrier.wait()
    alone += [trainer.step() for _ in range(STEPS)]
    answers.put({"peer": number, "alone": alone, "joined": joined, "in_flight": flying, "commits": commits})


def wait_for(path: Path) -> str:
    while not path.exists():
        threading.Event().wait(0.1)
    return path.read_text()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--preset", default="streaming")
    parser.add_argument("--blocks", type=int, default=3)
    parser.add_argument(
        "--batch", type=int, default=16, help="sequences per inner step: 4 takes 50 ms, 16 about 200 ms"
    )
    parser.add_argument("--overlap", type=int, default=20, help="tau, inner steps")
    options = parser.parse_args()
    tables = demo_tables(options.preset)
    outer = {**tables.get("outer", {}), "overlap": options.overlap}
    manifest = preset_manifest(options.preset, **{**tables, "outer": outer}, run={"rounds": 100_000})
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "run.toml").write_text(manifest.to_toml())
        context = multiprocessing.get_context("spawn")
        barrier, answers = context.Barrier(2), context.Queue()
        peers = [
            context.Process(target=work, args=(n, folder, options.blocks, options.batch, barrier, answers))
            for n in range(2)
        ]
        for process in peers:
            process.start()
        found = [answers.get() for _ in peers]
        for process in peers:
            process.join()
    rows = {key: [seconds for answer in found for seconds in answer[key]] for key in ("alone", "joined", "in_flight")}
    means = {key: statistics.fmean(seconds) for key, seconds in rows.items()}
    print(
        json.dumps(
            {
                "preset": options.preset,
                "commits": [answer["commits"] for answer in found],
                "steps": {key: len(seconds) for key, seconds in rows.items()},
                "mean_ms": {key: round(1000 * mean, 2) for key, mean in means.items()},
                "median_ms": {key: round(1000 * statistics.median(rows[key]), 2) for key in rows},
                "throughput_in_flight_over_alone": round(means["alone"] / means["in_flight"], 3),
                "throughput_joined_over_alone": round(means["alone"] / means["joined"], 3),
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
