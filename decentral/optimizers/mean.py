"""The one place where contributions are averaged: one order, one divisor, float32.

mean = sum(weight * pseudo_gradient) / sum(weight), over the contributors *actually summed*: a peer that is absent, was
dropped or came late is in neither sum, and a sparse contribution counts in full at coordinates it did not send.
The order is that of the peer ids: summing in another order changed 73 % of the elements' bits, and then anchors differ.

Weights are equal, or go by the tokens that contributors say they trained on. Saying is free, so a claim counts for at
most ``MOST`` times the typical one of its record: a lie of 10**18 tokens counts as much as 4 peers and no more.
"""

from __future__ import annotations

import math
import statistics
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import TypeVar

import torch
from torch import Tensor

from decentral.errors import ConfigError, NonFiniteError
from decentral.tensors.memory import Lazy, fresh, fresh_zeros
from decentral.tensors.ops import are_flat_alike, divide, float32, is_finite, minus_quotient
from decentral.tensors.threads import lumps, spread

__all__ = [
    "LEAST",
    "MOST",
    "AddBand",
    "Adder",
    "Bands",
    "LazyMean",
    "Open",
    "Part",
    "Seen",
    "Span",
    "Stepped",
    "add_except",
    "contribution_weights",
    "in_order",
    "mask",
    "mean_of",
    "mean_pseudo_gradient",
    "scaled",
    "step_by_bands",
]

_LARGEST = torch.finfo(torch.float32).max
MOST = 4.0  # times the typical that a claim counts for: a machine of four GPUs beside those of one, or a liar
LEAST = 1 / 16  # of it, at least: a slow peer is no stranger to the mean

A = TypeVar("A")
Contribution = tuple[bytes, Tensor, float]  # peer id, (N,) float32, weight >= 0
Adder = tuple[bytes, Callable[..., None], float]  # peer id, add(total, weight=...), weight >= 0
Span = tuple[int, int]  # start and stop in the flat fragment
Part = Sequence[Span]


def contribution_weights(weighting: str, tokens: Sequence[float]) -> list[float]:
    """Return a weight per contributor, from the tokens behind each as a record names them: the same bits on every peer.

    ``equal``: all 1. ``tokens``: tokens over their lower median, within [1/16, 4], rounded to float32; all 1 when the
    median is 0, for a training loop that tells no tokens. Of two the lower one is typical: a lie makes no weight of
    more than 4.
    """
    typical = statistics.median_low(tokens) if tokens else 0
    if weighting == "equal" or typical == 0:
        return [1.0] * len(tokens)
    return [float32(min(max(count / typical, LEAST), MOST)) for count in tokens]


def mean_pseudo_gradient(contributions: Sequence[Contribution], scales: Sequence[float] | None = None) -> Tensor:
    """The weighted mean of pseudo-gradients, (N,) float32, the same bits for any order of arrival.

    ``scales``: what each is multiplied by, see ``scaled``; None: 1.

    ConfigError when there is nothing to average; NonFiniteError when a contribution is not finite.
    """
    if len({gradient.shape for _, gradient, _ in contributions}) > 1:
        raise ConfigError("mean_pseudo_gradient: contributions differ in shape; they must be of one fragment")
    if not contributions:
        raise ConfigError("mean_pseudo_gradient: there is nothing to average; pass one tensor per peer")
    total = torch.zeros_like(contributions[0][1], dtype=torch.float32)
    adders: list[Adder] = [(peer, partial(_add, gradient), weight) for peer, gradient, weight in contributions]
    return mean_of(total, scaled(adders, scales))


def mean_of(total: Tensor, adders: Sequence[Adder]) -> Tensor:
    """The same mean, of contributions that add themselves, weighted, to ``total``, which starts at zero.

    Sparse contributions need no dense copy each. ``total`` is used up.

    Where the sum is beyond float32 the mean is not: it is made again of weights that are a power of two smaller, and
    add up to a half at most. Every part of a reduce, and a gather of the same contributions, get what they would get.
    """
    ordered, divisor = in_order(adders)
    if divide(_sum(total, ordered, 1.0), divisor):
        return total
    smaller = 2.0 ** -(math.frexp(divisor)[1] + 1)
    if not is_finite(_sum(total.zero_(), ordered, smaller)):
        raise NonFiniteError(
            f"mean_pseudo_gradient: one of {len(ordered)} contributions is not finite; drop it and its contributor"
        )
    divide(total, divisor * smaller)
    return total.clamp_(-_LARGEST, _LARGEST)  # no mean is larger than all that it is of


def _sum(total: Tensor, ordered: Sequence[Adder], times: float) -> Tensor:
    with torch.no_grad():
        for _, add, weight in ordered:
            add(total, weight=weight * times)
    return total


def scaled(adders: Sequence[Adder], scales: Sequence[float] | None) -> list[Adder]:
    """The same contributors, each adding ``scale`` times as much; the divisor counts them in full, as it does absent
    coordinates: a shortened contribution moves the anchor less, and lengthens nobody else's.
    """
    if scales is None:
        return list(adders)
    return [
        (peer, add if scale == 1.0 else partial(_add_scaled, add, scale), weight)
        for (peer, add, weight), scale in zip(adders, scales, strict=True)
    ]


def mask(adders: Sequence[Adder], outside: Sequence[Part]) -> list[Adder]:
    """The same contributors, each adding nothing where it is ``outside`` of what it has a say in; (): all have it."""
    if not any(outside):
        return list(adders)
    return [
        (peer, partial(add_except, add, part) if part else add, weight)
        for (peer, add, weight), part in zip(adders, outside, strict=True)
    ]


