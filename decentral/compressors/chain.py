"""``sparsifier >> quantiser``: which entries are kept, then how their values are sent.

Parts: the sparsifier's index parts, then the quantiser's parts of every matrix of kept values. A matrix has one row
per chunk, so a quantiser that works by rows (signmag2) has its scales per chunk, and one that works by blocks
(int8, e3m0) blocks the kept values of neighbouring chunks together.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor

from decentral.compressors.base import (
    About,
    Compressor,
    Method,
    PartSpec,
    Payload,
    Shape,
    Sparsifier,
    Uncompressed,
    accumulate,
    check_shapes,
    no_sparsifier,
)
from decentral.errors import ConfigError
from decentral.tensors.threads import lumps, spread

__all__ = [
    "AddBand",
    "AtOnce",
    "Chain",
    "InBands",
    "SparsifierBase",
    "Supported",
    "accumulate_all",
    "added_whole",
    "band_of",
    "compress_all",
    "compress_each",
    "decompress_all",
    "joined",
    "opened",
    "support",
    "supports",
]

# Shape suffixes: N = values of all tensors, n = values of a band, S = places.

Selected = tuple[Tensor, ...]  # by matrix of kept values


@dataclass(frozen=True, slots=True)
class Chain(Method):
    """Keep what ``sparsifier`` selects and send its values through ``quantiser``."""

    name: ClassVar[str] = ">>"
    about: ClassVar[About] = About(
        layout="index parts, then the quantiser's parts",
        biased=True,
        source="composition",
        bound="what is not kept, and the quantiser's error on what is",
    )
    sparsifier: Sparsifier
    quantiser: Compressor

    def __post_init__(self) -> None:
        if not isinstance(self.sparsifier, Sparsifier):
            raise no_sparsifier(str(self))
        if isinstance(self.quantiser, Sparsifier | Chain) or not isinstance(self.quantiser, Compressor):
            raise ConfigError(f"{self}: the right side of >> must quantise values; use signmag2, int8 or fp16 there")

    def __str__(self) -> str:
        return f"{self.sparsifier} >> {self.quantiser}"

    def layout(self, shape: Shape) -> tuple[PartSpec, ...]:
        """Index parts, then the value parts of every region."""
        return _layout(self.sparsifier, self.quantiser, shape)  # type: ignore[arg-type]  # frozen dataclasses

    def compress(self, tensor: Tensor) -> Payload:
        """Select, then quantise what was selected."""
        return self.compress_many([tensor])[0]

    def compress_many(self, tensors: Sequence[Tensor]) -> list[Payload]:
        """See `compress_each`."""
        found = [self.sparsifier.select(tensor) for tensor in tensors]
        return self._payloads([tuple(tensor.shape) for tensor in tensors], found, [one.device for one in tensors])

    def decompress(self, payload: Payload) -> Tensor:
        """Kept values in their places, zero elsewhere."""
        ((index, values),) = self._read([payload])
        total = torch.zeros(payload.shape, dtype=torch.float32, device=payload.device)
        self.sparsifier.add_at(total, index, values, 1.0)
        return total

    def accumulate(self, total: Tensor, payload: Payload, weight: float) -> None:
        """Touches the kept places only."""
        if not total.is_contiguous():  # sparsifiers work on a reshaped view, which would be a copy
            total += self.decompress(payload) * weight
            return
        self.accumulate_many([total], [payload], weight)

    def accumulate_many(self, totals: Sequence[Tensor], payloads: Sequence[Payload], weight: float) -> None:
        """See `accumulate_all`."""
        for total, (index, values) in zip(totals, self._read(payloads), strict=True):
            self.sparsifier.add_at(total, index, values, weight)

    def compress_flat(self, flat_N: Tensor, shapes: Sequence[Shape]) -> tuple[Payload, ...] | None:
        """See `AtOnce`; None of a sparsifier that takes one tensor at a time."""
        select = getattr(self.sparsifier, "select_flat", None)
        if select is None:
            return None
        return tuple(self._payloads(shapes, select(flat_N, shapes), [flat_N.device] * len(shapes)))

    def add_flat(self, total_N: Tensor, payloads: Sequence[Payload], weight: float) -> bool:
        """See `AtOnce`; False, and nothing is added, of a sparsifier as above."""
        add = getattr(self.sparsifier, "add_at_flat", None)
        if add is None:
            return False
        add(total_N, [payload.shape for payload in payloads], self._read(payloads), weight)
        return True

    def band(self, shape: Shape) -> int:
        """See `InBands`; the whole, of a sparsifier that does not cut."""
        own = getattr(self.sparsifier, "rows_of_band", None)
        return math.prod(shape) if own is None or len(shape) != 2 else min(own(shape), shape[0]) * shape[1]

    def opened(self, payloads: Sequence[Payload]) -> list[AddBand]:
        """See `InBands`."""
        if len(payloads) == 1 and self.band(payloads[0].shape) == math.prod(payloads[0].shape):
            return [added_whole(self, payloads[0])]  # not read before: it may be large, and many peers have sent one
        read = zip(payloads, self._read(payloads), strict=True)
        return [self._adder(payload.shape, index, values) for payload, (index, values) in read]

    def _adder(self, shape: Shape, index: Selected, values: Selected) -> AddBand:
        if self.band(shape) < math.prod(shape):
            return self.sparsifier.adder_of_bands(shape, index, values)  # type: ignore[attr-defined,no-any-return]
        return lambda start, total_n, weight: self.sparsifier.add_at(total_n.view(shape), index, values, weight)

    def support(self, payload: Payload) -> tuple[Tensor, Tensor] | None:
        """Kept places and values, of a sparsifier that has ``places``; see `Supported`."""
        found = self.support_many([payload])
        return None if found is None else found[0]

    def support_many(self, payloads: Sequence[Payload]) -> list[tuple[Tensor, Tensor]] | None:
        """The same of each."""
        places = getattr(self.sparsifier, "places", None)
        if places is None:
            return None
        read = zip(payloads, self._read(payloads), strict=True)
        return [
            (places(payload.shape, index), joined([value.flatten() for value in values], torch.float32))
            for payload, (index, values) in read
        ]

    def _payloads(
        self, shapes: Sequence[Shape], found: Sequence[tuple[Selected, Selected]], devices: Sequence[torch.device]
    ) -> list[Payload]:
        """What was selected of each tensor, with its values quantised."""
        made = iter(compress_all(self.quantiser, [rows for _, values in found for rows in values]))
        kept = [[part for _ in values for part in next(made).parts] for _, values in found]
        rows = zip(shapes, found, kept, devices, strict=True)
        return [Payload(tuple(shape), (*index, *parts), device) for shape, (index, _), parts, device in rows]

    def _read(self, payloads: Sequence[Payload]) -> list[tuple[Selected, Selected]]:
        """The index parts, and the matrices of kept values, of each. PayloadError but for what indices are."""
        for payload in payloads:
            check_shapes(self, payload, self.layout(payload.shape))
        matrices = [list(self._quantised(payload)) for payload in payloads]
        made = iter(decompress_all(self.quantiser, [rows for one in matrices for rows in one]))
        values = [tuple(next(made) for _ in one) for one in matrices]
        index = [payload.parts[: len(self.sparsifier.index_layout(payload.shape))] for payload in payloads]
        return list(zip(index, values, strict=True))

    def _quantised(self, payload: Payload) -> Iterator[Payload]:
        """The quantiser's payload of each matrix."""
        start = len(self.sparsifier.index_layout(payload.shape))
        for rows in self.sparsifier.value_shapes(payload.shape):
            stop = start + len(self.quantiser.layout(rows))
            yield Payload(rows, payload.parts[start:stop])
            start = stop


