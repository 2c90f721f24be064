"""Elementwise steps as one pass over memory each, on all threads that torch may use.

A model's parameters are longer than any cache, so what a step costs is how often they go through memory: torch reads
and writes every intermediate result. Each operation is rounded as in torch, product and sum apart, and the threads
change no bit. For other devices and dtypes torch does the same.
"""
# Shape suffix: N = values; of tensors of any shape, all of one.

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from decentral.tensors.alloc import fresh_like
from decentral.tensors.compiled import compiled
from decentral.tensors.lying import LANES, flat, lie_alike
from decentral.tensors.threads import WORTH_IT, spread

__all__ = ["carried", "difference", "difference_and_norm", "divide", "minus_quotient", "minus_times", "with_momentum"]

R = TypeVar("R")
Arrays = tuple[Any, ...]  # numpy's
_IN_CACHE = 4096  # values
_EXPONENT = np.uint32(0x7F800000)  # all ones in NaN and Inf, and in nothing else


def difference(left: Tensor, right: Tensor) -> Tensor:
    """``left - right``, new."""
    if not lie_alike(left, right):
        return left - right
    return _made(_difference, left, right)


def difference_and_norm(left: Tensor, right: Tensor) -> tuple[Tensor, float]:
    """``left - right``, new, and its Euclidean norm, in one pass: finite if, and only if, all of it is, for float64
    holds every sum of squares. The norm's last bits depend on the number of threads.
    """
    if not lie_alike(left, right):
        made = left - right
        return made, float(torch.linalg.vector_norm(made, dtype=torch.float64))
    made = fresh_like(left)
    arrays = tuple(map(flat, (left, right, made)))
    return made, math.sqrt(sum(_over(made.numel(), arrays, lambda cut: float(_difference_and_squares(*cut)))))


def minus_times(left: Tensor, right: Tensor, factor: float) -> Tensor:
    """``left - right * factor``, new; the product is rounded first."""
    if not lie_alike(left, right):
        return left - right * factor
    return _made(_minus_times, left, right, np.float32(factor))


def with_momentum(
    anchor: Tensor, change: Tensor, momentum: Tensor, factors: tuple[float, float], *, nesterov: bool
) -> tuple[Tensor, Tensor]:
    """The anchor after SGD with momentum along ``change``, and the momentum, both new. ``factors``: lr and mu.

    ``m <- m*mu + change``, then Nesterov's ``anchor - (m*mu + change)*lr``, or the heavy ball's ``anchor - m*lr``.
    """
    lr, mu = factors
    if not lie_alike(anchor, change, momentum):
        buffer = momentum * mu + change
        return anchor - (buffer * mu + change if nesterov else buffer) * lr, buffer
    made, kept = fresh_like(anchor), fresh_like(anchor)
    arrays = tuple(map(flat, (anchor, change, momentum, made, kept)))
    kernel: Any = _nesterov if nesterov else _heavy_ball
    numbers = np.float32(lr), np.float32(mu)
    _over(made.numel(), arrays, lambda cut: kernel(*cut, *numbers))
    return made, kept


def carried(live: Tensor, contributed: Tensor, anchor: Tensor) -> Tensor:
    """``anchor + (live - contributed)``, and ``anchor`` bit for bit where the two are equal; new."""
    if not lie_alike(live, contributed, anchor):
        return torch.where(live == contributed, anchor, anchor + (live - contributed))
    return _made(_carried, live, contributed, anchor)


def divide(total: Tensor, divisor: float) -> bool:
    """``total /= divisor`` in place; returns whether all of it is finite then."""
    if not lie_alike(total):
        total /= torch.full_like(total.view(-1)[:1], divisor)  # a tensor: CUDA turns /number into *(1/number)
        return bool(torch.isfinite(total).all())
    arrays = (flat(total), flat(total).view(np.uint32))
    return all(_over(total.numel(), arrays, lambda cut: bool(_divide(cut[0], cut[1], np.float32(divisor)))))


