"""Steps that ask what each contributor sent: how long, how late, which way."""

from __future__ import annotations

import math
import statistics
import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from decentral.simulate.equations.averaged import Averaged, Keys

__all__ = ["cgad", "decoupled", "edit", "fedbuff", "heloco"]


def edit(run: Sequence[Averaged], keys: Keys) -> Tensor:
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


def fedbuff(run: Sequence[Averaged], keys: Keys) -> Tensor:
    """Arrivals scaled by (1 + age)^(-discount/2), divided by their number: arXiv:2106.06639."""
    return -float(keys["lr"]) * torch.stack([_aged(one.rows_KN, one.ages, keys["discount"]) for one in run]).sum(0)


def _aged(rows_KN: Tensor, ages: Sequence[int], discount: int) -> Tensor:
    share_K = torch.tensor([(1 + age) ** (-discount / 2) for age in ages], dtype=torch.float64)
    return (share_K[:, None] * rows_KN).mean(0)


def cgad(run: Sequence[Averaged], keys: Keys) -> Tensor:
    """Adam on what gate and decay leave of each: arXiv:2605.09126."""
    parameter_N = torch.zeros_like(run[0].mean_N, requires_grad=True)
    betas = float(keys["beta1"]), float(keys["beta2"])
    adam = torch.optim.Adam([parameter_N], float(keys["lr"]), betas, float(keys["eps"]))
    for one in run:
        angles = [math.pi * min(age / keys["cutoff"], 1.0) for age in one.ages]
        shares = [
            (1 + math.cos(angle)) / 2 * math.exp(-keys["decay"] * age)
            for angle, age in zip(angles, one.ages, strict=True)
        ]
        scaled = [share * row_N for share, row_N in zip(shares, one.rows_KN, strict=True)]
        counted = [row_N for row_N, age in zip(scaled, one.ages, strict=True) if age < keys["cutoff"]]
        if counted:
            parameter_N.grad = torch.stack(counted).mean(0)
            adam.step()
    return parameter_N.detach()


def heloco(run: Sequence[Averaged], keys: Keys) -> Tensor:
    """Each change turned towards the momentum before it, in three cases: arXiv:2606.00271."""
    moved_N = momentum_N = torch.zeros_like(run[0].mean_N)
    for one in run:
        turned = [_turned(row_N, momentum_N, keys) for row_N in one.rows_KN]
        change_N = _aged(torch.stack(turned), one.ages, keys["discount"])
        momentum_N = keys["momentum"] * momentum_N + (1 - keys["momentum"]) * change_N
        moved_N = moved_N - keys["lr"] * (change_N + keys["momentum"] * momentum_N)
    return moved_N


def _turned(change_N: Tensor, momentum_N: Tensor, keys: Keys) -> Tensor:
    length, other = float(change_N.norm()), float(momentum_N.norm())
    keep, shrink, most = float(keys["keep"]), float(keys["shrink"]), float(keys["most"])
    if not length or not other:
        return change_N
    own_N, toward_N = change_N / length, momentum_N / other
    cosine, sure = float(own_N @ toward_N), length / (length + keys["trust"] * other)
    if cosine >= keep:
        return change_N
    if cosine < 0:
        shrunk_N: Tensor = change_N - min(-shrink * cosine * sure, most) * cosine * length * toward_N
        return shrunk_N
    share = min(float(keys["turn"]) * (1 - cosine) * sure, 1.0)
    mixed_N = (1 - share) * own_N + share * toward_N
    turned_N: Tensor = length * mixed_N / mixed_N.norm()
    return turned_N


def decoupled(run: Sequence[Averaged], keys: Keys) -> Tensor:
    """Nesterov on the mean direction at the mean length, by tokens squared over steps: arXiv:2604.21428."""
    moved_N = momentum_N = torch.zeros_like(run[0].mean_N)
    for one in run:
        worth = [ref.tokens**2 / max(1, ref.steps) for ref in one.contributors]
        usual = statistics.median_low(worth)
        weight_K = torch.tensor([min(max(value / usual, 1 / 16), 16.0) for value in worth], dtype=torch.float64)
        length_K = one.rows_KN.norm(dim=1)
        toward_N = (weight_K[:, None] * one.rows_KN / length_K.clamp(min=1e-300)[:, None]).sum(0) / weight_K.sum()
        change_N = (weight_K[:, None] * one.rows_KN).sum(0) / weight_K.sum()
        if keys["mean"] == "radial" and float(toward_N.norm()) > 1e-6:
            change_N = float((weight_K * length_K).sum() / weight_K.sum()) * toward_N / toward_N.norm()
        momentum_N = keys["momentum"] * momentum_N + change_N
        moved_N = moved_N - keys["lr"] * (change_N + keys["momentum"] * momentum_N)
    return moved_N
