"""What a late commit costs: DiLoCo that carries its progress on, and eager updates, on quadratics of three peers.

    OMP_NUM_THREADS=1 python experiments/eager/compare.py

From a checkout: the peers are those of tests/laws. Loss of the anchor above its least, the mean over three seeds.
"""

from __future__ import annotations

import sys
from itertools import product
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from decentral.optimizers import OuterMethod
from decentral.optimizers.diloco import DiLoCo
from decentral.optimizers.eager import Eager
from tests.kit.learners import Learners
from tests.kit.replicas import NUMEL

STEPS = 10  # H
PEERS = (0, 1, 2)
SHOWN = (10, 20, 40, 60)  # rounds


def losses(method: OuterMethod, late: int, seed: int, rate: float) -> list[float]:
    """Of the anchor, round by round; a commit comes ``late`` inner steps after its contributions."""
    random = torch.Generator().manual_seed(seed)
    curvature_N = torch.logspace(-2, 0, NUMEL)[torch.randperm(NUMEL, generator=random)]
    best = [0.3 * torch.randn(NUMEL, generator=random) for _ in PEERS]
    middle_N = torch.stack(best).mean(0)
    run, flying, found = Learners(method, 3, middle_N + 1.0), None, []
    for peer in run.peers:
        peer.schedule.timing.overlap, peer.schedule.timing.interval = late, STEPS
    for _ in range(max(SHOWN)):
        for step in range(STEPS):
            if flying is not None and step == late:
                run.commit(flying)
                flying = None
            noise = [0.3 * rate * curvature_N.sqrt() * torch.randn(NUMEL, generator=random) for _ in PEERS]
            run.learn({n: rate * curvature_N * (best[n] - run.peers[n].live_N) + noise[n] for n in PEERS})
        if flying is not None:
            run.commit(flying)
        flying = run.offer(PEERS)
        if late == 0:
            run.commit(flying)
            flying = None
        found.append(float((0.5 * curvature_N * (run.peers[0].anchor_N - middle_N) ** 2).sum()))
    return found


def main() -> None:
    """Rounds that solve much and little, of two settings of the outer step."""
    print("lr  momentum  inner rate  late  method   " + "  ".join(f"round {shown}" for shown in SHOWN))
    for (lr, momentum), rate in product(((0.4, 0.9), (0.7, 0.6)), (0.05, 0.2)):
        for method, late in ((DiLoCo, 0), (DiLoCo, 5), (Eager, 5), (DiLoCo, 10), (Eager, 10)):
            runs = [losses(method(lr, momentum), late, seed, rate) for seed in range(3)]
            told = [f"{sum(run[shown - 1] for run in runs) / 3:8.3g}" for shown in SHOWN]
            print(f"{lr:3} {momentum:8} {rate:10} {late:5}  {method.name:7}", *told, flush=True)


if __name__ == "__main__":
    main()
