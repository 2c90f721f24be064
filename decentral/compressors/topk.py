"""Keep the k entries of largest magnitude of every chunk; ``>>`` says how their values are sent.

Parts: indices int16 (C, k) of every region of equal chunks (at most four regions), rising strictly inside each chunk;
then the kept values of every region, float32 when used alone. An index of 64 in 4096 takes 7.4 bits as a coded gap,
where log2 C(4096, 64) / 64 = 7.36, and at most 12; with ``k=64, chunk=4096`` one value of 64 is kept. Chunks are 64x64
tiles of a matrix, runs of 4096 of anything else (`regions`); a chunk of L values keeps max(1, round(L * k / chunk)), so
that a short one may keep a smaller share than k / chunk: at 64 of 4096, 1 of 95.
Biased: use it with error feedback, or what it drops is gone for good.

Source: Sarfi et al., "Communication Efficient LLM Pre-training with SparseLoCo", 2025, arXiv:2508.15706; chunked
selection from Peng et al., "DeMo: Decoupled Momentum Optimization", 2024, arXiv:2411.19870.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from decentral.coding import Rising
from decentral.compressors.base import (
    About,
    Decoded,
    PartSpec,
    Scattered,
    Selected,
    Shape,
    Shapes,
    check_dtype,
    non_finite,
    require_rising,
)
from decentral.compressors.chain import SparsifierBase, joined
from decentral.compressors.chunks import (
    Region,
    add_at,
    as_matrix,
    batches,
    largest,
    largest_by_torch,
    places_of,
    regions,
)
from decentral.errors import ConfigError
from decentral.tensors.ops import is_finite

__all__ = ["TopK"]

# Shape suffixes: C = chunks of a region, or of a batch, L = values per chunk, k = entries kept per chunk, N = values of
# all tensors.

_LONGEST_CHUNK = 4096  # what 12 bits can point into
_BAND = 1 << 20  # values: 4 MiB of sums; 31 million take 77 ms so, 84 in bands of half, digest included


@dataclass(frozen=True, slots=True)
class TopK(SparsifierBase):
    """Keep ``k`` of every ``chunk`` entries."""

    name: ClassVar[str] = "topk"
    about: ClassVar[About] = About(
        layout="indices, coded gaps (N*k/chunk), values float32 (N*k/chunk)",
        biased=True,
        source='Sarfi et al., "SparseLoCo", 2025, arXiv:2508.15706',
        bound="|error|**2 <= (1 - kept / L) * |x|**2 per chunk of L values, kept = max(1, round(L * k / chunk))",
    )
    k: int = 64
    chunk: int = 4096

    def __post_init__(self) -> None:
        if not (1 <= self.chunk <= _LONGEST_CHUNK and math.isqrt(self.chunk) ** 2 == self.chunk):
            raise ConfigError(
                f"{self}: chunk is the area of a square tile and an index has 12 bits; use 4096, 1024 or 256"
            )
        if not 1 <= self.k <= self.chunk:
            raise ConfigError(f"{self}: k entries of a chunk are kept; want 1 <= k <= {self.chunk}")

    def index_layout(self, shape: Shape) -> tuple[PartSpec, ...]:
        """Return indices (C, k) of every region."""
        return _index_layout(self, shape)

    def value_shapes(self, shape: Shape) -> tuple[Shape, ...]:
        """Return (C, k) of every region."""
        return tuple(spec.shape for spec in _index_layout(self, shape))

    def band(self, shape: Shape) -> int:
        """Return the values of some rows of a matrix: of whole tiles, and as many as a core's cache holds."""
        if len(shape) != 2:
            return math.prod(shape)
        side, (rows, columns) = math.isqrt(self.chunk), shape
        return min(max(1, _BAND // (side * max(1, columns))) * side, rows) * columns

    def select(self, tensors: Sequence[Tensor]) -> list[Selected]:
        """Return rising indices and kept values, (C, k) of every region. NaN and Inf are the largest of all, so they
        are kept: looking at what is kept finds them without another pass over everything.
        """
        if any(tensor.device.type != "cpu" for tensor in tensors):
            return self.select_at_once(tensors)
        return [self._select(tensor) for tensor in tensors]

    def place(self, shapes: Shapes, selected: Sequence[Selected]) -> list[Decoded]:
        """Return the kept values in their tiles; PayloadError unless every index is inside its chunk and above the one
        before.
        """
        if any(values[0].device.type != "cpu" for _, values in selected):
            return self.place_at_once(shapes, selected)
        placed = zip(shapes, selected, strict=True)
        return [self._place(tuple(shape), index, values) for shape, (index, values) in placed]

    def _select(self, tensor: Tensor) -> Selected:
        matrix = as_matrix(check_dtype(tensor)).contiguous()
        found = [largest(matrix, region, self._num_kept(region)) for region in regions(tuple(tensor.shape), self.chunk)]
        if not all(is_finite(value_Ck) for _, value_Ck in found):
            raise non_finite(tensor)
        return tuple(index_Ck for index_Ck, _ in found), tuple(value_Ck for _, value_Ck in found)

    def _place(self, shape: Shape, index: tuple[Tensor, ...], values: tuple[Tensor, ...]) -> Decoded:
        chunks = list[Chunks]()
        for region, index_Ck, value_Ck in zip(regions(shape, self.chunk), index, values, strict=True):
            require_rising(index_Ck, region.length, self)
            chunks.append((region, index_Ck, value_Ck.view(index_Ck.shape)))
        return _Tiles(shape, tuple(chunks))

    def select_at_once(self, tensors: Sequence[Tensor]) -> list[Selected]:
        """Select in a few operations for all tensors of a device; which of equal magnitudes is kept is its choice."""
        matrices = [as_matrix(check_dtype(tensor)) for tensor in tensors]
        index, values = self._by_region(tensors), self._by_region(tensors)
        kept = []
        for batch in batches(tuple(tuple(tensor.shape) for tensor in tensors), self.chunk):
            index_Ck, value_Ck = largest_by_torch(batch.chunks(matrices), self._num_kept(batch.pieces[0].region))
            kept.append(value_Ck.flatten())
            for piece, index_ck, value_ck in batch.split(index_Ck, value_Ck):
                index[piece.tensor][piece.number], values[piece.tensor][piece.number] = index_ck, value_ck
        if kept and not is_finite(torch.cat(kept)):
            raise non_finite(next(tensor for tensor in tensors if not is_finite(tensor)))
        return [(tuple(one), tuple(other)) for one, other in zip(index, values, strict=True)]

    def place_at_once(self, shapes: Shapes, selected: Sequence[Selected]) -> list[Decoded]:
        """Place the values of all tensors of a device in a few operations."""
        places = [list(index) for index, _ in selected]
        for batch in batches(tuple(tuple(shape) for shape in shapes), self.chunk):
            index_Ck = torch.cat([selected[piece.tensor][0][piece.number] for piece in batch.pieces])
            require_rising(index_Ck, batch.length, self)
            place_Ck = batch.places(index_Ck)
            for piece, place_ck, _ in batch.split(place_Ck, place_Ck):
                places[piece.tensor][piece.number] = place_ck
        return [
            Scattered(tuple(shape), joined(place), joined(values))
            for shape, place, (_, values) in zip(shapes, places, selected, strict=True)
        ]

    def _by_region(self, tensors: Sequence[Tensor]) -> list[list[Tensor]]:
        """Return room for what is found, by tensor and region."""
        return [[tensor] * len(regions(tuple(tensor.shape), self.chunk)) for tensor in tensors]

    def _num_kept(self, region: Region) -> int:
        return max(1, round(region.length * self.k / self.chunk))


@functools.lru_cache(maxsize=4096)  # a model has few shapes, and each is asked for at every step of a round
def _index_layout(method: TopK, shape: Shape) -> tuple[PartSpec, ...]:
    places = [(region, method._num_kept(region)) for region in regions(shape, method.chunk)]
    return tuple(PartSpec("index", torch.int16, (region.num_chunks, k), Rising(region.length)) for region, k in places)


Chunks = tuple[Region, Tensor, Tensor]  # with indices and values (C, k)


@dataclass(frozen=True)
class _Tiles(Decoded):
    """Kept values in the chunks of every region of a tensor, on the processor."""

    shape: Shape
    chunks: tuple[Chunks, ...]

    @property
    def _columns(self) -> int:
        return self.shape[1] if len(self.shape) == 2 else math.prod(self.shape)

    def tensor(self) -> Tensor:
        total_N = torch.zeros(math.prod(self.shape), dtype=torch.float32, device="cpu")
        self.add(0, total_N, 1.0)
        return total_N.view(self.shape)

    def add(self, start: int, total_n: Tensor, weight: float) -> None:
        row, band = start // self._columns if start else 0, total_n.numpy()
        for adds in self._adders:
            adds(row, band, weight)

    @functools.cached_property
    def _adders(self) -> list[Callable[[int, NDArray[np.float32], float], None]]:
        """Adders, one for each region, made once for all bands."""
        return [add_at(region, self._columns, *chunks) for region, *chunks in self.chunks]

    @property
    def nbytes(self) -> int:
        return sum(value_Ck.nbytes for _, _, value_Ck in self.chunks)  # the indices are the payload's

    def support(self) -> tuple[Tensor, Tensor]:
        places = [places_of(region, self._columns, index_Ck) for region, index_Ck, _ in self.chunks]
        return joined(places), joined([value_Ck for _, _, value_Ck in self.chunks])