class SparsifierBase(Method):
    """A sparsifier is a compressor too: alone, it sends its index parts and the kept values as float32."""

    __slots__ = ()

    def __rshift__(self, quantiser: Compressor) -> Chain:
        return Chain(self, quantiser)  # type: ignore[arg-type]  # it checks that the subclass is a sparsifier

    def layout(self, shape: Shape) -> tuple[PartSpec, ...]:
        """Index parts, then float32 values."""
        return self._chain.layout(shape)

    def compress(self, tensor: Tensor) -> Payload:
        """Keep what is selected exactly."""
        return self._chain.compress(tensor)

    def decompress(self, payload: Payload) -> Tensor:
        """What was kept, and zero, or its transform, elsewhere."""
        return self._chain.decompress(payload)

    def accumulate(self, total: Tensor, payload: Payload, weight: float) -> None:
        """See `Chain.accumulate`."""
        self._chain.accumulate(total, payload, weight)

    def compress_flat(self, flat_N: Tensor, shapes: Sequence[Shape]) -> tuple[Payload, ...] | None:
        """See `Chain.compress_flat`."""
        return self._chain.compress_flat(flat_N, shapes)

    def add_flat(self, total_N: Tensor, payloads: Sequence[Payload], weight: float) -> bool:
        """See `Chain.add_flat`."""
        return self._chain.add_flat(total_N, payloads, weight)

    def band(self, shape: Shape) -> int:
        """See `Chain.band`."""
        return self._chain.band(shape)

    def opened(self, payloads: Sequence[Payload]) -> list[AddBand]:
        """See `Chain.opened`."""
        return self._chain.opened(payloads)

    def compress_many(self, tensors: Sequence[Tensor]) -> list[Payload]:
        """See `Chain.compress_many`."""
        return self._chain.compress_many(tensors)

    def accumulate_many(self, totals: Sequence[Tensor], payloads: Sequence[Payload], weight: float) -> None:
        """See `Chain.accumulate_many`."""
        self._chain.accumulate_many(totals, payloads, weight)

    def support_many(self, payloads: Sequence[Payload]) -> list[tuple[Tensor, Tensor]] | None:
        """See `Chain.support_many`."""
        return self._chain.support_many(payloads)

    def support(self, payload: Payload) -> tuple[Tensor, Tensor] | None:
        """See `Chain.support`."""
        return self._chain.support(payload)

    @property
    def _chain(self) -> Chain:
        return _alone(self)


