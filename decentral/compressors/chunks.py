"""Chunks of neighbouring values: how a tensor of any shape is cut into them, and what is largest in each.

A matrix is cut into square tiles (64x64 for chunks of 4096), any other tensor into runs of its flattened values. What
is left over at the borders makes smaller chunks, so a tensor has at most four regions of equal chunks: inside, right
edge, bottom edge, corner. Each region is handled as one matrix (chunks, values per chunk).

Source: DeMo's tiling (Peng et al., "DeMo", 2024, arXiv:2411.19870), without its search for divisors: a prime
dimension would make tiles one value wide.
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from decentral.compressors.base import Shape
from decentral.tensors.compiled import compiled, first_bit, prefetch, which_reach

__all__ = [
    "Batch",
    "Region",
    "Stretch",
    "add_at",
    "as_matrix",
    "bands",
    "batches",
    "cut",
    "largest",
    "largest_by_torch",
    "largest_of_rows",
    "paste",
    "places_of",
    "regions",
]

# Shape suffixes: C = chunks of a region, or of a batch, L = values per chunk, k = entries kept per chunk.

_0, _1, _32 = (np.uint64(number) for number in (0, 1, 32))
_ROUND_UP = 1 << 32  # i * (_ROUND_UP // width + 1) >> 32 is i // width for both below 2**16, three times as fast


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
    """Return the regions of a tensor of this shape, without empty ones; ``chunk`` is a square number."""
    side = math.isqrt(chunk)
    height, width = (side, side) if len(shape) == 2 else (1, chunk)
    rows, columns = shape if len(shape) == 2 else (1, math.prod(shape))
    return tuple(
        Region(top, left, tile_rows, tile_columns, tile_height, tile_width)
        for top, tile_rows, tile_height in _spans(rows, height)
        for left, tile_columns, tile_width in _spans(columns, width)
    )


def as_matrix(tensor: Tensor) -> Tensor:
    """Return the matrix that regions refer to: the tensor itself, or one row of all its values."""
    return tensor if tensor.dim() == 2 else tensor.reshape(1, -1)


def bands(region: Region, most: int) -> Iterator[Region]:
    """Yield the region in parts of at most so many chunks, in their order."""
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


def cut(matrix: Tensor, region: Region) -> Tensor:
    """Return a region's chunks, (num_chunks, length); a copy unless chunks are runs."""
    return _tiles(matrix, region).permute(0, 2, 1, 3).reshape(region.num_chunks, region.length)


def places_of(region: Region, columns: int, index_Ck: Tensor) -> Tensor:
    """Return where indices inside chunks (C, k) are in the flattened matrix of so many columns, int64 (C, k)."""
    place_Ck = np.empty(tuple(index_Ck.shape), dtype=np.int64)
    where = (columns, region.top, region.left, region.tile_columns, region.height, region.width)
    _places(index_Ck.numpy(), where, place_Ck)
    return torch.from_numpy(place_Ck)


def paste(matrix: Tensor, region: Region, chunks: Tensor) -> None:
    """Write a region's chunks back, in place."""
    tiles = chunks.view(region.tile_rows, region.tile_columns, region.height, region.width)
    _tiles(matrix, region).copy_(tiles.permute(0, 2, 1, 3))


def _tiles(matrix: Tensor, region: Region) -> Tensor:
    """Return a view (tile row, row in tile, tile column, column in tile) of the region."""
    rows, columns = region.tile_rows * region.height, region.tile_columns * region.width
    part = matrix[region.top : region.top + rows, region.left : region.left + columns]
    return part.view(region.tile_rows, region.height, region.tile_columns, region.width)  # splits only: never a copy


def _spans(size: int, tile: int) -> list[tuple[int, int, int]]:
    """Return (start, number of tiles, tile size) for the whole tiles of a dimension, then for the rest."""
    whole, rest = divmod(size, tile)
    return [span for span in ((0, whole, tile), (whole * tile, 1, rest)) if span[1] and span[2]]


