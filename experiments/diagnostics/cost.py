"""What the figures of a round cost beside its outer step, at one peer: medians of several rounds, in milliseconds.

OMP_NUM_THREADS=1 python experiments/diagnostics/cost.py --numel 25000000 --peers 8 sparseloco diloco
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from decentral.replica.apply import outer_step
from decentral.replica.contribution import encode_whole

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from decentral.consensus.chain import Head
from decentral.manifest import preset_manifest
from decentral.node.node import make_replica
from decentral.observe.contributions import RoundMetrics
from decentral.parameters import schema_of
from decentral.replica.contribution import Contribution
from decentral.wire.keys import Signer
from decentral.wire.messages import FrameRef, Record

ROUNDS = 7


def measured(preset: str, numel: int, peers: int) -> tuple[float, float]:
    """Milliseconds of the outer step and of the figures. A reduce's method is given a gather here: more to look at."""
    manifest = preset_manifest(preset, run={"salt": "cost"}).changed(
        exchange={"kind": "gather"}, outer={"fragments": 1}
    )
    side = max(1, numel // 1024)
    schema = schema_of({"weight": torch.zeros(side, 1024, requires_grad=True)})
    numel = side * 1024
    replica = make_replica(manifest, schema, [torch.randn(numel)])
    signers = sorted((Signer(bytes([n]) * 32) for n in range(peers)), key=lambda one: one.peer)
    head = Head.genesis(bytes(32), bytes(32), replica.digest, signers[0].peer)
    head = replace(head, members=tuple(one.peer for one in signers))
    looking, steps, looks = RoundMetrics(replica, lambda event, fields: None), list[float](), list[float]()
    made = [_made(replica, head, signer, numel) for signer in signers]
    for one, signer in zip(made, signers, strict=True):
        one.encoded = encode_whole(replica, 0, one.gradient_N, one.states, signer.peer)
    frames = [one.frame(head, signer) for one, signer in zip(made, signers, strict=True)]
    for frame in frames:  # as when they came
        replica.contents.measure(frame)
    refs = tuple(FrameRef(frame.header.sender, frame.hash, 0, 1, 1) for frame in frames)
    record = Record(
        head.run, 0, 1, 0, 0, 0, head.hash, replica.digest, head.members, refs, (), (), head.members, False
    )  # fmt: skip
    by_hash = {frame.hash: frame for frame in frames}
    replica.feedback[0] = made[0].encoded.feedback
    for _ in range(ROUNDS):
        began = time.perf_counter()
        step = outer_step(replica, record, by_hash)
        between = time.perf_counter()
        looking.see_commit(record, by_hash, step, made[0], None)
        steps.append(1e3 * (between - began))
        looks.append(1e3 * (time.perf_counter() - between))
        replica.install(step)
    return statistics.median(steps), statistics.median(looks)


def _made(replica: Any, head: Head, signer: Signer, numel: int) -> Contribution:
    generator = torch.Generator().manual_seed(signer.peer[0])
    gradient_N = torch.randn(numel, generator=generator)
    states = tuple(torch.zeros(numel) for _ in replica.due(0)[1:])
    return Contribution(0, head.hash, -gradient_N, gradient_N, 1, 1, states=states)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("presets", nargs="+")
    parser.add_argument("--numel", type=int, default=25_000_000)
    parser.add_argument("--peers", type=int, default=8)
    args = parser.parse_args()
    for preset in args.presets:
        step, looked = measured(preset, args.numel, args.peers)
        print(f"{preset:12} outer step {step:9.2f} ms  figures {looked:7.3f} ms  {100 * looked / step:5.2f} %")


if __name__ == "__main__":
    main()
