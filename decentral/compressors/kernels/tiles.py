"""Cut a tensor of any shape into chunks of neighbouring values, and put it together again.

A matrix is cut into square tiles (64x64 for chunks of 4096), any other tensor into runs of its flattened values.
What is left over at the borders makes smaller chunks, so a tensor has at most four regions of equal chunks:
inside, right edge, bottom edge, corner. Each region is handled as one matrix (chunks, values per chunk).

Source: DeMo's tiling (Peng et al., "DeMo", 2024, arXiv:2411.19870), without its search for divisors: a prime
dimension would make tiles one value wide.
"""

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from decentral.tensors.compiled import compiled

__all__ = ["Region", "as_matrix", "bands", "cut", "paste", "places_of", "regions", "within"]


@dataclass(frozen=True, slots=True)
class Region:
    """A rectangle of a matrix, cut into equal tiles."""

    top: int
    left: int
    tile_rows: int  # tiles from top to bottom
    tile_columns: int
    height: int  # of one tile
    width: int

    @property
    def num_chunks(self) -> int:
        """Tiles in the region."""
        return self.tile_rows * self.tile_columns

    @property
    def length(self) -> int:
        """Values in one tile."""
        return self.height * self.width


@functools.lru_cache(maxsize=4096)
def regions(shape: tuple[int, ...], chunk: int) -> tuple[Region, ...]:
    """The regions of a tensor of this shape, without empty ones; ``chunk`` is a square number."""
    side = math.isqrt(chunk)
    height, width = (side, side) if len(shape) == 2 else (1, chunk)
    rows, columns = shape if len(shape) == 2 else (1, math.prod(shape))
    return tuple(
        Region(top, left, tile_rows, tile_columns, tile_height, tile_width)
        for top, tile_rows, tile_height in _spans(rows, height)
        for left, tile_columns, tile_width in _spans(columns, width)
    )


def as_matrix(tensor: Tensor) -> Tensor:
    """The matrix that regions refer to: the tensor itself, or one row of all its values."""
    return tensor if tensor.dim() == 2 else tensor.reshape(1, -1)


def bands(region: Region, most: int) -> Iterator[Region]:
    """The region in parts of at most so many chunks, in their order."""
    rows, columns = max(1, most // region.tile_columns), min(most, region.tile_columns)
    for row in range(0, region.tile_rows, rows):
        for column in range(0, region.tile_columns, columns):
            yield Region(
                region.top + row * region.height,
                region.left + column * region.width,
                min(rows, region.tile_rows - row),
                min(columns, region.tile_columns - column),
                region.height,
                region.width,
            )


def within(region: Region, row: int, rows: int) -> tuple[Region, slice]:
    """The tiles of the region that lie in so many rows of the matrix from ``row`` on, as seen from there, and which of
    its chunks they are. Rows hold tiles whole.
    """
    first = max(0, -(-(row - region.top) // region.height))
    last = max(first, min(region.tile_rows, (row + rows - region.top) // region.height))
    top = region.top + first * region.height - row
    columns = region.tile_columns
    part = Region(top, region.left, last - first, columns, region.height, region.width)
    return part, slice(first * columns, last * columns)


def cut(matrix: Tensor, region: Region) -> Tensor:
    """A region's chunks, (num_chunks, length); a copy unless chunks are runs."""
    return _tiles(matrix, region).permute(0, 2, 1, 3).reshape(region.num_chunks, region.length)


def places_of(region: Region, columns: int, index_Ck: Tensor) -> Tensor:
    """Where indices inside chunks (C, k) are in the flattened matrix of so many columns, int64 (C, k)."""
    place_Ck = np.empty(tuple(index_Ck.shape), dtype=np.int64)
    where = (columns, region.top, region.left, region.tile_columns, region.height, region.width)
    _places(index_Ck.numpy(), where, place_Ck)
    return torch.from_numpy(place_Ck)


def paste(matrix: Tensor, region: Region, chunks: Tensor) -> None:
    """Write a region's chunks back, in place."""
    tiles = chunks.view(region.tile_rows, region.tile_columns, region.height, region.width)
    _tiles(matrix, region).copy_(tiles.permute(0, 2, 1, 3))


def _tiles(matrix: Tensor, region: Region) -> Tensor:
    """A view (tile row, row in tile, tile column, column in tile) of the region."""
    rows, columns = region.tile_rows * region.height, region.tile_columns * region.width
    part = matrix[region.top : region.top + rows, region.left : region.left + columns]
    return part.view(region.tile_rows, region.height, region.tile_columns, region.width)  # splits only: never a copy


def _spans(size: int, tile: int) -> list[tuple[int, int, int]]:
    """(start, number of tiles, tile size) for the whole tiles of a dimension, then for the rest."""
    whole, rest = divmod(size, tile)
    return [span for span in ((0, whole, tile), (whole * tile, 1, rest)) if span[1] and span[2]]


@compiled
def _places(index, where, place):  # type: ignore[no-untyped-def]
    columns, top, left, tile_columns, height, width = where
    for chunk in range(index.shape[0]):
        first = (top + chunk // tile_columns * height) * columns + left + chunk % tile_columns * width
        for n in range(index.shape[1]):
            i = index[chunk, n]
            place[chunk, n] = first + i // width * columns + i % width
