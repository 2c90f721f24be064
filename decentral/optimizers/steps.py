"""Steps, merges and draws that several methods take, as pure functions of tensors.

Every operation is elementwise IEEE arithmetic without fused multiply-add: ``a + b * c`` is written as a product and a
sum, because ``add(alpha=...)`` may or may not fuse, and then peers would differ in the last bit.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from decentral.compressors.random import below, hash32
from decentral.errors import ConfigError
from decentral.optimizers.mean import LazyMean
from decentral.tensors.memory import Lazy
from decentral.tensors.ops import carry_over, difference, minus_times, with_momentum

__all__ = [
    "MOST_PARTS",
    "Carried",
    "Taken",
    "blend",
    "carry",
    "cos",
    "draw_one_of_each",
    "exp",
    "heavy_ball",
    "nesterov",
    "only_drawn",
    "power",
    "progress",
    "root",
    "sgd",
]

# ---- outer steps ----


def sgd(anchor: Tensor, gradient: Tensor, lr: float) -> Tensor:
    """``x <- x - lr*g``: torch's ``SGD``. Of a `LazyMean` that nobody has read no values are made."""
    with torch.no_grad():
        made = gradient.step_from(anchor, lr) if isinstance(gradient, LazyMean) else None
        return minus_times(anchor, gradient, lr) if made is None else made


def nesterov(
    anchor: Tensor, gradient: Tensor, momentum_buffer: Tensor, lr: float, momentum: float
) -> tuple[Tensor, Tensor]:
    """``m <- mu*m + g ; x <- x - lr*(g + mu*m)``: torch's ``SGD(nesterov=True)``, with m = 0 before the first step."""
    with torch.no_grad():
        return with_momentum(anchor, gradient, momentum_buffer, (lr, momentum), nesterov=True)


def heavy_ball(
    anchor: Tensor, gradient: Tensor, momentum_buffer: Tensor, lr: float, momentum: float
) -> tuple[Tensor, Tensor]:
    """``m <- mu*m + g ; x <- x - lr*m``: torch's ``SGD(nesterov=False)``, with m = 0 before the first step."""
    with torch.no_grad():
        return with_momentum(anchor, gradient, momentum_buffer, (lr, momentum), nesterov=False)


def root(square: Tensor) -> Tensor:
    """The square root, by way of float64: an error in the last bit of that is too small to round float32 otherwise,
    where a vector library's float32 root may differ from another machine's.
    """
    return square.double().sqrt().to(square.dtype)


# ---- what a peer learnt ----


class Taken(Lazy):
    """The live parameters as a contribution takes them; whoever takes them has, or may make later, their progress."""

    def __init__(self, make: Callable[[], Tensor], progress: Callable[[], Tensor]) -> None:
        super().__init__(make)
        self.progress = Lazy(progress)  # the anchor that they were taken with, less them


def progress(anchor: Tensor, local: Tensor) -> Tensor:
    """``anchor - local``: the change of nearly every method. Of what is `Taken` it is made when somebody reads it."""
    with torch.no_grad():
        return local.progress if isinstance(local, Taken) and not local.is_made else difference(anchor, local)


# ---- merging a new anchor into live parameters ----
#
# These trained on while the round was in flight.
#
# carry:  live <- anchor + (live - contributed)          keeps the inner steps made since the contribution
# blend:  live <- alpha*live + (1-alpha)*anchor          Streaming DiLoCo; alpha weighs the live copy
#
# Carry is what LOSCAR-SGD does to live parameters with its mask full (2026, arXiv:2605.20866: x <- mean + (z - y), z
# live and y as sent), which has a proof of convergence.
#
# Source: blend, Douillard et al., "Streaming DiLoCo", 2025, arXiv:2501.18512 (algorithm 2, line 9). Carry is the
# delayed update without its staleness: what was learnt since the contribution is the next round's pseudo-gradient.


class Carried(Lazy):
    """The result of `carry` for live parameters that nobody has read; they may be changed where they lie instead."""


def carry(live: Tensor, contributed: Tensor, anchor: Tensor) -> Tensor:
    """The merged live parameters, a new tensor; all of one shape.

    With no inner step since (live equal to contributed) that is the anchor bit for bit.
    """
    if isinstance(live, Lazy) and not live.is_made:
        return Carried(lambda: carry(live.tensor(), contributed, anchor))
    with torch.no_grad():
        return carry_over(live, contributed, anchor)


def blend(live: Tensor, anchor: Tensor, alpha: float) -> Tensor:
    """The merged live parameters, a new tensor; ``alpha`` 0 gives the anchor, 1 the live copy, bit for bit."""
    if not 0 <= alpha <= 1:
        raise ConfigError(f"blend(alpha={alpha}): the live copy's weight must be in [0, 1]")
    with torch.no_grad():
        if alpha in (0, 1):
            return (live if alpha else anchor).clone()
        return live * alpha + anchor * (1 - alpha)


# ---- parameters drawn by a round's number ----
#
# The same on every peer without a word or a generator.
#
# Of each run of ``parts`` consecutive parameters one, and in ``parts`` rounds each of them once: from a place on that
# is another one, by a hash of counters, in each run and for each pass through it.

# Shape suffixes: N = elements of one fragment; R = runs.

MOST_PARTS = 1 << 20
_MASK = (1 << 32) - 1


def draw_one_of_each(parts: int, step: int, numel: int) -> Tensor:
    """Return what is drawn in outer step ``step``, bool (N,); a last run that is shorter may have none."""
    turn, place = divmod(step, parts)
    run_R = torch.arange(-(-numel // parts), dtype=torch.int64, device="cpu")
    at_R = below(hash32(hash32(run_R & _MASK) ^ (turn & _MASK)), parts)
    one_R = run_R * parts + (at_R + place) % parts
    drawn_N = torch.zeros(numel, dtype=torch.bool, device="cpu")
    drawn_N[one_R[one_R < numel]] = True
    return drawn_N


def only_drawn(drawn_N: Tensor, base_N: Tensor, local_N: Tensor) -> tuple[Tensor, float]:
    """The parameters as a contribution speaks of them: what is not drawn is as it was written, so that what it learnt
    stays progress; and how much longer a change of all would be.
    """
    return torch.where(drawn_N, local_N, base_N), math.sqrt(len(local_N) / max(1, int(drawn_N.sum())))


# ---- exponential, cosine and powers ----
#
# Those of C's library differ in their last digits. Here they have the same bits on every machine: products and sums of
# float64, in one order.

_HALVINGS = 10
_TERMS = 16  # |x| / 1024 is below 0.7: the seventeenth is below 1e-16 of the sum


def exp(power: float) -> float:
    """e to a ``power`` up to 0, to about 12 digits; 0 below -700."""
    if power < -700.0:
        return 0.0
    small, term, total = power / (1 << _HALVINGS), 1.0, 1.0
    for n in range(1, _TERMS + 1):
        term = term * small / n
        total += term
    for _ in range(_HALVINGS):
        total *= total
    return total


def cos(angle: float) -> float:
    """The cosine of an angle between 0 and half a turn, to about 12 digits: its series, whose tail is below 1e-16."""
    square, term, total = angle * angle, 1.0, 1.0
    for n in range(1, _TERMS + 1):
        term = -term * square / ((2 * n - 1) * (2 * n))
        total += term
    return total


def power(base: float, times: int) -> float:
    """``base ** times`` for a whole number from 0, by squaring."""
    result, square = 1.0, base
    while times:
        result = result * square if times & 1 else result
        square, times = square * square, times >> 1
    return result
