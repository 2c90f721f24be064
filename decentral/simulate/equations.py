"""The methods' equations once more, in float64 and from the papers.

Written apart from `decentral.optimizers`, so that an error of a method, or of what it is told of its round, shows.

Shape suffixes: N = elements of one fragment, which is one tensor, flat float64; K = contributors.
"""

from __future__ import annotations

import hashlib
import math
import statistics
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from decentral.wire.messages import FrameRef

__all__ = [
    "EQUATIONS",
    "NOT_LINEAR",
    "PULLS",
    "SHARE",
    "WEIGH",
    "Averaged",
    "Keys",
    "Stood",
    "cgad",
    "co2",
    "decoupled",
    "delayed",
    "delayed_nesterov",
    "edit",
    "fedbuff",
    "fedopt",
    "heavy_ball",
    "heloco",
    "just_one_byte",
    "muloco",
    "nesterov",
    "partial_updates",
    "pier",
    "plain",
    "signed",
    "signs",
    "sparta",
    "state_name",
]

Keys = Mapping[str, Any]  # Any: of [outer], numbers


@dataclass(frozen=True, slots=True)
class Averaged:
    """The contributions to one fragment that a record names, and their mean."""

    mean_N: Tensor  # of the contributions, as frames or owners' results have it
    contributors: Sequence[FrameRef]
    rows_KN: Tensor = field(default_factory=lambda: torch.zeros(0))  # what each sent; of a reduce the mean, K times
    ages: Sequence[int] = ()  # outer steps of the fragment by which each is late
    name: str = ""  # of the fragment's tensor


# ---- steps along the mean ----
#
# With and without a momentum over the means.


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
    """Return the rate; unset, it follows the number of contributors: read from a heat-map of arXiv:2503.09799."""
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


def delayed(run: Sequence[Averaged], keys: Keys) -> Tensor:
    """Nesterov, on the mean of the round before: zero in the first, and the last one's never."""
    if not keys["late"]:
        return nesterov(run, keys)
    return nesterov([Averaged(torch.zeros_like(run[0].mean_N), run[0].contributors), *run[:-1]], keys)


def co2(run: Sequence[Averaged], keys: Keys) -> Tensor:
    """As recalled of arXiv:2401.16265: a constant penalty, and each coordinate of the momentum cut."""
    moved_N = momentum_N = torch.zeros_like(run[0].mean_N)
    for one in run:
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


# ---- steps that ask for each contribution ----
#
# How long, how late, which way.


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
        turned = [_turn(row_N, momentum_N, keys) for row_N in one.rows_KN]
        change_N = _aged(torch.stack(turned), one.ages, keys["discount"])
        momentum_N = keys["momentum"] * momentum_N + (1 - keys["momentum"]) * change_N
        moved_N = moved_N - keys["lr"] * (change_N + keys["momentum"] * momentum_N)
    return moved_N


def _turn(change_N: Tensor, momentum_N: Tensor, keys: Keys) -> Tensor:
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
        weight_K = torch.tensor([min(max(value / usual, 1 / 16), 4.0) for value in worth], dtype=torch.float64)
        length_K = one.rows_KN.norm(dim=1)
        toward_N = (weight_K[:, None] * one.rows_KN / length_K.clamp(min=1e-300)[:, None]).sum(0) / weight_K.sum()
        change_N = (weight_K[:, None] * one.rows_KN).sum(0) / weight_K.sum()
        if keys["mean"] == "radial" and float(toward_N.norm()) > 1e-6:
            change_N = float((weight_K * length_K).sum() / weight_K.sum()) * toward_N / toward_N.norm()
        momentum_N = keys["momentum"] * momentum_N + change_N
        moved_N = moved_N - keys["lr"] * (change_N + keys["momentum"] * momentum_N)
    return moved_N


# ---- steps that treat coordinates apart ----
#
# By size, by sign, by slice, or along directions that a seed stands for.


def fedopt(run: Sequence[Averaged], keys: Keys) -> Tensor:
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


def signed(run: Sequence[Averaged], keys: Keys) -> Tensor:
    """The last line of arXiv:2411.19870: a step of one size by the sign of what was averaged, or by that itself."""
    means = [one.mean_N.sign() if keys["step"] == "sign" else one.mean_N for one in run]
    return -float(keys["lr"]) * torch.stack(means).sum(0)


def partial_updates(run: Sequence[Averaged], keys: Keys) -> Tensor:
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


def just_one_byte(run: Sequence[Averaged], keys: Keys) -> Tensor:
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


# ---- random directions ----
#
# By Python's whole numbers: what zeroth-order methods are judged by.
#
# Source: Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", 2011: Philox4x32-10.

_WORD = (1 << 32) - 1


