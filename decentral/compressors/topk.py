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

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
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
from decentral.errors import ConfigError
from decentral.tensors.compiled import compiled
from decentral.tensors.ops import is_finite

__all__ = [
    "Batch",
    "Region",
    "TopK",
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
    "within",
]

# Shape suffixes: C = chunks of a region, or of a batch, L = values per chunk, k = entries kept per chunk, N = values of
# all tensors.

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
        """Return indices (C, k) of every region."""
        places = regions(shape, self.chunk)
        return tuple(
            PartSpec("index", torch.int16, (region.num_chunks, self._num_kept(region)), Rising(region.length))
            for region in places
        )

    def value_shapes(self, shape: Shape) -> tuple[Shape, ...]:
        """Return (C, k) of every region."""
        return tuple((region.num_chunks, self._num_kept(region)) for region in regions(shape, self.chunk))

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


Chunks = tuple["Region", Tensor, Tensor]  # with indices and values (C, k)


@dataclass(frozen=True, slots=True)
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
        matrix = total_n.view(-1, self._columns)
        is_whole = len(total_n) == math.prod(self.shape)
        for region, index_Ck, value_Ck in self.chunks if is_whole else self._within(start, len(matrix)):
            add_at(matrix, region, index_Ck, value_Ck, weight)

    def _within(self, start: int, rows: int) -> Iterator[Chunks]:
        """Yield the chunks of a band of so many rows, as seen from its first row."""
        for region, index_Ck, value_Ck in self.chunks:
            part, chunks = within(region, start // self._columns, rows)
            if part.num_chunks:
                yield part, index_Ck[chunks], value_Ck[chunks]

    def support(self) -> tuple[Tensor, Tensor]:
        places = [places_of(region, self._columns, index_Ck) for region, index_Ck, _ in self.chunks]
        return joined(places), joined([value_Ck for _, _, value_Ck in self.chunks])


def largest_of_rows(value_CL: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return rising indices int16 (C, k) of the largest magnitudes of each row, and the values there."""
    rows = Region(0, 0, value_CL.shape[0], 1, 1, value_CL.shape[1])
    return largest(value_CL, rows, k) if value_CL.device.type == "cpu" else largest_by_torch(value_CL, k)


def largest_by_torch(chunk_CL: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Do what `largest` does, on any device; which of equal magnitudes is kept is the device's choice."""
    index_Ck = chunk_CL.abs().topk(k, dim=1, sorted=False).indices.sort(dim=1).values
    return index_Ck.to(torch.int16), chunk_CL.gather(1, index_Ck)


# ---- chunks of neighbouring values ----
#
# A tensor of any shape is cut into them, and put together again.
#
# A matrix is cut into square tiles (64x64 for chunks of 4096), any other tensor into runs of its flattened values. What
# is left over at the borders makes smaller chunks, so a tensor has at most four regions of equal chunks: inside, right
# edge, bottom edge, corner. Each region is handled as one matrix (chunks, values per chunk).
#
# Source: DeMo's tiling (Peng et al., "DeMo", 2024, arXiv:2411.19870), without its search for divisors: a prime
# dimension would make tiles one value wide.


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


def within(region: Region, row: int, rows: int) -> tuple[Region, slice]:
    """Return the tiles of the region that lie in so many rows of the matrix from ``row`` on, as seen from there, and
    which of its chunks they are. Rows hold tiles whole.
    """
    first = max(0, -(-(row - region.top) // region.height))
    last = max(first, min(region.tile_rows, (row + rows - region.top) // region.height))
    top = region.top + first * region.height - row
    columns = region.tile_columns
    part = Region(top, region.left, last - first, columns, region.height, region.width)
    return part, slice(first * columns, last * columns)


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
    for chunk in range(index.shape[0]):
        first = (top + chunk // tile_columns * height) * columns + left + chunk % tile_columns * width
        for n in range(index.shape[1]):
            i = index[chunk, n]
            place[chunk, n] = first + i // width * columns + i % width


# ---- largest entries of every chunk ----
#
# They are found where they lie: a chunk is read once, in cache, and never copied out.
#
# For the processor. On other devices `largest_by_torch` and `Scattered` say the same. Of equal magnitudes the first are
# kept. No branch asks about one entry: one in forty is a candidate, and a branch guessed wrong costs some
# twenty laps.

_MARGIN = np.uint32(1 << 20)  # an eighth of a power of two, on the bits of a float32
_SIZE = np.uint32(0x7FFFFFFF)  # the bits of a float32 without its sign: they rise as the magnitude does
_0, _1, _8, _32, _56 = (np.uint64(number) for number in (0, 1, 8, 32, 56))
_ROUND_UP = 1 << 32  # i * (_ROUND_UP // width + 1) >> 32 is i // width for both below 2**16, three times as fast
_PLACES = np.uint64(0x0001020304050607)  # times 1 << 8 * p, it has p in its highest byte


def largest(matrix: Tensor, region: Region, k: int) -> tuple[Tensor, Tensor]:
    """Return rising indices int16 (C, k) and values float32 (C, k) of a contiguous float32 matrix."""
    index_Ck = np.empty((region.num_chunks, k), dtype=np.int16)
    value_Ck = np.empty((region.num_chunks, k), dtype=np.float32)
    values, flags = matrix.view(-1).numpy(), np.zeros(-(-region.length // 8) * 8, dtype=np.uint8)
    _largest(values, values.view(np.uint32), _where(matrix, region), flags, flags.view("<u8"), index_Ck, value_Ck)
    return torch.from_numpy(index_Ck), torch.from_numpy(value_Ck)


def add_at(matrix: Tensor, region: Region, index_Ck: Tensor, value_Ck: Tensor, weight: float) -> None:
    """Do ``matrix += weight * value`` at the indices of each chunk of a contiguous matrix, in place, rounded twice."""
    _add_at(matrix.view(-1).numpy(), _where(matrix, region), index_Ck.numpy(), value_Ck.numpy(), np.float32(weight))


def _where(matrix: Tensor, region: Region) -> tuple[int, ...]:
    return matrix.shape[1], region.top, region.left, region.tile_rows, region.tile_columns, region.height, region.width


@compiled
def _largest(values, bits, where, flags, words, index, kept):  # type: ignore[no-untyped-def]
    """Look at candidates only: what reaches seven eighths of the threshold of the chunk before."""
    columns, top, left, _, tile_columns, height, width = where
    k, tile = index.shape[1], (columns, height, width)
    share, gap = np.uint64(_ROUND_UP // width + 1), np.uint64(columns - width)
    place, size = np.empty(height * width + 1, np.uint16), np.empty(height * width, np.uint32)
    guess = np.uint32(0)
    for chunk in range(index.shape[0]):
        start = (top + chunk // tile_columns * height) * columns + left + chunk % tile_columns * width
        n = _reaching(bits[start:], tile, guess, flags, words, place)
        if n < k:  # the guess was too high
            guess = np.uint32(0)
            n = _reaching(bits[start:], tile, guess, flags, words, place)
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
def _reaching(bits, tile, least, flags, words, place):  # type: ignore[no-untyped-def]
    """Write down where a tile's sizes are at least ``least``; returns how many. A flag for each in a loop that becomes
    vector code; then eight flags at a time, and a branch only where two of the eight are set.
    """
    columns, height, width = tile
    for r in range(height):
        row, flag = bits[r * columns : r * columns + width], flags[r * width : (r + 1) * width]
        for c in range(width):
            flag[c] = np.uint8((row[c] & _SIZE) >= least)
    n = _0
    for w in range(words.size):
        found, first = words[w], _8 * np.uint64(w)
        place[n] = first + (((found & (~found + _1)) * _PLACES) >> _56)  # the lowest of them
        n += np.uint64(found != _0)
        found &= found - _1
        while found:
            place[n] = first + (((found & (~found + _1)) * _PLACES) >> _56)
            n += _1
            found &= found - _1
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
def _add_at(matrix, where, index, values, weight):  # type: ignore[no-untyped-def]
    columns, top, left, _, tile_columns, height, width = where
    share, gap = np.uint64(_ROUND_UP // width + 1), np.uint64(columns - width)
    for chunk in range(index.shape[0]):
        tile = matrix[(top + chunk // tile_columns * height) * columns + left + chunk % tile_columns * width :]
        for n in range(index.shape[1]):
            i = np.uint64(index[chunk, n])
            tile[i + ((i * share) >> _32) * gap] += weight * values[chunk, n]  # i // width rows down


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
