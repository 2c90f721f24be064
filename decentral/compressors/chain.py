"""``sparsifier >> quantiser``: which entries are kept, then how their values are sent.

Parts: the sparsifier's index parts, then the quantiser's parts of every matrix of kept values. A matrix has one row
per chunk, so a quantiser that works by rows (signmag2) has its scales per chunk, and one that works by blocks
(int8, e3m0) blocks the kept values of neighbouring chunks together.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from decentral.compressors.base import (
    About,
    Compressor,
    Decoded,
    Method,
    PartSpec,
    Payload,
    Scattered,
    Selected,
    Shape,
    Shapes,
    Sparsifier,
    Uncompressed,
    check_shapes,
    no_sparsifier,
)
from decentral.errors import ConfigError

__all__ = ["Chain", "SparsifierBase", "joined"]

# Shape suffixes: S = places.


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
        """Return the index parts, then the value parts of every matrix."""
        return _layout(self.sparsifier, self.quantiser, shape)  # type: ignore[arg-type]  # frozen dataclasses

    def band(self, shape: Shape) -> int:
        """Return the sparsifier's own band."""
        return self.sparsifier.band(shape)

    def compress(self, tensors: Sequence[Tensor]) -> list[Payload]:
        """Select, then quantise what was selected."""
        selected = self.sparsifier.select(tensors)
        quantised = iter(self.quantiser.compress([rows for _, values in selected for rows in values]))
        payloads = []
        for tensor, (index, values) in zip(tensors, selected, strict=True):
            parts = [part for _ in values for part in next(quantised).parts]
            payloads.append(Payload(tuple(tensor.shape), (*index, *parts), tensor.device))
        return payloads

    def decompress(self, payloads: Sequence[Payload]) -> list[Decoded]:
        """Return kept values in their places, zero or its transform elsewhere. PayloadError but for what indices are,
        which the sparsifier checks when it places the values.
        """
        for payload in payloads:
            check_shapes(self, payload, self.layout(payload.shape))
        full = [payload for payload in payloads if payload.parts]
        matrices = [list(self._payloads(payload)) for payload in full]
        decoded = iter(self.quantiser.decompress([rows for one in matrices for rows in one]))
        values = [tuple(next(decoded).tensor() for _ in one) for one in matrices]
        index = [payload.parts[: len(self.sparsifier.index_layout(payload.shape))] for payload in full]
        selected = list(zip(index, values, strict=True))
        placed = iter(self.sparsifier.place([payload.shape for payload in full], selected))
        return [next(placed) if payload.parts else Scattered.nowhere(payload) for payload in payloads]

    def _payloads(self, payload: Payload) -> Iterator[Payload]:
        """Yield the quantiser's payload of each matrix."""
        start = len(self.sparsifier.index_layout(payload.shape))
        for rows in self.sparsifier.value_shapes(payload.shape):
            stop = start + len(self.quantiser.layout(rows))
            yield Payload(rows, payload.parts[start:stop])
            start = stop


class SparsifierBase(Method):
    """A sparsifier is a compressor too: alone, it sends its index parts and the kept values as float32.

    It says ``index_layout`` and ``value_shapes``, and how to select and place: one tensor (``select_one``,
    ``place_one``), or many.
    """

    __slots__ = ()

    def __rshift__(self, quantiser: Compressor) -> Chain:
        return Chain(self, quantiser)  # type: ignore[arg-type]  # it checks that the subclass is a sparsifier

    def layout(self, shape: Shape) -> tuple[PartSpec, ...]:
        """Return the index parts, then float32 values."""
        return _alone(self).layout(shape)

    def compress(self, tensors: Sequence[Tensor]) -> list[Payload]:
        """Keep what is selected exactly."""
        return _alone(self).compress(tensors)

    def decompress(self, payloads: Sequence[Payload]) -> list[Decoded]:
        """Return what was kept, and zero, or its transform, elsewhere."""
        return _alone(self).decompress(payloads)

    def select(self, tensors: Sequence[Tensor]) -> list[Selected]:
        """Select of one after the other."""
        return [self.select_one(tensor) for tensor in tensors]

    def place(self, shapes: Shapes, selected: Sequence[Selected]) -> list[Decoded]:
        """Place the values of one after the other."""
        return [self.place_one(tuple(shape), *one) for shape, one in zip(shapes, selected, strict=True)]

    def select_one(self, tensor: Tensor) -> Selected:
        """Return the index parts, and the matrices of kept values."""
        (selected,) = self.select([tensor])
        return selected

    def place_one(self, shape: Shape, index: tuple[Tensor, ...], values: tuple[Tensor, ...]) -> Decoded:
        """Return a tensor of this shape with the values at the kept places. PayloadError on a bad index."""
        (decoded,) = self.place([shape], [(index, values)])
        return decoded


@functools.lru_cache(maxsize=64)  # making one checks three protocols, at 40 microseconds each
def _alone(sparsifier: Sparsifier) -> Chain:
    return Chain(sparsifier, Uncompressed())


@functools.lru_cache(maxsize=4096)  # a model has few shapes, and each is asked for at every step of a round
def _layout(sparsifier: Sparsifier, quantiser: Compressor, shape: Shape) -> tuple[PartSpec, ...]:
    values = [spec for rows in sparsifier.value_shapes(shape) for spec in quantiser.layout(rows)]
    return (*sparsifier.index_layout(shape), *values)


def joined(pieces: Sequence[Tensor]) -> Tensor:
    """Return the pieces, flat, one behind the other; a single one is not copied."""
    return pieces[0].flatten() if len(pieces) == 1 else torch.cat([piece.flatten() for piece in pieces])
