"""Keep the k entries of largest magnitude of every chunk; ``>>`` says how their values are sent.

Parts: indices int16 (C, k) of every region of equal chunks (at most four regions), rising strictly inside each chunk;
then the kept values of every region, float32 when used alone. An index of 64 in 4096 takes 7.4 bits as a coded gap,
where log2 C(4096, 64) / 64 = 7.36, and at most 12; with ``k=64, chunk=4096`` one value of 64 is kept. Chunks are 64x64
tiles of a matrix, runs of 4096 of anything else (`tiles`); a chunk of L values keeps max(1, round(L * k / chunk)), so
that a short one may keep a smaller share than k / chunk: at 64 of 4096, 1 of 95.
Biased: use it with error feedback, or what it drops is gone for good.

Source: Sarfi et al., "Communication Efficient LLM Pre-training with SparseLoCo", 2025, arXiv:2508.15706; chunked
selection from Peng et al., "DeMo: Decoupled Momentum Optimization", 2024, arXiv:2411.19870.
"""
# Shape suffixes: C = chunks of a region, L = values per chunk, k = entries kept per chunk.

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from decentral.coding import Rising
from decentral.compressors.bands import AddBand
from decentral.compressors.base import About, PartSpec, Shape, check_dtype, non_finite, require_rising
from decentral.compressors.chain import SparsifierBase
from decentral.compressors.kernels.batches import batches, by_tensor
from decentral.compressors.kernels.selection import add_at, largest
from decentral.compressors.kernels.tiles import Region, as_matrix, cut, paste, places_of, regions, within
from decentral.compressors.support import joined
from decentral.errors import ConfigError
from decentral.tensors.ops import is_finite

__all__ = ["TopK", "largest_of_rows"]

