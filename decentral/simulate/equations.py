"""The outer methods' equations once more, in float64 and from the papers: where an anchor must be after its records.

Written apart from decentral.optimizers, so that an error of a method, or of what it is told of its round, shows. They
take what the records of one fragment averaged, in order, and return the sum of the anchor's moves. Pairs: pulls.py.
"""

from __future__ import annotations

import math
import statistics
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from decentral.simulate.signs import signs
from decentral.wire.messages import FrameRef

__all__ = ["EQUATIONS", "SHARE", "WEIGH", "Averaged"]

# Shape suffixes: N = elements of one fragment, which is one tensor, flat float64; K = contributors.

Keys = Mapping[str, Any]  # Any: of [outer], numbers


@dataclass(frozen=True, slots=True)
class Averaged:
    """What one record says of a fragment."""

    mean_N: Tensor  # of the contributions, as frames or owners' results have it
    contributors: Sequence[FrameRef]
    rows_KN: Tensor = field(default_factory=lambda: torch.zeros(0))  # what each sent; of a reduce the mean, K times
    ages: Sequence[int] = ()  # outer steps of the fragment by which each is late
    name: str = ""  # of the fragment's tensor


def _plain(run: Sequence[Averaged], keys: Keys) -> Tensor:
    return -float(keys["lr"]) * torch.stack([one.mean_N for one in run]).sum(0)


def _nesterov(run: Sequence[Averaged], keys: Keys) -> Tensor:
    moved_N = momentum_N = torch.zeros_like(run[0].mean_N)
    for t, one in enumerate(run):
        if keys.get("restart") and t % keys["restart"] == 0:
            momentum_N = torch.zeros_like(momentum_N)
        momentum_N = keys["momentum"] * momentum_N + one.mean_N
        moved_N = moved_N - _rate(keys["lr"], len(one.contributors)) * (one.mean_N + keys["momentum"] * momentum_N)
    return moved_N


def _sparta(run: Sequence[Averaged], keys: Keys) -> Tensor:
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


def _heavy_ball(run: Sequence[Averaged], keys: Keys) -> Tensor:
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


def _delayed(run: Sequence[Averaged], keys: Keys) -> Tensor:
    return _nesterov(_late(run, keys), keys)


def _co2(run: Sequence[Averaged], keys: Keys) -> Tensor:
    """As recalled of arXiv:2401.16265: a constant penalty, and each coordinate of the momentum cut."""
    moved_N = momentum_N = torch.zeros_like(run[0].mean_N)
    for one in _late(run, keys):
        momentum_N = (keys["momentum"] * momentum_N + one.mean_N / keys["penalty"]).clamp(-keys["bound"], keys["bound"])
        moved_N = moved_N - keys["lr"] * momentum_N
    return moved_N


def _pier(run: Sequence[Averaged], keys: Keys) -> Tensor:
    """Nesterov with a momentum that rises in a line, stays, and falls in a line."""
    top, rise, start, over, floor = (keys[k] for k in ("momentum", "rise", "decay_from", "decay_over", "floor"))
    moved_N = momentum_N = torch.zeros_like(run[0].mean_N)
    for t, one in enumerate(run):
        fallen = 0.0 if t < start else min(1.0, (t - start) / over) if over else 1.0
        mu = top * min(1.0, (t + 1) / rise if rise else 1.0) - (top - floor) * fallen
        momentum_N = mu * momentum_N + one.mean_N
        moved_N = moved_N - keys["lr"] * (one.mean_N + mu * momentum_N)
    return moved_N


def _fedopt(run: Sequence[Averaged], keys: Keys) -> Tensor:
    """Algorithm 2 of arXiv:2003.00295, with the sign of a descent direction."""
    moved_N = mean_N = torch.zeros_like(run[0].mean_N)
    square_N = torch.full_like(mean_N, keys["tau"] ** 2)
    for one in run:
        fresh_N, kept = one.mean_N**2, keys["beta2"]
        mean_N = keys["beta1"] * mean_N + (1 - keys["beta1"]) * one.mean_N
        square_N = {
            "adagrad": square_N + fresh_N,
            "adam": kept * square_N + (1 - kept) * fresh_N,
            "yogi": square_N - (1 - kept) * fresh_N * (square_N - fresh_N).sign(),
        }[keys["variant"]]
        moved_N = moved_N - keys["lr"] * mean_N / (square_N.sqrt() + keys["tau"])
    return moved_N


