"""Loops over tensors at the speed of memory, and numbers that are the same on every machine.

A loop is one pass, compiled for the processor, where torch reads and writes every intermediate result.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from decentral.tensors.compiled import compiled, float32_at
from decentral.tensors.memory import fresh, fresh_like
from decentral.tensors.threads import WORTH_IT, spread

__all__ = [
    "LANES",
    "WIDTH",
    "Places",
    "are_flat_alike",
    "as_rows",
    "carry_and_copy",
    "carry_over",
    "carry_rows",
    "copy_and_difference",
    "copy_and_norm",
    "difference",
    "difference_and_norm",
    "divide",
    "flat",
    "float32",
    "is_finite",
    "is_rising",
    "minus_quotient",
    "minus_times",
    "philox_4x32",
    "rows_of",
    "sum_of_lanes",
    "with_momentum",
]

# ---- finite tensors ----
#
# NaN and Inf are found in one pass, without a copy.

# The bits of the exponent: all ones in NaN and Inf, and in nothing else.
_EXPONENT = np.uint32(0x7F800000)  # of float32
_EXPONENTS = {
    torch.float32: (torch.uint32, _EXPONENT),
    torch.float16: (torch.uint16, np.uint16(0x7C00)),
    torch.bfloat16: (torch.uint16, np.uint16(0x7F80)),
}


def is_finite(tensor: Tensor) -> bool:
    """True when every element of a tensor of floats is finite. One device sync."""
    if tensor.device.type == "cpu" and tensor.is_contiguous() and tensor.dtype in _EXPONENTS:
        unsigned, exponent = _EXPONENTS[tensor.dtype]
        return bool(_is_finite(tensor.detach().reshape(-1).view(unsigned).numpy(), exponent))
    if not tensor.numel():
        return True
    low, high = torch.aminmax(tensor)  # NaN propagates through both
    return bool(torch.isfinite(low) & torch.isfinite(high))


@compiled
def _is_finite(bits, exponent):  # type: ignore[no-untyped-def]
    found = np.uint32(0)
    for i in range(bits.size):
        found |= np.uint32((bits[i] & exponent) == exponent)
    return found == 0


# ---- rows that rise ----
#
# Indices must rise strictly within bounds: one pass over them, and no copy.
#
# Shape suffixes: C = rows, k = indices of a row.


def is_rising(index_Ck: Tensor, limit: int) -> bool:
    """True when every row rises strictly within ``[0, limit)``. One device sync."""
    if not index_Ck.numel():
        return True
    if index_Ck.device.type == "cpu":
        return bool(_is_rising(index_Ck.numpy(), limit))
    inside = ((index_Ck[:, 0] >= 0) & (index_Ck[:, -1] < limit)).all()  # first and last, when they rise
    return bool(inside & (index_Ck[:, 1:] > index_Ck[:, :-1]).all())


@compiled
def _is_rising(index, limit):  # type: ignore[no-untyped-def]
    rows, columns = index.shape
    falls = 0
    for r in range(rows):
        row = index[r]
        falls += (row[0] < 0) + (row[columns - 1] >= limit)
        for c in range(1, columns):
            falls += row[c] <= row[c - 1]
    return falls == 0


# ---- tensors that lie alike in memory ----
#
# Loops go over several of them side by side.

LANES = 64  # sums of squares side by side: with 32 to 128 they cost the pass nothing, with 8 two thirds more


def are_flat_alike(*tensors: Tensor) -> bool:
    """Tell whether all are float32 on the processor, of one shape, and lie in a row."""
    return all(
        one.device.type == "cpu"
        and one.dtype == torch.float32
        and one.is_contiguous()
        and one.shape == tensors[0].shape
        for one in tensors
    )


def flat(tensor: Tensor) -> Any:  # Any: numpy's
    """The same memory as a flat array, for compiled loops."""
    return tensor.detach().view(-1).numpy()


# ---- elementwise steps ----
#
# Each is one pass over memory, on all threads that torch may use.
#
# A model's parameters are longer than any cache, so what a step costs is how often it goes through memory. Each
# operation is rounded as in torch, product and sum apart, and the threads change no bit. For other devices and dtypes
# torch does the same.
#
# Shape suffix: N = values; of tensors of any shape, all of one.

R = TypeVar("R")
Arrays = tuple[Any, ...]  # numpy's
_IN_CACHE = 4096  # values


def difference(left: Tensor, right: Tensor) -> Tensor:
    """``left - right``, new."""
    if not are_flat_alike(left, right):
        return left - right
    return _fill_new(_difference, left, right)


def difference_and_norm(left: Tensor, right: Tensor) -> tuple[Tensor, float]:
    """``left - right``, new, and its Euclidean norm, in one pass: finite if, and only if, all of it is, for float64
    holds every sum of squares. The norm's last bits depend on the number of threads.
    """
    if not are_flat_alike(left, right):
        made = left - right
        return made, float(torch.linalg.vector_norm(made, dtype=torch.float64))
    made = fresh_like(left)
    arrays = tuple(map(flat, (left, right, made)))
    return made, math.sqrt(sum(_over(made.numel(), arrays, lambda cut: float(_difference_and_squares(*cut)))))


def minus_times(left: Tensor, right: Tensor, factor: float) -> Tensor:
    """``left - right * factor``, new; the product is rounded first."""
    if not are_flat_alike(left, right):
        return left - right * factor
    return _fill_new(_minus_times, left, right, np.float32(factor))


def with_momentum(
    anchor: Tensor, change: Tensor, momentum: Tensor, factors: tuple[float, float], *, nesterov: bool
) -> tuple[Tensor, Tensor]:
    """The anchor after SGD with momentum along ``change``, and the momentum, both new. ``factors``: lr and mu.

    ``m <- m*mu + change``, then Nesterov's ``anchor - (m*mu + change)*lr``, or the heavy ball's ``anchor - m*lr``.
    """
    lr, mu = factors
    if not are_flat_alike(anchor, change, momentum):
        buffer = momentum * mu + change
        return anchor - (buffer * mu + change if nesterov else buffer) * lr, buffer
    made, kept = fresh_like(anchor), fresh_like(anchor)
    arrays = tuple(map(flat, (anchor, change, momentum, made, kept)))
    kernel: Any = _nesterov if nesterov else _heavy_ball
    numbers = np.float32(lr), np.float32(mu)
    _over(made.numel(), arrays, lambda cut: kernel(*cut, *numbers))
    return made, kept


def carry_over(live: Tensor, contributed: Tensor, anchor: Tensor) -> Tensor:
    """``anchor + (live - contributed)``, and ``anchor`` bit for bit where the two are equal; new."""
    if not are_flat_alike(live, contributed, anchor):
        return torch.where(live == contributed, anchor, anchor + (live - contributed))
    return _fill_new(_carry_into, live, contributed, anchor)


def divide(total: Tensor, divisor: float) -> bool:
    """``total /= divisor`` in place; returns whether all of it is finite then."""
    if not are_flat_alike(total):
        total /= torch.full_like(total.view(-1)[:1], divisor)  # a tensor: CUDA turns /number into *(1/number)
        return bool(torch.isfinite(total).all())
    arrays = (flat(total), flat(total).view(np.uint32))
    return all(_over(total.numel(), arrays, lambda cut: bool(_divide(cut[0], cut[1], np.float32(divisor)))))


def minus_quotient(left: Tensor, total: Tensor, made: Tensor, divisor: float, factor: float) -> bool:
    """``made <- left - total / divisor * factor``, each step rounded, and zeros in ``total``; whether all is finite.

    Of flat float32 tensors on the processor, on the calling thread: it is for pieces that its cache holds.
    """
    assert are_flat_alike(left, total, made), "flat float32 on the processor"
    numbers = np.float32(divisor), np.float32(factor)
    return bool(_minus_quotient(flat(left), flat(total), flat(made), flat(made).view(np.uint32), *numbers))


def _fill_new(kernel: Callable[..., Any], *given: Any) -> Tensor:
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
def _carry_into(live, contributed, anchor, made):  # type: ignore[no-untyped-def]
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


# ---- rows of a model that is being trained ----
#
# Passes over its memory where it lies: a row per parameter, vectors beside them.
#
# While they run, training stands still. So each writes nothing as long as the model but what is asked for, and rounds
# as the same steps one by one do. The norms' last bits depend on the number of threads and of rows.
#
# Shape suffix: N = values of all rows, in order; flat float32 on the processor.

Rows = Sequence[Tensor]


def as_rows(tensors: Iterable[Tensor]) -> Rows | None:
    """The tensors, each flat; None where one is not float32 on the processor and in a row, or two share memory: what
    is changed where it lies would be changed twice.
    """
    given = [tensor.detach() for tensor in tensors]
    if not all(map(are_flat_alike, given)):
        return None
    ends = sorted((one.data_ptr(), one.data_ptr() + one.nbytes) for one in given if one.numel())
    if any(stop > start for (_, stop), (start, _) in pairwise(ends)):
        return None
    return [one.view(-1) for one in given]


def carry_rows(rows: Rows, sent_N: Tensor, anchor_N: Tensor) -> None:
    """``rows <- anchor + (rows - sent)``, and ``anchor`` bit for bit where the two are equal."""
    _over_rows(rows, (sent_N, anchor_N), _carry)
    _mark_changed(rows)


def carry_and_copy(rows: Rows, sent_N: Tensor, anchor_N: Tensor) -> tuple[Tensor, float]:
    """`carry_rows`; what they are then, new, and the norm of ``anchor - rows``."""
    copy_N = fresh(anchor_N.numel())
    squares = _over_rows(rows, (sent_N, anchor_N, copy_N), _carry_and_copy)
    _mark_changed(rows)
    return copy_N, math.sqrt(sum(squares))


def copy_and_norm(rows: Rows, base_N: Tensor) -> tuple[Tensor, float]:
    """The rows, new, and the norm of ``base - rows``: finite if, and only if, all of it is."""
    copy_N = fresh(base_N.numel())
    return copy_N, math.sqrt(sum(_over_rows(rows, (base_N, copy_N), _copy_and_squares)))


def copy_and_difference(rows: Rows, base_N: Tensor) -> tuple[Tensor, Tensor, float]:
    """The rows, ``base - rows``, both new, and the norm of that: finite if, and only if, all of it is."""
    copy_N, made_N = fresh(base_N.numel()), fresh(base_N.numel())
    return copy_N, made_N, math.sqrt(sum(_over_rows(rows, (base_N, copy_N, made_N), _copy_and_difference)))


def _mark_changed(rows: Rows) -> None:
    """A graph that still needs the old values hears of it, as it does of torch's own writes."""
    for row in rows:  # not all at once: whether older versions of torch take a list is not documented
        torch.autograd.graph.increment_version(row)


