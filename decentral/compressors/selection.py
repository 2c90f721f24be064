"""The largest entries of every chunk, found where they lie: a chunk is read once, in cache, and never copied out.

For the processor. On other devices `topk` says the same with torch. Of equal magnitudes the first are kept.
"""
# Shape suffixes: C = chunks of a region, k = entries kept per chunk.

import numpy as np
import torch
from torch import Tensor

from decentral.coding.compiled import compiled
from decentral.compressors.tiles import Region

__all__ = ["add_at", "largest"]

_MARGIN = np.uint32(1 << 20)  # an eighth of a power of two, on the bits of a float32


def largest(matrix: Tensor, region: Region, k: int) -> tuple[Tensor, Tensor]:
    """Rising indices int16 (C, k) and values float32 (C, k) of a contiguous float32 matrix."""
    index_Ck = np.empty((region.num_chunks, k), dtype=np.int16)
    value_Ck = np.empty((region.num_chunks, k), dtype=np.float32)
    _largest(matrix.numpy(), matrix.numpy().view(np.uint32), _where(region), index_Ck, value_Ck)
    return torch.from_numpy(index_Ck), torch.from_numpy(value_Ck)


def add_at(matrix: Tensor, region: Region, index_Ck: Tensor, value_Ck: Tensor, weight: float) -> None:
    """``matrix += weight * value`` at the indices of each chunk, in place, rounded as float32 twice."""
    _add_at(matrix.numpy(), _where(region), index_Ck.numpy(), value_Ck.numpy(), np.float32(weight))


def _where(region: Region) -> tuple[int, ...]:
    return region.top, region.left, region.tile_rows, region.tile_columns, region.height, region.width


@compiled
def _largest(values, bits, where, index, kept):  # type: ignore[no-untyped-def]
    """Candidates are what reaches seven eighths of the threshold of the chunk before: one compare for most entries."""
    top, left, _, tile_columns, height, width = where
    k, length = np.uint64(index.shape[1]), height * width
    size, order, place = np.empty(length, np.uint32), np.empty(length, np.uint32), np.empty(length, np.uint16)
    guess = np.uint32(0)
    for chunk in range(index.shape[0]):
        y, x = top + chunk // tile_columns * height, left + chunk % tile_columns * width
        tile = bits[y : y + height, x : x + width]
        n = _reaching(tile, guess, size, place)
        if n < k:  # the guess was too high
            n = _reaching(tile, np.uint32(0), size, place)
        for i in range(n):
            order[i] = size[i]
        threshold = _kth_largest(order, n, k)
        spare = k
        for s in size[:n]:
            spare -= np.uint64(s > threshold)
        at = np.uint64(0)
        for i in range(n):
            tied = size[i] == threshold
            if size[i] > threshold or (tied and spare > 0):
                spare -= np.uint64(tied)
                index[chunk, at] = place[i]
                kept[chunk, at] = values[y + place[i] // width, x + place[i] % width]
                at += np.uint64(1)
        guess = max(threshold, _MARGIN) - _MARGIN


@compiled
def _reaching(tile, least, size, place):  # type: ignore[no-untyped-def]
    """Write down sizes of at least ``least`` and where they are; returns how many."""
    n, i = np.uint64(0), np.uint64(0)
    for r in range(tile.shape[0]):
        for b in tile[r]:
            s = b & np.uint32(0x7FFFFFFF)
            if s >= least:
                size[n], place[n] = s, i
                n += np.uint64(1)
            i += np.uint64(1)
    return n


@compiled
def _kth_largest(sizes, n, k):  # type: ignore[no-untyped-def]
    """Hoare's selection among the first n sizes, which it reorders; numpy's partition takes numba 7 s to compile."""
    low, high, wanted = np.int64(0), np.int64(n) - 1, np.int64(k) - 1
    while low < high:
        pivot = sizes[(low + high) >> 1]
        i, j = low, high
        while i <= j:
            while sizes[i] > pivot:
                i += 1
            while sizes[j] < pivot:
                j -= 1
            if i <= j:
                sizes[i], sizes[j] = sizes[j], sizes[i]
                i += 1
                j -= 1
        if wanted <= j:
            high = j
        elif wanted >= i:
            low = i
        else:
            break
    return sizes[wanted]


@compiled
def _add_at(matrix, where, index, values, weight):  # type: ignore[no-untyped-def]
    top, left, _, tile_columns, height, width = where
    for chunk in range(index.shape[0]):
        y, x = top + chunk // tile_columns * height, left + chunk % tile_columns * width
        for n in range(index.shape[1]):
            i = np.int64(index[chunk, n])
            matrix[y + i // width, x + i % width] += weight * values[chunk, n]
