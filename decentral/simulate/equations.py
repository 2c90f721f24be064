"""The outer methods' equations once more, in float64 and from the papers: where an anchor must be after its records.

Written apart from decentral.optimizers, so that an error of a method, or of what it is told of its round, shows. Each
takes what the records of one fragment averaged, in order, and returns the sum of the anchor's moves.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from decentral.wire.messages import FrameRef

__all__ = ["EQUATIONS", "WEIGH", "Averaged"]

# Shape suffix: N = elements of one fragment, flat float64.

Keys = Mapping[str, Any]  # Any: of [outer], numbers


@dataclass(frozen=True, slots=True)
class Averaged:
    """What one record says of a fragment."""

    mean_N: Tensor  # of the contributions, as frames or owners' results have it
    contributors: Sequence[FrameRef]


def _plain(run: Sequence[Averaged], keys: Keys) -> Tensor:
    return -float(keys["lr"]) * torch.stack([one.mean_N for one in run]).sum(0)


def _nesterov(run: Sequence[Averaged], keys: Keys) -> Tensor:
    moved_N = momentum_N = torch.zeros_like(run[0].mean_N)
    for one in run:
        momentum_N = keys["momentum"] * momentum_N + one.mean_N
        moved_N = moved_N - _rate(keys["lr"], len(one.contributors)) * (one.mean_N + keys["momentum"] * momentum_N)
    return moved_N


def _rate(given: float | None, peers: int) -> float:
    """One that is unset follows the number of contributors: read from a heat-map of arXiv:2503.09799."""
    if given is not None:
        return given
    return 0.4 if peers == 1 else 0.6 if peers < 6 else 0.8


def _delayed_nesterov(run: Sequence[Averaged], keys: Keys) -> Tensor:
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


def _edit(run: Sequence[Averaged], keys: Keys) -> Tensor:
    """Algorithm 2 of arXiv:2412.07210 over all norms; a step whose contributors are all outliers moves nothing."""
    moved_N = momentum_N = torch.zeros_like(run[0].mean_N)
    usual: list[float] = []  # norms' count, mean, second moment and mean z**2
    frozen = 0  # rounds in a row of outliers alone
    for one in run:
        norms = [struct.unpack("<d", ref.summary)[0] for ref in one.contributors]
        fit = [norm for norm in norms if not _is_outlier(norm, usual, keys["warmup"])]
        frozen = 0 if fit else frozen + 1
        if frozen == keys["relearn_after"]:
            usual, frozen = [], 0
        if not fit:
            continue
        change_N = one.mean_N * min(1.0, keys["clip"] / (float(one.mean_N.norm()) + 1e-6))
        momentum_N = keys["momentum"] * momentum_N + change_N
        moved_N = moved_N - keys["lr"] * (change_N + keys["momentum"] * momentum_N)
        for norm in fit:
            usual = _learnt(norm, usual, keys["warmup"])
    return moved_N


def _is_outlier(norm: float, usual: Sequence[float], warmup: int) -> bool:
    if not usual or usual[0] < warmup or usual[2] <= 0:
        return False
    return (norm - usual[1]) / math.sqrt(usual[2]) > 3 * max(1.0, math.sqrt(usual[3]))


def _learnt(norm: float, usual: Sequence[float], warmup: int) -> list[float]:
    if not usual:
        return [1, norm, 0.0, 0.0]
    count, mean, squares, wild = usual
    off = norm - mean
    if count >= warmup and squares > 0:
        wild = 0.98 * wild + 0.02 * off * off / squares
    after = mean + 0.02 * off
    return [count + 1, after, 0.98 * (squares + 0.02 * off * (norm - after)), wild]


EQUATIONS: Mapping[str, Callable[[Sequence[Averaged], Keys], Tensor]] = {
    "sparseloco": _plain,
    "des_loc": _plain,
    "diloco": _nesterov,
    "streaming": _nesterov,
    "delayed_nesterov": _delayed_nesterov,
    "edit": _edit,
}
WEIGH = {"edit"}  # methods whose frames do not count alike: their mean is known where owners sent it