def add_except(add: Callable[..., None], outside: Part, total_N: Tensor, weight: float) -> None:
    """``add(total_N, weight=weight)`` that changes nothing ``outside``: who does not own a part has no say in it."""
    before = [total_N[start:stop].clone() for start, stop in outside]
    add(total_N, weight=weight)
    for (start, stop), kept in zip(outside, before, strict=True):
        total_N[start:stop] = kept


def _add_scaled(add: Callable[..., None], scale: float, total: Tensor, weight: float) -> None:
    add(total, weight=float32(weight * scale))  # two float32 make an exact float64: rounded once


def _add(gradient: Tensor, total: Tensor, weight: float) -> None:
    total += gradient.to(torch.float32) * weight


def in_order(adders: Sequence[tuple[bytes, A, float]]) -> tuple[list[tuple[bytes, A, float]], float]:
    """The contributors by their ids, as they are summed, and what their sum is divided by."""
    ordered = sorted(adders, key=lambda adder: adder[0])
    return ordered, _divisor([peer for peer, _, _ in ordered], [weight for _, _, weight in ordered])


def _divisor(peers: Sequence[bytes], weights: Sequence[float]) -> float:
    """The sum of the weights of the contributors that are summed, in their order."""
    if len(set(peers)) != len(peers):
        raise ConfigError("mean_pseudo_gradient: a peer contributed twice; pass one tensor per peer")
    divisor = math.fsum(weights)
    if not (divisor > 0 and math.isfinite(divisor) and min(weights) >= 0):
        raise ConfigError(f"mean_pseudo_gradient: weights {weights}; want them >= 0, with a positive, finite sum")
    return divisor


# ---- the mean and its step, band by band ----
#
# ``anchor - mean * rate`` where sums stay in the cache, and nothing new but the result is as long as it.
#
# The same bits as `mean_of` and a step after it. Four sparse contributions fall on nearly every line of memory: added
# one after the other over the whole fragment, each goes through all of it. A band is a tensor, or a part of a large
# one.

# Shape suffixes: N = elements of one fragment, n = of a band; flat float32.

AddBand = Callable[[int, Tensor, float], None]  # add(start, total_n, weight): from that element of the tensor on
Open = Callable[[slice], Sequence[AddBand]]  # of some neighbouring tensors, what one peer sent
Seen = Callable[[int, Tensor], None]  # seen(start, total_n): of one band, before it is divided
BandAdders = Sequence[tuple[bytes, Open, float]]  # peer id, what adds, weight >= 0
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


def step_by_bands(anchor_N: Tensor, sizes: Sizes, adders: BandAdders, rate: float, seen: Seen) -> Tensor | None:
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
        is_finite = all(spread(move, _by_thread(list(_bands(sizes))), anchor_N.numel()))
    return made_N if is_finite else None


def _opening(ordered: BandAdders, number: int) -> Callable[[], Opened]:
    return lambda: [(open_(slice(number, number + 1)), weight) for _, open_, weight in ordered]


class _Once:
    """A thing that is made when a thread first asks for it, while others wait."""

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


def _by_thread(bands: Sequence[_Band]) -> list[list[_Band]]:
    """Bands in order, for each thread about as many elements."""
    threads = torch.get_num_threads()
    shares: list[list[_Band]] = [[] for _ in range(threads)]
    for band in bands:
        shares[band.start * threads // bands[-1].stop].append(band)
    return [share for share in shares if share]


# ---- a mean whose values may never be made ----
#
# An outer step is given the mean of a gather as a tensor like any other: whatever torch does with it, it does with the
# values, which are made then. Only `decentral.optimizers.steps.sgd` needs none: it steps band by band.


@dataclass(frozen=True, slots=True)
class Bands:
    """The contributions to a mean as `step_by_bands` adds them."""

    sizes: Sizes
    adders: BandAdders
    look: Callable[[int, Tensor], Tensor]  # what to note of the sum of a band, which begins there


@dataclass(frozen=True, slots=True)
class Stepped:
    """An anchor that was made band by band, all of it finite, and what was seen on the way."""

    anchor_N: weakref.ref[Tensor]  # its memory is wanted again as soon as nobody else holds it
    version: int  # how often torch had written to it
    noted: Tensor  # of all bands what ``look`` noted

    def is_it(self, one: Tensor) -> bool:
        """Tell whether a tensor is this one, and unchanged."""
        return one is self.anchor_N() and one._version == self.version


class LazyMean(Lazy):
    """The mean of what came (N,), flat float32 on the processor."""

    error: Exception | None  # of the contributions, and none of the method's, which may have been given it
    stepped: Stepped | None  # the last step that was made of them; None: none was

    def __init__(self, make: Callable[[], Tensor], bands: Bands) -> None:
        super().__init__(lambda: self._noting_errors(make))
        self._bands, self.error, self.stepped = bands, None, None

    def step_from(self, anchor_N: Tensor, rate: float) -> Tensor | None:
        """Return ``anchor - mean * rate``, the only new vector as long as the fragment; None: go by the values, as
        somebody has read them, or as the rate, a sum or the step is beyond float32.
        """
        if self.is_made or not are_flat_alike(anchor_N) or not abs(rate) <= _LARGEST:
            return None
        notes, bands = dict[int, Tensor](), self._bands

        def look(start: int, total_n: Tensor) -> None:
            notes[start] = bands.look(start, total_n)

        made_N = self._noting_errors(lambda: step_by_bands(anchor_N, bands.sizes, bands.adders, rate, look))
        if made_N is not None:
            noted = torch.cat([notes[start] for start in sorted(notes)])
            self.stepped = Stepped(weakref.ref(made_N), made_N._version, noted)
        return made_N

    def _noting_errors(self, make: Callable[[], A]) -> A:
        try:
            return make()
        except Exception as error:
            self.error = error
            raise
