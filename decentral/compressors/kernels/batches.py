"""Equal chunks of many tensors as one matrix: for devices, which take microseconds to be told of any operation.

The tensors lie one behind the other in a flat one. What `topk` does to one of them is the same for all of its chunks,
so those of one length are put together, in the order of the tensors and of their regions.
"""
# Shape suffixes: N = values of all tensors, C = chunks of a batch, L = values per chunk, k = entries kept per chunk.

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from decentral.compressors.kernels.tiles import Region, regions

__all__ = ["Batch", "batches"]

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Stretch:
    """One region of one tensor."""

    tensor: int  # of which
    number: int  # of its regions
    start: int  # where the tensor begins
    rows: int  # of the tensor as a matrix
    columns: int
    region: Region


@dataclass(frozen=True, slots=True)
class Batch:
    """Regions whose chunks are alike."""

    pieces: tuple[Stretch, ...]

    @property
    def length(self) -> int:
        """Values per chunk."""
        return self.pieces[0].region.length

    @property
    def counts(self) -> list[int]:
        """Chunks of each piece."""
        return [piece.region.num_chunks for piece in self.pieces]

    def chunks(self, flat_N: Tensor) -> Tensor:
        """A copy of them (C, L)."""
        made_CL = flat_N.new_empty(sum(self.counts), self.length)
        for piece, into in zip(self.pieces, made_CL.split_with_sizes(self.counts), strict=True):
            tiles = _tiles(flat_N, piece)
            into.view(tiles.shape).copy_(tiles)
        return made_CL

    def places(self, index_Ck: Tensor) -> Tensor:
        """Where indices inside chunks are in the flat tensor, int64 (C, k)."""
        first_C1, columns_C1 = _origins(self, index_Ck.device)
        width = self.pieces[0].region.width
        index_Ck = index_Ck.long()
        return first_C1 + index_Ck.div(width, rounding_mode="floor") * columns_C1 + index_Ck % width


@functools.lru_cache(maxsize=64)
def batches(shapes: tuple[Shape, ...], chunk: int) -> tuple[Batch, ...]:
    """The chunks of tensors of these shapes."""
    alike: dict[tuple[int, int], list[Stretch]] = {}
    start = 0
    for tensor, shape in enumerate(shapes):
        rows, columns = (shape[0], shape[1]) if len(shape) == 2 else (1, math.prod(shape))
        for number, region in enumerate(regions(shape, chunk)):
            piece = Stretch(tensor, number, start, rows, columns, region)
            alike.setdefault((region.height, region.width), []).append(piece)
        start += math.prod(shape)
    return tuple(Batch(tuple(pieces)) for pieces in alike.values())


def _tiles(flat_N: Tensor, piece: Stretch) -> Tensor:
    """A view of the region: tile row, tile column, row in tile, column in tile."""
    region, columns = piece.region, piece.columns
    shape = (region.tile_rows, region.tile_columns, region.height, region.width)
    strides = (region.height * columns, region.width, columns, 1)
    begin = flat_N.storage_offset() + piece.start + region.top * columns + region.left
    return flat_N.as_strided(shape, strides, begin)


@functools.lru_cache(maxsize=64)
def _origins(batch: Batch, device: torch.device) -> tuple[Tensor, Tensor]:
    """Of each chunk the place of its first value, and the columns of its tensor, int64 (C, 1)."""
    first, columns = [], []
    for piece in batch.pieces:
        region = piece.region
        row_R1 = (region.top + torch.arange(region.tile_rows)[:, None] * region.height) * piece.columns
        first.append((piece.start + row_R1 + region.left + torch.arange(region.tile_columns) * region.width).flatten())
        columns.append(torch.full((region.num_chunks,), piece.columns))
    return torch.cat(first)[:, None].to(device), torch.cat(columns)[:, None].to(device)


def by_tensor(shapes: Sequence[Shape], chunk: int) -> list[list[Tensor]]:
    """Room for what is found, by tensor and region."""
    return [[torch.empty(0)] * len(regions(tuple(shape), chunk)) for shape in shapes]
