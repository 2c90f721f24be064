"""``anchor - mean * rate`` band by band: sums stay in the cache, and nothing new but the result is as long as it.

The same bits as `mean_of` and a step after it. Four sparse contributions fall on nearly every line of memory: added one
after the other over the whole fragment, each goes through all of it. A band is a tensor, or a part of a large one.
"""
# Shape suffixes: N = elements of one fragment, n = of a band; flat float32.

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from decentral.optimizers.aggregation.mean import in_order
from decentral.tensors.memory import fresh, fresh_zeros
from decentral.tensors.ops import minus_quotient
from decentral.tensors.threads import lumps, spread

__all__ = ["AddBand", "Open", "Seen", "minus_mean"]

AddBand = Callable[[int, Tensor, float], None]  # add(start, total_n, weight): from that element of the tensor on
Open = Callable[[slice], Sequence[AddBand]]  # of some neighbouring tensors, what one peer sent
Seen = Callable[[int, Tensor], None]  # seen(start, total_n): of one band, before it is divided
Adders = Sequence[tuple[bytes, Open, float]]  # peer id, what adds, weight >= 0
_LUMP = 1 << 21  # elements of tensors that are opened together
Opened = list[tuple[Sequence[AddBand], float]]  # by peer
Sizes = Sequence[tuple[int, int]]  # of each tensor its elements, and those of a band, but for the last


@dataclass(frozen=True, slots=True)
class _Band:
    number: int  # of the tensor
    first: int  # where the tensor begins in the fragment
    start: int  # and the band
    stop: int
    is_large: bool  # whether the tensor is opened by itself


def minus_mean(anchor_N: Tensor, sizes: Sizes, adders: Adders, rate: float, seen: Seen) -> Tensor | None:
    """The next anchor, new; None where a sum, or what comes of it, is beyond float32.

    ``seen`` is shown the sums, from several threads.
    """
    ordered, divisor = in_order(adders)
    made_N = fresh(anchor_N.numel())
    large = {number: _Once(_opening(ordered, number)) for number, (numel, _) in enumerate(sizes) if numel >= _LUMP}

    def opened(these: slice) -> Opened:
        if these.start in large:
            return large[these.start].get()  # other threads have bands of it, too
        return [(open_(these), weight) for _, open_, weight in ordered]

    def move(bands: Sequence[_Band]) -> bool:
        spare_n, is_finite = fresh_zeros(max(band.stop - band.start for band in bands)), True
        for these, of_these in _lumps(bands):
            found = opened(these)
            for band in of_these:
                adding = [(adds[band.number - these.start], weight) for adds, weight in found]
                is_finite &= moved(band, adding, spare_n[: band.stop - band.start])
        return is_finite

    def moved(band: _Band, adding: Sequence[tuple[AddBand, float]], total_n: Tensor) -> bool:
        for add, weight in adding:
            add(band.start - band.first, total_n, weight)
        seen(band.start, total_n)
        here = slice(band.start, band.stop)
        return minus_quotient(anchor_N[here], total_n, made_N[here], divisor, rate)

    with torch.no_grad():
        is_finite = all(spread(move, _shares(list(_bands(sizes))), anchor_N.numel()))
    return made_N if is_finite else None


def _opening(ordered: Adders, number: int) -> Callable[[], Opened]:
    return lambda: [(open_(slice(number, number + 1)), weight) for _, open_, weight in ordered]


class _Once:
    """What is made when a thread first asks for it, and others wait for."""

    def __init__(self, make: Callable[[], Opened]) -> None:
        self._make, self._made, self._lock = make, list[tuple[Sequence[AddBand], float]](), threading.Lock()

    def get(self) -> Opened:
        with self._lock:
            self._made = self._made or self._make()
        return self._made


def _bands(sizes: Sizes) -> Iterator[_Band]:
    first = 0
    for number, (numel, each) in enumerate(sizes):
        for start in range(first, first + numel, max(1, each)):
            yield _Band(number, first, start, min(first + numel, start + each), numel >= _LUMP)
        first += numel


def _lumps(bands: Sequence[_Band]) -> Iterator[tuple[slice, Sequence[_Band]]]:
    """The bands with the tensors that they are of, a large one or a dozen small ones at a time: to open these takes
    little longer than to open one.
    """
    tensors = [list(of_one) for _, of_one in groupby(bands, lambda band: band.number)]
    for lump in lumps(
        [_LUMP if of_one[0].is_large else of_one[-1].stop - of_one[0].start for of_one in tensors], _LUMP
    ):
        some = [band for of_one in tensors[lump] for band in of_one]
        yield slice(some[0].number, some[-1].number + 1), some


def _shares(bands: Sequence[_Band]) -> list[list[_Band]]:
    """Bands in order, for each thread about as many elements."""
    threads = torch.get_num_threads()
    shares: list[list[_Band]] = [[] for _ in range(threads)]
    for band in bands:
        shares[band.start * threads // bands[-1].stop].append(band)
    return [share for share in shares if share]
