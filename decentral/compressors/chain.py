"""``sparsifier >> quantiser``: which entries are kept, then how their values are sent.

Parts: the sparsifier's index parts, then the quantiser's parts of every matrix of kept values. A matrix has one row
per chunk, so a quantiser that works by rows (signmag2) has its scales per chunk, and one that works by blocks
(int8, e3m0) blocks the kept values of neighbouring chunks together.
"""

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from decentral.compressors.at_once import compress_all, decompress_all
from decentral.compressors.bands import AddBand, added_whole
from decentral.compressors.base import (
    About,
    Compressor,
    Method,
    PartSpec,
    Payload,
    Shape,
    Sparsifier,
    check_shapes,
    no_sparsifier,
)
from decentral.compressors.none import Uncompressed
from decentral.compressors.support import joined
from decentral.errors import ConfigError

__all__ = ["Chain", "SparsifierBase"]

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
        """See `decentral.compressors.at_once`."""
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
        """See `decentral.compressors.at_once`."""
        for total, (index, values) in zip(totals, self._read(payloads), strict=True):
            self.sparsifier.add_at(total, index, values, weight)

    def compress_flat(self, flat_N: Tensor, shapes: Sequence[Shape]) -> tuple[Payload, ...] | None:
        """See `decentral.compressors.at_once`; None of a sparsifier that takes one tensor at a time."""
        select = getattr(self.sparsifier, "select_flat", None)
        if select is None:
            return None
        return tuple(self._payloads(shapes, select(flat_N, shapes), [flat_N.device] * len(shapes)))

    def add_flat(self, total_N: Tensor, payloads: Sequence[Payload], weight: float) -> bool:
        """See `decentral.compressors.at_once`; False, and nothing is added, of a sparsifier as above."""
        add = getattr(self.sparsifier, "add_at_flat", None)
        if add is None:
            return False
        add(total_N, [payload.shape for payload in payloads], self._read(payloads), weight)
        return True

    def band(self, shape: Shape) -> int:
        """See `decentral.compressors.bands`; the whole, of a sparsifier that does not cut."""
        own = getattr(self.sparsifier, "rows_of_band", None)
        return math.prod(shape) if own is None or len(shape) != 2 else min(own(shape), shape[0]) * shape[1]

    def opened(self, payloads: Sequence[Payload]) -> list[AddBand]:
        """See `decentral.compressors.bands`."""
        if len(payloads) == 1 and self.band(payloads[0].shape) == math.prod(payloads[0].shape):
            return [added_whole(self, payloads[0])]  # not read before: it may be large, and many peers have sent one
        read = zip(payloads, self._read(payloads), strict=True)
        return [self._adder(payload.shape, index, values) for payload, (index, values) in read]

    def _adder(self, shape: Shape, index: Selected, values: Selected) -> AddBand:
        if self.band(shape) < math.prod(shape):
            return self.sparsifier.adder_of_bands(shape, index, values)  # type: ignore[attr-defined,no-any-return]
        return lambda start, total_n, weight: self.sparsifier.add_at(total_n.view(shape), index, values, weight)

    def support(self, payload: Payload) -> tuple[Tensor, Tensor] | None:
        """Kept places and values, of a sparsifier that has ``places``; see `decentral.compressors.support`."""
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