def _over_rows(rows: Rows, beside: Sequence[Tensor], kernel: Callable[..., Any]) -> list[float]:
    """Return the kernel's results by piece of the rows and of the vectors beside them, cut alike for the threads."""
    numel = sum(row.numel() for row in rows)
    assert all(are_flat_alike(one) and one.numel() == numel for one in beside), "vectors as long as the rows together"
    jobs = _jobs([flat(row) for row in rows], [flat(one) for one in beside], numel)
    found = spread(lambda cuts: [float(kernel(*cut)) for cut in cuts], jobs, numel)
    return [one for job in found for one in job]


def _jobs(rows: Sequence[Any], beside: Sequence[Any], numel: int) -> list[list[Arrays]]:
    """For each thread pieces of rows, as many values for all of them, in order."""
    threads = torch.get_num_threads() if numel >= WORTH_IT else 1
    each, jobs, at = max(1, -(-numel // threads)), list[list[Arrays]]([[]]), 0
    for row in rows:
        start = 0
        while start < row.size:
            if at == each * len(jobs):
                jobs.append([])
            stop = min(row.size, start + each * len(jobs) - at)
            cuts = tuple(one[at : at + stop - start] for one in beside)
            jobs[-1].append((row[start:stop], *cuts))
            at, start = at + stop - start, stop
    return jobs


@compiled
def _carry(live, sent, anchor):  # type: ignore[no-untyped-def]
    for i in range(live.size):
        moved = anchor[i] + (live[i] - sent[i])
        live[i] = anchor[i] if live[i] == sent[i] else moved
    return 0.0


@compiled
def _carry_and_copy(live, sent, anchor, copy):  # type: ignore[no-untyped-def]
    lanes, whole = np.zeros(LANES, dtype=np.float64), live.size // LANES * LANES
    for start in range(0, whole, LANES):
        for lane in range(LANES):
            i = start + lane
            moved = anchor[i] + (live[i] - sent[i])
            value = anchor[i] if live[i] == sent[i] else moved
            live[i] = value
            copy[i] = value
            left = anchor[i] - value
            lanes[lane] += np.float64(left) * np.float64(left)
    for i in range(whole, live.size):
        moved = anchor[i] + (live[i] - sent[i])
        value = anchor[i] if live[i] == sent[i] else moved
        live[i] = value
        copy[i] = value
        left = anchor[i] - value
        lanes[0] += np.float64(left) * np.float64(left)
    return lanes.sum()


@compiled
def _copy_and_squares(live, base, copy):  # type: ignore[no-untyped-def]
    lanes, whole = np.zeros(LANES, dtype=np.float64), live.size // LANES * LANES
    for start in range(0, whole, LANES):
        for lane in range(LANES):
            i = start + lane
            copy[i] = live[i]
            left = base[i] - live[i]
            lanes[lane] += np.float64(left) * np.float64(left)
    for i in range(whole, live.size):
        copy[i] = live[i]
        left = base[i] - live[i]
        lanes[0] += np.float64(left) * np.float64(left)
    return lanes.sum()


@compiled
def _copy_and_difference(live, base, copy, made):  # type: ignore[no-untyped-def]
    lanes, whole = np.zeros(LANES, dtype=np.float64), live.size // LANES * LANES
    for start in range(0, whole, LANES):
        for lane in range(LANES):
            i = start + lane
            copy[i] = live[i]
            left = base[i] - live[i]
            made[i] = left
            lanes[lane] += np.float64(left) * np.float64(left)
    for i in range(whole, live.size):
        copy[i] = live[i]
        left = base[i] - live[i]
        made[i] = left
        lanes[0] += np.float64(left) * np.float64(left)
    return lanes.sum()


# ---- very many small tensors ----
#
# They are copied by their addresses: to tell torch or numpy of each takes longer than to copy it.

_MANY, _SMALL = 128, 4096  # tensors, and values on average of each


class Places:
    """Where small float32 tensors lie on the processor, each in a row."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors  # which hold the memory
        self._known = addresses, sizes = self._now()
        self._address, self._end = np.array(addresses, dtype=np.uintp), np.cumsum(sizes, dtype=np.int64)

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> Places | None:
        """None where one does not lie so, or they are few or large: then torch copies them as fast."""
        if len(tensors) <= _MANY or sum(one.numel() for one in tensors) > _SMALL * len(tensors):
            return None
        return cls(tensors) if all(map(are_flat_alike, tensors)) else None

    @property
    def hold(self) -> bool:
        """True until a tensor is given other memory, or another length."""
        return self._known == self._now()

    def read(self) -> Tensor:
        """A copy of all, flat, one behind the other."""
        made_N = fresh(int(self._end[-1]))
        _read(self._address, self._end, flat(made_N))
        return made_N

    def write(self, flat_N: Tensor) -> None:
        """Overwrite all of them."""
        assert flat_N.shape == (self._end[-1],), "as long as all of them"
        assert are_flat_alike(flat_N), "flat float32 on the processor"
        _write(self._address, self._end, flat(flat_N))
        _mark_changed(self._tensors)

    def _now(self) -> tuple[list[int], list[int]]:
        return [*map(Tensor.data_ptr, self._tensors)], [*map(Tensor.numel, self._tensors)]


@compiled
def _read(address, end, made):  # type: ignore[no-untyped-def]
    start = 0
    for i in range(end.size):
        made[start : end[i]] = float32_at(address[i], end[i] - start)
        start = end[i]


@compiled
def _write(address, end, given):  # type: ignore[no-untyped-def]
    start = 0
    for i in range(end.size):
        float32_at(address[i], end[i] - start)[:] = given[start : end[i]]
        start = end[i]


# ---- rows of equal width, for vector loops ----
#
# A flat tensor, whole or in pieces, as rows of a constant width: loops over them are vector instructions, and crawl
# otherwise.

WIDTH = 1024  # a row of float64 is 8 KiB: in the first-level cache, and many vectors long


def sum_of_lanes(lane_L: NDArray[np.float64]) -> float:
    """The sum of WIDTH numbers, in halves: one order of additions on every machine."""
    while lane_L.size > 1:
        half = lane_L.size // 2
        lane_L = lane_L[:half] + lane_L[half:]
    return float(lane_L[0])


def rows_of(pieces: Iterable[Tensor]) -> Iterator[NDArray[np.float32]]:
    """The rows (R, WIDTH) of float32 tensors on the processor, one behind the other; the last is filled up with zeros.

    Whole rows of a piece are not copied. To be used before the next are asked for: a row that several pieces share is
    overwritten.
    """
    shared_L, filled = np.zeros((1, WIDTH), dtype=np.float32), 0
    for piece in pieces:
        flat_N = piece.detach().contiguous().reshape(-1).numpy()
        if filled:
            taken = min(WIDTH - filled, flat_N.size)
            shared_L[0, filled : filled + taken] = flat_N[:taken]
            filled, flat_N = filled + taken, flat_N[taken:]
            if filled < WIDTH:
                continue
            yield shared_L
        whole = flat_N.size // WIDTH * WIDTH
        yield flat_N[:whole].reshape(-1, WIDTH)
        filled = flat_N.size - whole
        shared_L[0, :filled] = flat_N[whole:]
    if filled:
        shared_L[0, filled:] = 0.0
        yield shared_L


# ---- random words by Philox4x32-10 ----
#
# A pure function of a counter and a key.
#
# Ten rounds of two 32-bit products; no state, so that word n of a stream costs what the first does, and no float, so
# that no library rounds it otherwise. A block of 4 words takes some 45 ns of one core.
#
# Source: Salmon, Moraes, Dror and Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3", 2011 (SC11), and its Random123,
# whose known answers the tests have.
#
# Shape suffix: B = blocks.

Words = NDArray[np.uint32]
_ROUNDS = 10
_MULTIPLIERS = np.array([[0xD2511F53], [0xCD9E8D57]], dtype=np.uint64)
_WEYL = np.array([[0x9E3779B9], [0xBB67AE85]], dtype=np.uint64)  # what the key's halves grow by from round to round
_GROWN = np.arange(_ROUNDS, dtype=np.uint64)[:, None, None] * _WEYL
_HIGH, _MASK = np.uint64(32), np.uint64(0xFFFFFFFF)


def philox_4x32(counter_4B: Words, key: tuple[int, int]) -> Words:
    """The blocks of these counters, (4, B). ``key``: its two halves, of 32 bits each."""
    even_2B, odd_2B = (counter_4B[start::2].astype(np.uint64) for start in (0, 1))
    for key_21 in (np.array(key, dtype=np.uint64)[:, None] + _GROWN) & _MASK:
        product_2B = even_2B * _MULTIPLIERS  # 32 by 32 bits: exact in 64
        even_2B = (product_2B >> _HIGH)[::-1] ^ odd_2B ^ key_21
        odd_2B = (product_2B & _MASK)[::-1]
    made_4B = np.empty(counter_4B.shape, dtype=np.uint32)
    made_4B[0::2], made_4B[1::2] = even_2B, odd_2B
    return made_4B


# ---- float32 of a Python float ----
#
# Weights are rounded so before anything is multiplied with them: said once, and the same on every machine.


def float32(value: float) -> float:
    """The nearest float32. OverflowError beyond its range."""
    return float(struct.unpack("<f", struct.pack("<f", value))[0])
