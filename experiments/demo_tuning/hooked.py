"""Train K replicas in one process by a method's own training side too: what `simulate.py` leaves out.

The method acts around each inner step, says its summary, is told of commits, and sees contributors in its outer step
(SPES's owners, HeLoCo's ages). ``--late`` has one peer in turn bring its contribution a round later, at age 1, as where
a round waits for some. Methods of one channel whose topology is ``all``, in one fragment, without overlap or feedback.
One peer is lost at a third and one gained at half, as in the demo. One JSON line per evaluation of the anchor, in
nats per byte.

    OMP_NUM_THREADS=1 python -m experiments.demo_tuning.hooked --method spes --steps 200 --outer '{"merge_rate": 0}'
    OMP_NUM_THREADS=1 python -m experiments.demo_tuning.hooked --method heloco --late
    OMP_NUM_THREADS=1 python -m experiments.demo_tuning.hooked --method spes --solo
"""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import dataclass, field

import torch
from torch import Tensor

from decentral.compressors import parse_compressor
from decentral.manifest import Manifest, preset_manifest
from decentral.optimizers import Contributor, RoundInfo, make_outer
from decentral.parameters import schema_of, split
from decentral.tasks.batches import batch_at
from decentral.tasks.corpus import load_corpus
from decentral.tasks.evaluate import bits_per_byte
from decentral.tasks.language_model import build_language_model
from decentral.tasks.sizing import LanguageModelConfig, demo_tables
from decentral.training.inner import build_inner, warm_up
from decentral.training.live_model import LiveModel
from decentral.training.live_side import LiveSide, MethodCalls, Moments


class Trainer:
    """One peer."""

    def __init__(self, manifest: Manifest, number: int) -> None:
        self.manifest, self.peer = manifest, number.to_bytes(32, "big")
        self.bare = build_language_model(LanguageModelConfig.of(manifest.model), seed=manifest.run.seed)
        self.optimizers = build_inner(manifest.inner, self.bare)
        self.schedules = [warm_up(one, manifest.inner.warmup) for one in self.optimizers]
        self.model = LiveModel(self.bare, 1, None, self.optimizers)
        self.live = LiveSide(self.model, Moments(self.model, self.optimizers), self.peer, self.model.schema)
        self.method = make_outer(manifest.outer.method, manifest.outer.hyper)
        self.live.begin(1, lambda fragment: manifest.inner.steps)
        self.calls = MethodCalls(self.method, self.live, 1)
        self.done = 0

    def train(self, train: Tensor, steps: int, *, alone: bool) -> None:
        sizes = {"batch_size": self.manifest.data.batch_size, "context": self.manifest.model.context}
        for _ in range(steps):
            self.bare(
                **batch_at(train, seed=self.manifest.run.seed, peer=self.peer, step=self.done, **sizes)
            ).loss.backward()
            torch.nn.utils.clip_grad_norm_(self.bare.parameters(), self.manifest.inner.clip)
            if not alone:
                self.calls.before_step()
            for optimizer, schedule in zip(self.optimizers, self.schedules, strict=True):
                optimizer.step()
                schedule.step()
            if not alone:
                self.calls.after_step()
            self.bare.zero_grad()
            self.done += 1


@dataclass
class Sent:
    """A contribution on its way."""

    trainer: Trainer
    change_N: Tensor
    summary: bytes
    own: dict[str, Tensor]
    step: int


