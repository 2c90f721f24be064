"""The largest entries of every chunk, found where they lie: a chunk is read once, in cache, and never copied out.

For the processor. On other devices `topk` says the same with torch. Of equal magnitudes the first are kept.
No branch asks about one entry: one in forty is a candidate, and a branch guessed wrong costs some twenty laps.
"""
# Shape suffixes: C = chunks of a region, k = entries kept per chunk.

import numpy as np
import torch
from torch import Tensor

from decentral.compressors.kernels.tiles import Region
from decentral.tensors.compiled import compiled

__all__ = ["add_at", "largest"]

_MARGIN = np.uint32(1 << 20)  # an eighth of a power of two, on the bits of a float32
_SIZE = np.uint32(0x7FFFFFFF)  # the bits of a float32 without its sign: they rise as the magnitude does
_0, _1, _8, _32, _56 = (np.uint64(number) for number in (0, 1, 8, 32, 56))
_ROUND_UP = 1 << 32  # i * (_ROUND_UP // width + 1) >> 32 is i // width for both below 2**16, three times as fast
_PLACES = np.uint64(0x0001020304050607)  # times 1 << 8 * p, it has p in its highest byte


def largest(matrix: Tensor, region: Region, k: int) -> tuple[Tensor, Tensor]:
    """Rising indices int16 (C, k) and values float32 (C, k) of a contiguous float32 matrix."""
    index_Ck = np.empty((region.num_chunks, k), dtype=np.int16)
    value_Ck = np.empty((region.num_chunks, k), dtype=np.float32)
    values, flags = matrix.view(-1).numpy(), np.zeros(-(-region.length // 8) * 8, dtype=np.uint8)
    _largest(values, values.view(np.uint32), _where(matrix, region), flags, flags.view("<u8"), index_Ck, value_Ck)
    return torch.from_numpy(index_Ck), torch.from_numpy(value_Ck)


def add_at(matrix: Tensor, region: Region, index_Ck: Tensor, value_Ck: Tensor, weight: float) -> None:
    """``matrix += weight * value`` at the indices of each chunk of a contiguous matrix, in place, rounded twice."""
    _add_at(matrix.view(-1).numpy(), _where(matrix, region), index_Ck.numpy(), value_Ck.numpy(), np.float32(weight))


def _where(matrix: Tensor, region: Region) -> tuple[int, ...]:
    return matrix.shape[1], region.top, region.left, region.tile_rows, region.tile_columns, region.height, region.width


@compiled
def _largest(values, bits, where, flags, words, index, kept):  # type: ignore[no-untyped-def]
    """Candidates are what reaches seven eighths of the threshold of the chunk before."""
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
    """By halving the range of values, each pass vector code, or any number that exactly k reach: that takes some eight
    passes instead of twenty. ``low`` is at most what is looked for.
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