def _muloco(run: Sequence[Averaged], keys: Keys) -> Tensor:
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


def _signs(run: Sequence[Averaged], keys: Keys) -> Tensor:
    """The last line of arXiv:2411.19870: a step of one size by the sign of what was averaged, or by that itself."""
    means = [one.mean_N.sign() if keys["step"] == "sign" else one.mean_N for one in run]
    return -float(keys["lr"]) * torch.stack(means).sum(0)


def _partial_updates(run: Sequence[Averaged], keys: Keys) -> Tensor:
    """Nesterov of each slice by itself, over the mean of its owners: arXiv:2509.22418."""
    slices, numel = keys["slices"], len(run[0].mean_N)
    moved_N, momentum_N = torch.zeros_like(run[0].mean_N), torch.zeros_like(run[0].mean_N)
    for one in run:
        said = [number for ref in one.contributors for (number,) in struct.iter_unpack("<H", ref.summary)]
        for number in set(said):
            place = slice(numel * number // slices, numel * (number + 1) // slices)
            change = one.mean_N[place] * (len(one.contributors) / said.count(number))
            momentum_N[place] = keys["momentum"] * momentum_N[place] + change
            moved_N[place] -= keys["lr"] * (change + keys["momentum"] * momentum_N[place])
    return moved_N


def _fedbuff(run: Sequence[Averaged], keys: Keys) -> Tensor:
    """Arrivals scaled by (1 + age)^(-discount/2), divided by their number: arXiv:2106.06639."""
    return -float(keys["lr"]) * torch.stack([_aged(one.rows_KN, one.ages, keys["discount"]) for one in run]).sum(0)


def _aged(rows_KN: Tensor, ages: Sequence[int], discount: int) -> Tensor:
    share_K = torch.tensor([(1 + age) ** (-discount / 2) for age in ages], dtype=torch.float64)
    return (share_K[:, None] * rows_KN).mean(0)


def _cgad(run: Sequence[Averaged], keys: Keys) -> Tensor:
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


def _heloco(run: Sequence[Averaged], keys: Keys) -> Tensor:
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


def _decoupled(run: Sequence[Averaged], keys: Keys) -> Tensor:
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


def _just_one_byte(run: Sequence[Averaged], keys: Keys) -> Tensor:
    """arXiv:2306.10015 with signs for directions; of each summary seed, number, and a byte for each derivative."""
    moved_N = torch.zeros_like(run[0].mean_N)
    for one in run:
        told = [ref.summary for ref in one.contributors if len(ref.summary) > 12]
        for summary in told:
            seed, first = struct.unpack_from("<QI", summary)
            for place, byte in enumerate(summary[12:]):
                size = 2 ** (((byte & 127) - 64) / 8) if byte & 127 else 0.0
                rate = (-size if byte & 128 else size) / math.sqrt(sum(len(each) - 12 for each in told))
                moved_N = moved_N - keys["lr"] * rate * signs(seed, first + place, one.name, len(moved_N))
    return moved_N


EQUATIONS: Mapping[str, Callable[[Sequence[Averaged], Keys], Tensor]] = {
    "sparseloco": _plain,
    "sparta": _sparta,
    "local_sgd": _plain,
    "slowmo": _heavy_ball,
    "delayed": _delayed,
    "co2": _co2,
    "fedopt": _fedopt,
    "pier": _pier,
    "demo_sgd": _signs,
    "des_loc": _plain,
    "diloco": _nesterov,
    "eager": _nesterov,
    "mt_dao": _plain,
    "muloco": _muloco,
    "partial_updates": _partial_updates,
    "scaffold": _plain,
    "spes": _plain,  # of a model without experts, which belongs to all
    "streaming": _nesterov,
    "delayed_nesterov": _delayed_nesterov,
    "edit": _edit,
    "a_edit": _edit,
    "fedbuff": _fedbuff,
    "cgad": _cgad,
    "heloco": _heloco,
    "decoupled": _decoupled,
    "just_one_byte": _just_one_byte,
}
SHARE = {"cgad", "fedbuff", "partial_updates"}  # methods whose divisor is known of a reduce where all weigh the same
# masha has no equation here: which values are the largest is decided by float32's last bits, of which many are equal.
# Methods whose frames do not count alike, or whose step is another where a mean is zero up to rounding: their mean is
# known where owners sent it.
WEIGH = {"edit", "a_edit", "demo_sgd"}