@dataclass
class Swarm:
    """Anchor and outer state."""

    manifest: Manifest
    trainers: list[Trainer]
    late: bool
    step: int = 0
    waiting: list[Sent] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.method, self.compressor = self.trainers[0].method, parse_compressor(self.manifest.compressor.chain)
        self.fragment = schema_of(self.trainers[0].bare, 1).fragments[0]
        self.anchor_N = self.trainers[0].model.read(0)
        self.state = self.method.init(self.anchor_N)

    def round(self) -> None:
        """Everybody contributes; what is late comes with the next round, on top of the anchor of then."""
        made = [self.contribution(trainer) for trainer in self.trainers]
        late = made.pop(self.step % len(made)) if self.late else None
        taken = sorted([*made, *self.waiting], key=lambda sent: sent.trainer.peer)
        self.waiting = [] if late is None else [late]
        told = tuple(
            Contributor(s.trainer.peer, steps=self.manifest.inner.steps, age=self.step - s.step, summary=s.summary)
            for s in taken
        )
        weights = tuple(self.method.weights(told, [1.0] * len(told), self.state))
        rows_KN = torch.stack([sent.change_N for sent in taken])
        each = self.method.channels()[0].combine == "each"
        mean_N = (rows_KN * torch.tensor(weights)[:, None]).sum(0) / math.fsum(weights)
        received = {"change": rows_KN if each else self.through(mean_N, self.manifest.exchange.kind == "reduce")}
        info = RoundInfo(
            self.step,
            told,
            weights,
            self.fragment.shapes,
            tuple(spec.name for spec in self.fragment.parameters),
            len(self.trainers),
        )
        before_N = self.anchor_N
        self.anchor_N, self.state = self.method.outer_step(self.anchor_N, received, self.state, info)
        self.step += 1
        for sent in taken:
            peers = tuple(one.peer for one in told)
            self.method.after_commit(sent.trainer.live, 0, self.state, sent.own, peers)
        for trainer in self.trainers:
            lagging = next((sent for sent in self.waiting if sent.trainer is trainer), None)
            trainer.model.write(
                0, self.anchor_N if lagging is None else trainer.model.read(0) + self.anchor_N - before_N
            )

    def contribution(self, trainer: Trainer) -> Sent:
        """What it learnt since the anchor, less what is on its way already."""
        change_N = self.anchor_N - trainer.model.read(0)
        change_N = change_N - sum((s.change_N for s in self.waiting if s.trainer is trainer), torch.zeros(()))
        own = dict(trainer.live.own(0))
        return Sent(
            trainer, self.through(change_N), self.method.summary.says(trainer.live, 0, [change_N]), own, self.step
        )

    def through(self, flat_N: Tensor, lossy: bool = True) -> Tensor:
        """As it is decoded."""
        if not lossy:
            return flat_N
        parts = split(flat_N, self.fragment)
        return torch.cat(
            [self.compressor.decompress_one(self.compressor.compress_one(part)).flatten() for part in parts]
        )

    def churn(self, rounds: int) -> None:
        """The demo's: lost at a third, gained at half."""
        if self.step == rounds // 3:
            self.trainers.pop()
        if self.step == rounds // 2:
            newcomer = Trainer(self.manifest, 9)
            newcomer.model.write(0, self.anchor_N)
            self.trainers.append(newcomer)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", required=True)
    parser.add_argument("--solo", action="store_true")
    parser.add_argument("--late", action="store_true")
    for name, default in [("steps", 200), ("seed", 3), ("peers", 4), ("every", 50), ("windows", 128)]:
        parser.add_argument(f"--{name}", type=int, default=default)
    for table in ("model", "inner", "outer"):
        parser.add_argument(f"--{table}", type=json.loads, default={}, help=f"JSON over the demo's [{table}]")
    args = parser.parse_args()
    torch.set_num_threads(1)
    manifest = preset_manifest(args.method, run={"seed": args.seed}, **demo_tables(args.method))
    manifest = manifest.changed(model=args.model, inner=args.inner, outer=args.outer)
    corpus, interval = load_corpus(), manifest.inner.steps
    swarm = Swarm(manifest, [Trainer(manifest, n) for n in range(1 if args.solo else args.peers)], args.late)
    rounds, began = args.steps // interval, time.monotonic()
    probe = swarm.trainers[0].bare if args.solo else Trainer(manifest, 0).bare
    shown = LiveModel(probe, 1, None, ())
    for number in range(1, rounds + 1):
        for trainer in swarm.trainers:
            trainer.train(corpus.train, interval, alone=args.solo)
        if not args.solo:
            swarm.round()
            swarm.churn(rounds)
            shown.write(0, swarm.anchor_N)
        if number == rounds or number * interval % args.every < interval:
            bits = bits_per_byte(probe, corpus.held_out, context=manifest.model.context, num_windows=args.windows)
            told = {"step": number * interval, "nats": round(bits * math.log(2), 4)}
            print(json.dumps({**told, "seconds": round(time.monotonic() - began)}), flush=True)


if __name__ == "__main__":
    main()