@functools.lru_cache(maxsize=64)  # making one checks three protocols, at 40 microseconds each
def _alone(sparsifier: Sparsifier) -> Chain:
    return Chain(sparsifier, Uncompressed())


@functools.lru_cache(maxsize=4096)  # a model has few shapes, and each is asked for at every step of a round
def _layout(sparsifier: Sparsifier, quantiser: Compressor, shape: Shape) -> tuple[PartSpec, ...]:
    values = [spec for rows in sparsifier.value_shapes(shape) for spec in quantiser.layout(rows)]
    return (*sparsifier.index_layout(shape), *values)


# ---- many tensors at once ----
#
# A model has hundreds of them, and to tell torch of any operation takes microseconds, of a device more.
#
# A compressor may have ``compress_flat`` and ``add_flat``, for tensors that lie one behind the other on a device, whose
# payloads are this process's own. Anywhere it may have ``compress_many`` and ``accumulate_many``, and a quantiser
# behind a sparsifier ``compress_all`` and ``decompress_all``. What they make decodes, bit for bit, as what one tensor
# at a time does, and what they are given to decode is checked as it is there.

_LEAST = 1 << 17  # values that are a job for a thread
_LUMP = 1 << 21  # values of tensors that are handled together: a few dozen calls to torch are little beside that


@runtime_checkable
class AtOnce(Protocol):
    """A compressor that takes all tensors of a fragment in a few operations."""

    def compress_flat(self, flat_N: Tensor, shapes: Sequence[Shape]) -> tuple[Payload, ...] | None:
        """One payload per shape; None: one at a time, please. NonFiniteError as ``compress``."""

    def add_flat(self, total_N: Tensor, payloads: Sequence[Payload], weight: float) -> bool:
        """``total += weight * decompress`` of its own payloads in place; False, and nothing is added: one at a time."""


