"""Steps along the mean, and with a momentum over the means."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from decentral.simulate.equations.averaged import Averaged, Keys

__all__ = ["co2", "delayed", "delayed_nesterov", "heavy_ball", "muloco", "nesterov", "pier", "plain", "sparta"]


def plain(run: Sequence[Averaged], keys: Keys) -> Tensor:
    """The mean, at the rate."""
    return -float(keys["lr"]) * torch.stack([one.mean_N for one in run]).sum(0)


def nesterov(run: Sequence[Averaged], keys: Keys) -> Tensor:
    """Nesterov on the mean: arXiv:2311.08105; the rate of the number of contributors where none is given."""
    moved_N = momentum_N = torch.zeros_like(run[0].mean_N)
    for t, one in enumerate(run):
        if keys.get("restart") and t % keys["restart"] == 0:
            momentum_N = torch.zeros_like(momentum_N)
        momentum_N = keys["momentum"] * momentum_N + one.mean_N
        moved_N = moved_N - _rate(keys["lr"], len(one.contributors)) * (one.mean_N + keys["momentum"] * momentum_N)
    return moved_N


def sparta(run: Sequence[Averaged], keys: Keys) -> Tensor:
    """The mean, and in whole rounds Nesterov from where the last of them ended: gym's two steps in turns."""
    start_N = momentum_N = moved_N = torch.zeros_like(run[0].mean_N)
    for t, one in enumerate(run, start=1):
        moved_N = moved_N - one.mean_N
        if keys["whole"] and t % keys["whole"] == 0:
            change_N = start_N - moved_N
            momentum_N = keys["momentum"] * momentum_N + change_N
            start_N = moved_N = start_N - keys["lr"] * (change_N + keys["momentum"] * momentum_N)
    return moved_N


def _rate(given: float | None, peers: int) -> float:
    """One that is unset follows the number of contributors: read from a heat-map of arXiv:2503.09799."""
    if given is not None:
        return given
    return 0.4 if peers == 1 else 0.6 if peers < 6 else 0.8


def heavy_ball(run: Sequence[Averaged], keys: Keys) -> Tensor:
    """A momentum of the mean, and a step along it: arXiv:1910.00643."""
    moved_N = momentum_N = torch.zeros_like(run[0].mean_N)
    for one in run:
        momentum_N = keys["momentum"] * momentum_N + one.mean_N
        moved_N = moved_N - keys["lr"] * momentum_N
    return moved_N


def _late(run: Sequence[Averaged], keys: Keys) -> Sequence[Averaged]:
    """What each round applies where it is the round before's: zero in the first, and the last one's never."""
    if not keys["late"]:
        return run
    return [Averaged(torch.zeros_like(run[0].mean_N), run[0].contributors), *run[:-1]]


def delayed(run: Sequence[Averaged], keys: Keys) -> Tensor:
    """Nesterov, on the mean of the round before."""
    return nesterov(_late(run, keys), keys)


def co2(run: Sequence[Averaged], keys: Keys) -> Tensor:
    """As recalled of arXiv:2401.16265: a constant penalty, and each coordinate of the momentum cut."""
    moved_N = momentum_N = torch.zeros_like(run[0].mean_N)
    for one in _late(run, keys):
        momentum_N = (keys["momentum"] * momentum_N + one.mean_N / keys["penalty"]).clamp(-keys["bound"], keys["bound"])
        moved_N = moved_N - keys["lr"] * momentum_N
    return moved_N


def pier(run: Sequence[Averaged], keys: Keys) -> Tensor:
    """Nesterov with a momentum that rises in a line, stays, and falls in a line."""
    top, rise, start, over, floor = (keys[k] for k in ("momentum", "rise", "decay_from", "decay_over", "floor"))
    moved_N = momentum_N = torch.zeros_like(run[0].mean_N)
    for t, one in enumerate(run):
        fallen = 0.0 if t < start else min(1.0, (t - start) / over) if over else 1.0
        mu = top * min(1.0, (t + 1) / rise if rise else 1.0) - (top - floor) * fallen
        momentum_N = mu * momentum_N + one.mean_N
        moved_N = moved_N - keys["lr"] * (one.mean_N + mu * momentum_N)
    return moved_N


def muloco(run: Sequence[Averaged], keys: Keys) -> Tensor:
    """Nesterov's recursion at the settings of the nearest of 1, 8 and 16 peers in arXiv:2505.23725."""
    moved_N = momentum_N = torch.zeros_like(run[0].mean_N)
    for one in run:
        apart = {peers: abs(math.log(len(one.contributors) / peers)) for peers in (1, 8, 16)}
        lr, mu = {1: (0.7, 0.6), 8: (0.9, 0.8), 16: (1.0, 0.9)}[min(apart, key=apart.__getitem__)]
        lr = lr if keys["lr"] is None else keys["lr"]
        mu = mu if keys["momentum"] is None else keys["momentum"]
        momentum_N = mu * momentum_N + one.mean_N
        moved_N = moved_N - lr * (one.mean_N + mu * momentum_N)
    return moved_N


def delayed_nesterov(run: Sequence[Averaged], keys: Keys) -> Tensor:
    """Algorithm 3 of arXiv:2401.09135, with c = ``spread``."""
    n, spread, momentum = keys["delay"], keys["spread"], keys["momentum"]
    moved_N = momentum_N = buffer_N = torch.zeros_like(run[0].mean_N)
    for t, one in enumerate(run):
        buffer_N, share = buffer_N + one.mean_N, spread
        if (t + 1) % n == 0:
            momentum_N = momentum * momentum_N + buffer_N / n
            buffer_N, share = torch.zeros_like(buffer_N), 1 - spread * n + spread
        moved_N = moved_N - keys["lr"] * (share * momentum * momentum_N + one.mean_N / n)
    return moved_N
