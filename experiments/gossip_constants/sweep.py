"""Which constants suit gossip methods on noisy quadratics? See README.md. Prints one table per method and graph.

Every peer has its own minimum and the same curvatures, 0.02 to 1; it makes 10 steps of noisy gradient descent a round
and meets a random partner. The figure is the excess of the swarm's loss at the replicas, mean over peers, over seeds
and over the last 10 of so many rounds: what an evaluation of any one peer would say.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from decentral.errors import ConfigError
from decentral.optimizers import OuterMethod, RoundInfo, make_outer

# Shape suffixes: P = peers, G = peers of one side of the pairs, N = coordinates.

DIM, INNER, RATE, NOISE, SPREAD = 64, 10, 0.1, 0.3, 1.0
SEEDS = 3
GRAPHS: dict[str, Callable[[int, int, int], bool]] = {  # whether two of n peers reach each other
    "all": lambda a, b, n: True,
    "bridge": lambda a, b, n: (a < n // 2) == (b < n // 2) or (a, b) in ((0, n // 2), (n // 2, 0)),
    "ring": lambda a, b, n: (a - b) % n in (1, n - 1),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--method", choices=[*GRIDS], default="gasloc")
    parser.add_argument("--graph", choices=[*GRAPHS], default="all")
    parser.add_argument("--peers", type=int, default=8)
    args = parser.parse_args()
    rows = [(excess(outer, args.peers, args.graph), outer) for outer in methods(args.method)]
    for (short, long), outer in sorted(rows, key=lambda row: row[0][0] * row[0][1]):
        print(f"{short:9.4f} {long:9.4f}  {outer}")


GRIDS = {
    "gasloc": {
        "lr": (0.5, 0.7, 1.0),
        "momentum": (0.0, 0.3, 0.5, 0.6, 0.7, 0.8, 0.9),
        "pull": (0.25, 0.35, 0.5, 0.75, 1.0, 1.25),
    },
    "a2cid2": {"chi1": (1.0, 4.0, 8.0, 16.0, 32.0, 64.0), "chi2": (0.5, 1.0, 2.0)},
    "ad_psgd": {"lr": (1.0,)},
    "noloco": {"alpha": (0.3, 0.5), "beta": (0.7, 1.0), "gamma": (0.7, 1.0)},
}


def methods(name: str) -> Iterator[OuterMethod]:
    """Those of the grid whose replicas stay together."""
    grid = GRIDS[name]
    for values in itertools.product(*grid.values()):
        try:
            yield make_outer(name, dict(zip(grid, values, strict=True)))
        except ConfigError:
            continue


def excess(outer: OuterMethod, peers: int, graph: str) -> tuple[float, float]:
    """The excess loss around rounds 30 and 120."""
    runs = torch.tensor([losses(outer, peers, graph, seed, 120) for seed in range(SEEDS)])
    return float(runs[:, 20:30].mean()), float(runs[:, 110:].mean())


def losses(outer: OuterMethod, peers: int, graph: str, seed: int, rounds: int) -> list[float]:
    """One run."""
    random = torch.Generator().manual_seed(seed)
    curve_N = torch.logspace(-1.7, 0, DIM)
    goal_PN = 3.0 + SPREAD * torch.randn(peers, DIM, generator=random)
    x_PN = torch.zeros(peers, DIM)
    state = outer.init(x_PN)
    found = []
    for _ in range(rounds):
        x_PN, state = met(outer, x_PN, trained(x_PN, goal_PN, curve_N, random), state, pairs(peers, graph, random))
        found.append(float((0.5 * curve_N * (x_PN - goal_PN.mean(0)).square()).sum(1).mean()))
    return found


def trained(x_PN: Tensor, goal_PN: Tensor, curve_N: Tensor, random: torch.Generator) -> Tensor:
    """What each peer contributes."""
    local_PN = x_PN
    for _ in range(INNER):
        noise_PN = NOISE * torch.randn(local_PN.shape, generator=random)
        local_PN = local_PN - RATE * (curve_N * (local_PN - goal_PN) + noise_PN)
    return local_PN


def pairs(peers: int, graph: str, random: torch.Generator) -> list[tuple[int, ...]]:
    """A fresh matching of all; two that do not reach each other step alone."""
    order = torch.randperm(peers, generator=random).tolist()
    groups: list[tuple[int, ...]] = []
    for at in range(0, peers, 2):
        group = tuple(order[at : at + 2])
        together = len(group) == 2 and GRAPHS[graph](*group, peers)
        groups += [group] if together else [(one,) for one in group]
    return groups


def met(
    outer: OuterMethod, x_PN: Tensor, local_PN: Tensor, state: dict[str, Tensor], groups: list[tuple[int, ...]]
) -> tuple[Tensor, dict[str, Tensor]]:
    """One outer step of all; it is elementwise, so the same side of all pairs goes at once."""
    after_PN, kept = x_PN.clone(), {name: one.clone() for name, one in state.items()}
    change_PN = outer.contribute(x_PN, local_PN)
    sent_PN = outer.proposal(x_PN, change_PN, state) if outer.channels()[0].is_replica else x_PN
    for mates in sides(groups):
        rows = torch.stack([sent_PN[side] for side in mates])
        given_GN = change_PN[mates[0]] if outer.channels()[0].is_replica else change_PN[mates].mean(0)
        received = {"change": given_GN, outer.channels()[-1].name: rows}
        own = {name: one[mates[0]] for name, one in state.items()}
        after_PN[mates[0]], own = outer.outer_step(x_PN[mates[0]], received, own, RoundInfo())
        for name, one in own.items():
            kept[name][mates[0]] = one
    return after_PN, kept


def sides(groups: list[tuple[int, ...]]) -> Iterator[Tensor]:
    """Peers and, below each, its partner: of the pairs from both sides, and of those who are alone."""
    both = torch.tensor([group for group in groups if len(group) == 2]).reshape(-1, 2).T
    yield from (one for one in (both, both.flip(0)) if one.numel())
    alone = torch.tensor([group for group in groups if len(group) == 1]).reshape(-1, 1).T
    if alone.numel():
        yield alone


if __name__ == "__main__":
    main()