@compiled
def _places(index, where, place):  # type: ignore[no-untyped-def]
    columns, top, left, tile_columns, height, width = where
    share, gap = np.uint64(_ROUND_UP // width + 1), np.uint64(columns - width)
    for chunk in range(index.shape[0]):
        first = np.uint64((top + chunk // tile_columns * height) * columns + left + chunk % tile_columns * width)
        for n in range(index.shape[1]):
            i = np.uint64(index[chunk, n])
            place[chunk, n] = first + i + ((i * share) >> _32) * gap  # i // width rows down


# ---- equal chunks of many tensors ----
#
# As one matrix: for devices, which take microseconds to be told of any operation. What `TopK` does to one tensor is the
# same for all of its chunks, so those of one length are put together, in the order of the tensors and of their regions.


@dataclass(frozen=True, slots=True)
class Stretch:
    """A region of a tensor."""

    tensor: int  # its number among the tensors
    number: int  # of its regions
    columns: int  # of the tensor as a matrix
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

    def chunks(self, matrices: Sequence[Tensor]) -> Tensor:
        """Return a copy of them (C, L)."""
        copied_CL = matrices[0].new_empty(sum(self.counts), self.length)
        for piece, into, _ in self.split(copied_CL, copied_CL):
            tiles = _tiles(matrices[piece.tensor], piece.region).permute(0, 2, 1, 3)
            into.view(tiles.shape).copy_(tiles)
        return copied_CL

    def split(self, first_C: Tensor, second_C: Tensor) -> Iterator[tuple[Stretch, Tensor, Tensor]]:
        """Yield each piece with its chunks of both tensors."""
        counts = self.counts
        yield from zip(self.pieces, first_C.split_with_sizes(counts), second_C.split_with_sizes(counts), strict=True)

    def places(self, index_Ck: Tensor) -> Tensor:
        """Return where indices inside chunks are in each one's flattened tensor, int64 (C, k)."""
        first_C1, columns_C1 = _origins(self, index_Ck.device)
        width = self.pieces[0].region.width
        index_Ck = index_Ck.long()
        return first_C1 + index_Ck.div(width, rounding_mode="floor") * columns_C1 + index_Ck % width


@functools.lru_cache(maxsize=64)
def batches(shapes: tuple[Shape, ...], chunk: int) -> tuple[Batch, ...]:
    """Return the chunks of tensors of these shapes."""
    alike: dict[tuple[int, int], list[Stretch]] = {}
    for tensor, shape in enumerate(shapes):
        columns = shape[1] if len(shape) == 2 else math.prod(shape)
        for number, region in enumerate(regions(shape, chunk)):
            alike.setdefault((region.height, region.width), []).append(Stretch(tensor, number, columns, region))
    return tuple(Batch(tuple(pieces)) for pieces in alike.values())


@functools.lru_cache(maxsize=64)
def _origins(batch: Batch, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the place of each chunk's first value, and the columns of its tensor, int64 (C, 1)."""
    first, columns = [], []
    for piece in batch.pieces:
        region = piece.region
        row_R = region.top + region.height * torch.arange(region.tile_rows, dtype=torch.int64, device="cpu")
        left_C = region.left + region.width * torch.arange(region.tile_columns, dtype=torch.int64, device="cpu")
        first.append((row_R[:, None] * piece.columns + left_C).flatten())
        columns.append(torch.full((region.num_chunks,), piece.columns, dtype=torch.int64, device="cpu"))
    return torch.cat(first)[:, None].to(device), torch.cat(columns)[:, None].to(device)


# ---- largest entries of every chunk ----
#
# They are found where they lie: a chunk is read once, in cache, and never copied out.
#
# For the processor. On other devices `largest_by_torch` and `Scattered` say the same. Of equal magnitudes the first are
# kept. No branch asks about one entry: one in forty is a candidate, and a branch guessed wrong costs some
# twenty laps. The rows of a tile lie far from each other in memory, where the processor foresees nothing: so while one
# tile is looked at, the next one is asked for. 31 million values take 21 ms so, 28 without, 43 in 8 flags a word.

_MARGIN = np.uint32(1 << 20)  # an eighth of a power of two, on the bits of a float32
_SIZE = np.uint32(0x7FFFFFFF)  # the bits of a float32 without its sign: they rise as the magnitude does
_AT_ONCE = 64  # values: a bit of a word for each
_LINE = 16  # values of a line of memory


def largest(matrix: Tensor, region: Region, k: int) -> tuple[Tensor, Tensor]:
    """Return rising indices int16 (C, k) and values float32 (C, k) of a contiguous float32 matrix."""
    index_Ck = np.empty((region.num_chunks, k), dtype=np.int16)
    value_Ck = np.empty((region.num_chunks, k), dtype=np.float32)
    values = matrix.view(-1).numpy()
    _largest(values, values.view(np.uint32), _where(matrix, region), index_Ck, value_Ck)
    return torch.from_numpy(index_Ck), torch.from_numpy(value_Ck)


def largest_of_rows(value_CL: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return rising indices int16 (C, k) of the largest magnitudes of each row, and the values there."""
    rows = Region(0, 0, value_CL.shape[0], 1, 1, value_CL.shape[1])
    return largest(value_CL, rows, k) if value_CL.device.type == "cpu" else largest_by_torch(value_CL, k)


def largest_by_torch(chunk_CL: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Do what `largest` does, on any device; which of equal magnitudes is kept is the device's choice."""
    index_Ck = chunk_CL.abs().topk(k, dim=1, sorted=False).indices.sort(dim=1).values
    return index_Ck.to(torch.int16), chunk_CL.gather(1, index_Ck)


def add_at(
    region: Region, columns: int, index_Ck: Tensor, value_Ck: Tensor
) -> Callable[[int, NDArray[np.float32], float], None]:
    """Return what does ``band += weight * value`` at the indices of a region's chunks, in place, rounded twice:
    ``(row, band, weight)``, of some rows of a matrix from ``row`` on, flat, which hold their tiles whole.
    """
    where = (columns, region.top, region.left, region.tile_rows, region.tile_columns, region.height, region.width)
    index, values = index_Ck.numpy(), value_Ck.numpy()
    return lambda row, band, weight: _add_at(row, band, where, index, values, np.float32(weight))


def _where(matrix: Tensor, region: Region) -> tuple[int, ...]:
    return matrix.shape[1], region.top, region.left, region.tile_rows, region.tile_columns, region.height, region.width


@compiled
def _largest(values, bits, where, index, kept):  # type: ignore[no-untyped-def]
    """Look at candidates only: what reaches seven eighths of the threshold of the chunk before."""
    columns, top, left, _, tile_columns, height, width = where
    k, tile = index.shape[1], (columns, height, width)
    share, gap = np.uint64(_ROUND_UP // width + 1), np.uint64(columns - width)
    place, size = np.empty(height * width + 1, np.uint16), np.empty(height * width, np.uint32)
    guess = np.uint32(0)
    for chunk in range(index.shape[0]):
        start = (top + chunk // tile_columns * height) * columns + left + chunk % tile_columns * width
        n = _reaching(bits[start:], tile, guess, place)
        if n < k:  # the guess was too high
            guess = np.uint32(0)
            n = _reaching(bits[start:], tile, guess, place)
        own, value = bits[start:], values[start:]
        for i in range(n):
            p = np.uint64(place[i])
            size[i] = own[p + ((p * share) >> _32) * gap] & _SIZE  # p // width rows down
        threshold = _kth_largest(size[:n], k, guess)
        _keep(size[:n], place, k, threshold)
        for i in range(k):
            p = np.uint64(place[i])
            index[chunk, i] = place[i]
            kept[chunk, i] = value[p + ((p * share) >> _32) * gap]
        guess = max(threshold, _MARGIN) - _MARGIN


@compiled
def _reaching(bits, tile, least, place):  # type: ignore[no-untyped-def]
    """Write down where a tile's sizes are at least ``least``; returns how many. A bit for each of 64 in one go; then a
    branch only where three of them are set.
    """
    columns, height, width = tile
    n, whole = _0, width // _AT_ONCE * _AT_ONCE
    for r in range(height):
        row, first = np.uint64(r * columns), np.uint64(r * width)
        for c in range(0, whole, _AT_ONCE):
            at, left = row + np.uint64(c), first + np.uint64(c)
            for ahead in range(width, width + _AT_ONCE, _LINE):
                prefetch(bits, at + np.uint64(ahead))
            found = which_reach(bits, at, least)
            for _ in range(2):
                place[n] = left + first_bit(found)
                n += np.uint64(found != _0)
                found &= found - _1
            while found:
                place[n] = left + first_bit(found)
                n += _1
                found &= found - _1
        for c in range(whole, width):
            place[n] = first + np.uint64(c)
            n += np.uint64((bits[row + np.uint64(c)] & _SIZE) >= least)
    return np.int64(n)


@compiled
def _kth_largest(sizes, k, low):  # type: ignore[no-untyped-def]
    """Search by halving the range of values, each pass vector code, or any number that exactly k reach: that takes some
    eight passes instead of twenty. ``low`` is at most what is looked for.
    """
    high = low
    for size in sizes:
        high = max(high, size)
    while low < high:
        middle, reaching = high - ((high - low) >> np.uint32(1)), np.uint32(0)
        for size in sizes:
            reaching += np.uint32(size >= middle)
        if reaching == k:
            return middle
        if reaching > k:
            low = middle
        else:
            high = middle - np.uint32(1)
    return low


@compiled
def _keep(sizes, place, k, threshold):  # type: ignore[no-untyped-def]
    """Move the places of the k largest to the front, in their order."""
    spare = np.int64(k)
    for size in sizes:
        spare -= np.int64(size > threshold)
    at = _0
    for i in range(sizes.size):
        tied = np.int64(sizes[i] == threshold) & np.int64(spare > 0)
        spare -= tied
        place[at] = place[i]
        at += np.uint64(tied) | np.uint64(sizes[i] > threshold)


@compiled
def _add_at(row, band, where, index, values, weight):  # type: ignore[no-untyped-def]
    columns, top, left, tile_rows, tile_columns, height, width = where
    share, gap = np.uint64(_ROUND_UP // width + 1), np.uint64(columns - width)
    first = max(0, -((top - row) // height))
    last = min(tile_rows, (row + band.size // columns - top) // height)
    for chunk in range(first * tile_columns, last * tile_columns):
        start = (top - row + chunk // tile_columns * height) * columns + left + chunk % tile_columns * width
        tile = band[start:]
        for n in range(index.shape[1]):
            i = np.uint64(index[chunk, n])
            tile[i + ((i * share) >> _32) * gap] += weight * values[chunk, n]  # i // width rows down