def signs(seed: int, number: int, name: str, numel: int) -> Tensor:
    """1 of a bit that is not set, else -1: flat float64, (numel,)."""
    named = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
    bits = 0
    for block in range(-(-numel // 128)):
        words = _philox((block, number & _WORD, named & _WORD, named >> 32), (seed & _WORD, seed >> 32))
        bits |= sum(word << 32 * place for place, word in enumerate(words)) << 128 * block
    return torch.tensor([-1.0 if bits >> place & 1 else 1.0 for place in range(numel)], dtype=torch.float64)


def _philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    (a, b, c, d), (left, right) = counter, key
    for _ in range(10):
        first, second = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = second >> 32 ^ b ^ left, second & _WORD, first >> 32 ^ d ^ right, first & _WORD
        left, right = left + 0x9E3779B9 & _WORD, right + 0xBB67AE85 & _WORD
    return a, b, c, d


# ---- the equation of each method ----
#
# Where an anchor must be after its records: they take what the records of one fragment averaged, in order, and return
# the sum of the anchor's moves. ``PULLS`` has those of gossip.

# masha has no equation here: which values are the largest is decided by float32's last bits, of which many are equal.
EQUATIONS: Mapping[str, Callable[[Sequence[Averaged], Keys], Tensor]] = {
    "sparseloco": plain,
    "sparta": sparta,
    "local_sgd": plain,
    "slowmo": heavy_ball,
    "delayed": delayed,
    "co2": co2,
    "fedopt": fedopt,
    "pier": pier,
    "demo_sgd": signed,
    "des_loc": plain,
    "diloco": nesterov,
    "eager": nesterov,
    "mt_dao": plain,
    "muloco": muloco,
    "partial_updates": partial_updates,
    "scaffold": plain,
    "spes": plain,  # of a model without experts, which belongs to all
    "streaming": nesterov,
    "delayed_nesterov": delayed_nesterov,
    "edit": edit,
    "a_edit": edit,
    "fedbuff": fedbuff,
    "cgad": cgad,
    "heloco": heloco,
    "decoupled": decoupled,
    "just_one_byte": just_one_byte,
}
SHARE = {"cgad", "fedbuff", "partial_updates"}  # methods whose divisor is known of a reduce where all weigh the same
# Methods whose frames do not count alike, or whose step is another where a mean is zero up to rounding: their mean is
# known where owners sent it.
WEIGH = {"edit", "a_edit", "demo_sgd"}


# ---- one of a pair of gossip ----
#
# How it moves, but for the pull: over both of a pair the pulls towards their mean cancel, whatever was lost of what
# they told each other.

_STATE = "state/"


def state_name(name: str) -> str:
    """Return what a tensor of a method's state is called in a trace."""
    return _STATE + name


@dataclass(frozen=True, slots=True)
class Stood:
    """Where one peer of a pair stood, and what it contributed."""

    before_N: Tensor
    change_N: Tensor  # as it was sent, or stayed at home: anchor - local, or by its paper local - anchor
    state: Mapping[str, Tensor]

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Stood:
        """From the trace's entry of a step."""
        state = {name.removeprefix(_STATE): one_N.double() for name, one_N in tensors.items() if _STATE in name}
        return cls(tensors["before"].double(), tensors["change"].double(), state)


def _push(one: Stood, keys: Keys) -> Tensor:
    """Equation 2 of arXiv:2506.10911, the sign as in the authors' code."""
    return float(keys["alpha"]) * one.state["momentum"] + float(keys["beta"]) * one.change_N


def _alone(one: Stood, keys: Keys) -> Tensor:
    return -float(keys["lr"]) * one.change_N


def _onward(one: Stood, keys: Keys) -> Tensor:
    """arXiv:2606.11081 without its Laplacian."""
    p_N = one.before_N - float(keys["lr"]) * one.change_N
    return p_N - one.before_N + float(keys["momentum"]) * (p_N - one.state["before"])


def _mix(one: Stood, keys: Keys) -> Tensor:
    """The matrix exponential of arXiv:2306.08289 over one round."""
    rate = 1 / (2 * math.sqrt(keys["chi1"] * keys["chi2"]))
    flow = torch.linalg.matrix_exp(torch.tensor([[-rate, rate], [rate, -rate]], dtype=torch.float64))
    both_2N = torch.stack([one.before_N, one.state["twin"]]) - float(keys["lr"]) * one.change_N
    return torch.mv(both_2N.T, flow[0]) - one.before_N


PULLS: Mapping[str, Callable[[Stood, Keys], Tensor]] = {
    "noloco": _push,
    "gasloc": _onward,
    "a2cid2": _mix,
    "ad_psgd": _alone,
    "late_merge": _alone,
    "variance_corrected": _alone,
}
NOT_LINEAR = {"variance_corrected"}  # it keeps the mean of a matrix's values, and no single one
