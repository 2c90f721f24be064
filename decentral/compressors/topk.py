"""Keep the k entries of largest magnitude of every chunk; ``>>`` says how their values are sent.

Parts: indices uint8 (ceil(1.5 K),), 12 bits each, two in three bytes, rising strictly inside each chunk; then the
kept values of every region of equal chunks (at most four regions), float32 when used alone. 12 + 32 bits per kept
value; with ``k=64, chunk=4096`` one value of 64 is kept. Chunks are 64x64 tiles of a matrix, runs of 4096 of anything
else (`tiles`); a chunk of L values keeps max(1, round(L * k / chunk)). Biased: use it through `compress_with_debt`, or
what it drops is gone for good.

Source: Sarfi et al., "Communication Efficient LLM Pre-training with SparseLoCo", 2025, arXiv:2508.15706; chunked
selection from Peng et al., "DeMo: Decoupled Momentum Optimization", 2024, arXiv:2411.19870.
"""
# Shape suffixes: C = chunks of a region, L = values per chunk, k = entries kept per chunk, K = all entries kept.

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from decentral.compressors.base import About, Method, PartSpec, Payload, Shape, check_input, require
from decentral.compressors.chain import Chain
from decentral.compressors.none import Uncompressed
from decentral.compressors.packing import pack12, packed_nbytes, unpack12
from decentral.compressors.tiles import Region, as_matrix, cut, paste, regions
from decentral.errors import ConfigError

__all__ = ["TopK"]

_LONGEST_CHUNK = 4096  # what 12 bits can point into


@dataclass(frozen=True, slots=True)
class TopK(Method):
    """Keep ``k`` of every ``chunk`` entries."""

    name: ClassVar[str] = "topk"
    about: ClassVar[About] = About(
        layout="indices 12 bits (N*k/chunk), values float32 (N*k/chunk)",
        biased=True,
        source='Sarfi et al., "SparseLoCo", 2025, arXiv:2508.15706',
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

    def layout(self, shape: Shape) -> tuple[PartSpec, ...]:
        """Indices, then float32 values."""
        return self._alone.layout(shape)

    def compress(self, tensor: Tensor) -> Payload:
        """Keep the largest entries exactly."""
        return self._alone.compress(tensor)

    def decompress(self, payload: Payload) -> Tensor:
        """Kept entries in their places, zero elsewhere."""
        return self._alone.decompress(payload)

    def index_layout(self, shape: Shape) -> tuple[PartSpec, ...]:
        """One part of packed indices."""
        kept = sum(math.prod(rows) for rows in self.value_shapes(shape))
        return (PartSpec(torch.uint8, (packed_nbytes(kept, 12),)),)

    def value_shapes(self, shape: Shape) -> tuple[Shape, ...]:
        """(C, k) of every region."""
        return tuple((region.num_chunks, self._kept(region)) for region in regions(shape, self.chunk))

    def select(self, tensor: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Packed indices, and the kept values (C, k) of every region."""
        matrix = as_matrix(check_input(tensor))
        chunks = [(cut(matrix, region), self._kept(region)) for region in regions(tuple(tensor.shape), self.chunk)]
        index = [_largest(chunk_CL, k) for chunk_CL, k in chunks]
        values = tuple(chunk_CL.gather(1, index_Ck) for (chunk_CL, _), index_Ck in zip(chunks, index, strict=True))
        nothing = torch.zeros(0, dtype=torch.int64, device=tensor.device)
        return (pack12(torch.cat([nothing, *(index_Ck.flatten() for index_Ck in index)])),), values

    def place(self, shape: Shape, index: tuple[Tensor, ...], values: tuple[Tensor, ...]) -> Tensor:
        """The dense tensor; PayloadError unless every index is inside its chunk and above the one before."""
        shapes = self.value_shapes(shape)
        sizes = [math.prod(rows) for rows in shapes]
        pieces = torch.split_with_sizes(unpack12(index[0], sum(sizes), self), sizes)
        matrix = as_matrix(torch.zeros(shape, dtype=torch.float32, device=index[0].device))
        for region, rows, piece, value_Ck in zip(regions(shape, self.chunk), shapes, pieces, values, strict=True):
            index_Ck = piece.view(rows)
            self._check(index_Ck, region)
            chunk_CL = matrix.new_zeros(region.num_chunks, region.length)
            paste(matrix, region, chunk_CL.scatter_(1, index_Ck, value_Ck.view(rows)))
        return matrix.view(shape)

    @property
    def _alone(self) -> Chain:
        return Chain(self, Uncompressed())

    def _kept(self, region: Region) -> int:
        return max(1, round(region.length * self.k / self.chunk))

    def _check(self, index_Ck: Tensor, region: Region) -> None:
        """A peer chose these numbers. On CUDA one bad index would abort the whole process."""
        inside = (index_Ck[:, -1] < region.length).all()  # the last is the largest when they rise
        rising = (index_Ck[:, 1:] > index_Ck[:, :-1]).all()
        require(inside & rising, self, f"indices must rise strictly within [0, {region.length})")


def _largest(chunk_CL: Tensor, k: int) -> Tensor:
    """Rising indices (C, k) of the k largest magnitudes of every row."""
    return chunk_CL.abs().topk(k, dim=1, sorted=False).indices.sort(dim=1).values