def compress_each(compressor: Compressor, tensors: Sequence[Tensor], numel: int) -> tuple[Payload, ...]:
    """One payload for each, on as many threads as torch may use; ``numel``: elements that the processor works on."""
    own = getattr(compressor, "compress_many", None)
    if own is None:
        return tuple(spread(compressor.compress, tensors, numel))
    sizes = [one.numel() for one in tensors]
    least = min(_LUMP, max(_LEAST, sum(sizes) // (4 * torch.get_num_threads())))  # for each thread several jobs
    jobs = [tensors[lump] for lump in lumps(sizes, least)]
    return tuple(chain.from_iterable(spread(own, jobs, numel)))


def accumulate_all(
    compressor: Compressor, totals: Sequence[Tensor], payloads: Sequence[Payload], weight: float
) -> None:
    """`accumulate` of each in its contiguous total. PayloadError; some have been added then."""
    own = getattr(compressor, "accumulate_many", None)
    if own is None:
        for total, payload in zip(totals, payloads, strict=True):
            accumulate(compressor, total, payload, weight)
        return
    for lump in lumps([math.prod(payload.shape) for payload in payloads], _LUMP):
        own(totals[lump], payloads[lump], weight)


def compress_all(quantiser: Compressor, tensors: Sequence[Tensor]) -> list[Payload]:
    """One payload for each, by the quantiser's own way if it has one."""
    own = getattr(quantiser, "compress_all", None)
    found: list[Payload] = own(tensors) if own is not None else [quantiser.compress(one) for one in tensors]
    return found


def decompress_all(quantiser: Compressor, payloads: Sequence[Payload]) -> list[Tensor]:
    """What each holds. PayloadError when a part breaks a rule."""
    own = getattr(quantiser, "decompress_all", None)
    found: list[Tensor] = own(payloads) if own is not None else [quantiser.decompress(one) for one in payloads]
    return found


# ---- totals in bands, for the cache ----
#
# A payload is added to a total band by band, so that the sum of many contributions stays in the cache.
#
# An embedding does not fit there, and a few sparse contributions touch most lines of it: added one after the other,
# each goes through all of it. A band is a run of the flattened tensor; a compressor that cannot cut its payloads has
# one.

AddBand = Callable[[int, Tensor, float], None]  # add(start, total_n, weight): what lies in the band from there on


class InBands(Protocol):
    """A compressor whose payloads may be added in bands of the tensor."""

    def band(self, shape: Shape) -> int:
        """Values of each band of a tensor of this shape, but for the last; the whole tensor's where it is not cut."""

    def opened(self, payloads: Sequence[Payload]) -> list[AddBand]:
        """What adds each band of each, contiguous, in place, to the bits of ``accumulate``. PayloadError when a part
        breaks a rule, before anything is added of a payload.
        """


def band_of(compressor: Compressor, shape: Shape) -> int:
    """See `InBands`."""
    own = getattr(compressor, "band", None)  # isinstance costs 40 microseconds, for each tensor of each contribution
    return math.prod(shape) if own is None else int(own(shape))


def opened(compressor: Compressor, payloads: Sequence[Payload]) -> list[AddBand]:
    """See `InBands`; of one that cannot be cut, the whole."""
    own = getattr(compressor, "opened", None)
    found: list[AddBand] = [added_whole(compressor, one) for one in payloads] if own is None else own(payloads)
    return found


def added_whole(compressor: Compressor, payload: Payload) -> AddBand:
    """What adds all of it, and reads it when it does."""
    return lambda start, total_n, weight: accumulate(compressor, total_n.view(payload.shape), payload, weight)


# ---- payloads without their zeros ----
#
# Places and values, straight from the parts where they say them.
#
# For whoever compares what many peers sent: 64 of 4096 values take a sixtieth of the time and memory.


class Supported(Protocol):
    """A compressor whose parts may say which places they are about."""

    def support(self, payload: Payload) -> tuple[Tensor, Tensor] | None:
        """Distinct places int64 (S,) in the flattened tensor, in any order, and values float32 (S,) there: all that
        ``decompress`` would not leave at zero. None where the parts do not say it. Raises PayloadError.
        """

    def support_many(self, payloads: Sequence[Payload]) -> list[tuple[Tensor, Tensor]] | None:
        """The same of each; None where one does not say it."""


def support(compressor: Compressor, payload: Payload) -> tuple[Tensor, Tensor] | None:
    """See `Supported`, the places sorted; None of a compressor that is none."""
    own = getattr(compressor, "support", None)  # isinstance costs 40 microseconds, for each tensor of each contribution
    found: tuple[Tensor, Tensor] | None = None if own is None else own(payload)
    if found is None:
        return None
    place_S, value_S = found
    order_S = torch.argsort(place_S)  # chunks of a matrix are tiles: their places interleave
    return place_S[order_S], value_S[order_S]


def supports(compressor: Compressor, payloads: Sequence[Payload]) -> list[tuple[Tensor, Tensor]] | None:
    """See `Supported`, of each payload; None where one does not say it."""
    own = getattr(compressor, "support_many", None)
    found: list[tuple[Tensor, Tensor]] | None = None if own is None else own(payloads)
    return found


def joined(pieces: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """The pieces, flat, one behind the other; a single one is not copied."""
    if len(pieces) == 1:
        return pieces[0]
    return torch.cat(list(pieces)) if pieces else torch.zeros(0, dtype=dtype, device="cpu")