def minus_quotient(left: Tensor, total: Tensor, made: Tensor, divisor: float, factor: float) -> bool:
    """``made <- left - total / divisor * factor``, each step rounded, and zeros in ``total``; whether all is finite.

    Of flat float32 tensors on the processor, on the calling thread: it is for pieces that its cache holds.
    """
    assert lie_alike(left, total, made), "flat float32 on the processor"
    numbers = np.float32(divisor), np.float32(factor)
    return bool(_minus_quotient(flat(left), flat(total), flat(made), flat(made).view(np.uint32), *numbers))


def _made(kernel: Callable[..., Any], *given: Any) -> Tensor:
    """A new tensor that the kernel fills from the given ones; numbers come after them."""
    made = fresh_like(given[0])
    arrays = tuple(flat(one) for one in (*given, made) if isinstance(one, Tensor))
    numbers = tuple(one for one in given if not isinstance(one, Tensor))
    _over(made.numel(), arrays, lambda cut: kernel(*cut, *numbers))
    return made


def _over(numel: int, arrays: Arrays, work: Callable[[Arrays], R]) -> list[R]:
    """The work on the arrays, cut alike for the threads."""
    threads = torch.get_num_threads() if numel >= WORTH_IT else 1
    each = -(-numel // threads) if numel else 1
    cuts = [tuple(array[start : start + each] for array in arrays) for start in range(0, numel, each)]
    return spread(work, cuts, numel)


@compiled
def _difference(left, right, made):  # type: ignore[no-untyped-def]
    for i in range(made.size):
        made[i] = left[i] - right[i]


@compiled
def _difference_and_squares(left, right, made):  # type: ignore[no-untyped-def]
    lanes, whole = np.zeros(LANES, dtype=np.float64), made.size // LANES * LANES
    for start in range(0, whole, LANES):
        for lane in range(LANES):
            value = left[start + lane] - right[start + lane]
            made[start + lane] = value
            lanes[lane] += np.float64(value) * np.float64(value)
    for i in range(whole, made.size):
        made[i] = left[i] - right[i]
        lanes[0] += np.float64(made[i]) * np.float64(made[i])
    return lanes.sum()


@compiled
def _minus_times(left, right, made, factor):  # type: ignore[no-untyped-def]
    for i in range(made.size):
        made[i] = left[i] - right[i] * factor


@compiled
def _minus_quotient(left, total, made, bits, divisor, factor):  # type: ignore[no-untyped-def]
    found = np.uint32(0)
    for start in range(0, made.size, _IN_CACHE):
        one, value, quotient = (
            left[start : start + _IN_CACHE],
            made[start : start + _IN_CACHE],
            total[start : start + _IN_CACHE],
        )
        bit = bits[start : start + _IN_CACHE]
        for i in range(value.size):
            value[i] = one[i] - quotient[i] / divisor * factor
            quotient[i] = 0
        for i in range(bit.size):
            found |= np.uint32((bit[i] & _EXPONENT) == _EXPONENT)
    return found == 0


@compiled
def _nesterov(anchor, change, momentum, made, kept, lr, mu):  # type: ignore[no-untyped-def]
    for i in range(made.size):
        buffer = momentum[i] * mu + change[i]
        kept[i] = buffer
        made[i] = anchor[i] - (buffer * mu + change[i]) * lr


@compiled
def _heavy_ball(anchor, change, momentum, made, kept, lr, mu):  # type: ignore[no-untyped-def]
    for i in range(made.size):
        buffer = momentum[i] * mu + change[i]
        kept[i] = buffer
        made[i] = anchor[i] - buffer * lr


@compiled
def _carried(live, contributed, anchor, made):  # type: ignore[no-untyped-def]
    for i in range(made.size):
        moved = anchor[i] + (live[i] - contributed[i])
        made[i] = anchor[i] if live[i] == contributed[i] else moved


@compiled
def _divide(total, bits, divisor):  # type: ignore[no-untyped-def]
    found = np.uint32(0)
    for start in range(0, total.size, _IN_CACHE):
        value, bit = total[start : start + _IN_CACHE], bits[start : start + _IN_CACHE]
        for i in range(value.size):  # from 0 on: both loops are vector code then
            value[i] /= divisor
        for i in range(bit.size):
            found |= np.uint32((bit[i] & _EXPONENT) == _EXPONENT)
    return found == 0