Selected = tuple[Tensor, ...]  # by region
_LONGEST_CHUNK = 4096  # what 12 bits can point into
_BAND = 1 << 19  # values: 2 MiB of sums; of 31 million a step takes 26 ms so, 30 in bands of half, 46 in one


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
        """Indices (C, k) of every region."""
        places = regions(shape, self.chunk)
        return tuple(
            PartSpec("index", torch.int16, (region.num_chunks, self._kept(region)), Rising(region.length))
            for region in places
        )

    def value_shapes(self, shape: Shape) -> tuple[Shape, ...]:
        """(C, k) of every region."""
        return tuple((region.num_chunks, self._kept(region)) for region in regions(shape, self.chunk))

    def select(self, tensor: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Rising indices and kept values, (C, k) of every region. NaN and Inf are the largest of all, so they are kept:
        looking at what is kept finds them without another pass over everything.
        """
        matrix = as_matrix(check_dtype(tensor)).contiguous()
        find = largest if tensor.device.type == "cpu" else _largest
        found = [find(matrix, region, self._kept(region)) for region in regions(tuple(tensor.shape), self.chunk)]
        if not all(is_finite(value_Ck) for _, value_Ck in found):
            raise non_finite(tensor)
        return tuple(index_Ck for index_Ck, _ in found), tuple(value_Ck for _, value_Ck in found)

    def add_at(self, total: Tensor, index: tuple[Tensor, ...], values: tuple[Tensor, ...], weight: float) -> None:
        """Add at the kept places; PayloadError unless every index is inside its chunk and above the one before."""
        places = regions(tuple(total.shape), self.chunk)
        for region, index_Ck in zip(places, index, strict=True):
            require_rising(index_Ck, region.length, self)
        matrix = as_matrix(total)
        add = add_at if total.device.type == "cpu" else _add_at
        for region, index_Ck, value_Ck in zip(places, index, values, strict=True):
            add(matrix, region, index_Ck, value_Ck.view(index_Ck.shape), weight)

    def rows_of_band(self, shape: Shape) -> int:
        """Rows of a matrix that are added together: of whole tiles, and as many values as a core's cache holds."""
        side = math.isqrt(self.chunk)
        return max(1, _BAND // (side * max(1, shape[1]))) * side

    def adder_of_bands(self, shape: Shape, index: tuple[Tensor, ...], values: tuple[Tensor, ...]) -> AddBand:
        """``add_at`` of bands of such rows, on the processor; PayloadError on a bad index."""
        chunks = [
            (region, index_Ck, value_Ck.view(index_Ck.shape))
            for region, index_Ck, value_Ck in zip(regions(shape, self.chunk), index, values, strict=True)
        ]
        for region, index_Ck, _ in chunks:
            require_rising(index_Ck, region.length, self)

        def add(start: int, total_n: Tensor, weight: float) -> None:
            matrix = total_n.view(-1, shape[1])
            for region, index_Ck, value_Ck in chunks:
                part, these = within(region, start // shape[1], len(matrix))
                if part.num_chunks:
                    add_at(matrix, part, index_Ck[these], value_Ck[these], weight)

        return add

    def places(self, shape: Shape, index: tuple[Tensor, ...]) -> Tensor:
        """The kept places (S,) in the flattened tensor; PayloadError on a bad index."""
        found, columns = [], shape[1] if len(shape) == 2 else math.prod(shape)
        for region, index_Ck in zip(regions(shape, self.chunk), index, strict=True):
            require_rising(index_Ck, region.length, self)
            found.append(places_of(region, columns, index_Ck).flatten())
        return joined(found, torch.int64)

    def select_flat(self, flat_N: Tensor, shapes: Sequence[Shape]) -> list[tuple[Selected, Selected]]:
        """``select`` of tensors that lie one behind the other, by tensor: a few operations for all of them."""
        index, values = by_tensor(shapes, self.chunk), by_tensor(shapes, self.chunk)
        kept = []
        for batch in batches(tuple(shapes), self.chunk):
            chunk_CL = batch.chunks(check_dtype(flat_N))
            index_Ck, value_Ck = _largest_of(chunk_CL, self._kept(batch.pieces[0].region))
            kept.append(value_Ck.flatten())
            parts = zip(
                batch.pieces,
                index_Ck.split_with_sizes(batch.counts),
                value_Ck.split_with_sizes(batch.counts),
                strict=True,
            )
            for piece, index_ck, value_ck in parts:
                index[piece.tensor][piece.number], values[piece.tensor][piece.number] = index_ck, value_ck
        if kept and not is_finite(torch.cat(kept)):
            raise non_finite(flat_N)
        return [(tuple(one), tuple(other)) for one, other in zip(index, values, strict=True)]

    def add_at_flat(
        self, total_N: Tensor, shapes: Sequence[Shape], found: Sequence[tuple[Selected, Selected]], weight: float
    ) -> None:
        """``add_at`` of what this process selected itself, and nobody need check."""
        for batch in batches(tuple(shapes), self.chunk):
            index_Ck = torch.cat([found[piece.tensor][0][piece.number] for piece in batch.pieces])
            value_S = torch.cat([found[piece.tensor][1][piece.number].flatten() for piece in batch.pieces])
            total_N.index_add_(0, batch.places(index_Ck).flatten(), value_S * weight)

    def _kept(self, region: Region) -> int:
        return max(1, round(region.length * self.k / self.chunk))


def largest_of_rows(value_CL: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Rising indices int16 (C, k) of the largest magnitudes of each row, and the values there."""
    rows = Region(0, 0, value_CL.shape[0], 1, 1, value_CL.shape[1])
    return largest(value_CL, rows, k) if value_CL.device.type == "cpu" else _largest(value_CL, rows, k)


def _largest(matrix: Tensor, region: Region, k: int) -> tuple[Tensor, Tensor]:
    """What `selection.largest` does, on any device; which of equal magnitudes is kept is the device's choice."""
    return _largest_of(cut(matrix, region), k)


def _largest_of(chunk_CL: Tensor, k: int) -> tuple[Tensor, Tensor]:
    index_Ck = chunk_CL.abs().topk(k, dim=1, sorted=False).indices.sort(dim=1).values
    return index_Ck.to(torch.int16), chunk_CL.gather(1, index_Ck)


def _add_at(matrix: Tensor, region: Region, index_Ck: Tensor, value_Ck: Tensor, weight: float) -> None:
    """What `selection.add_at` does, on any device."""
    chunk_CL = cut(matrix, region)
    paste(matrix, region, chunk_CL.scatter_add(1, index_Ck.long(), value_Ck * weight))
