"""What `signmag2` does to rows: find two magnitudes for each, take the nearer one, and put it back.

One pass over a row on the processor, where torch would take some thirty calls per tensor; torch on other devices.
"""
# Shape suffixes: R = rows, C = columns, S = splits.

import numpy as np
import torch
from torch import Tensor

from decentral.tensors.compiled import compiled
from decentral.tensors.device import one_kernel

__all__ = ["best_means", "code_rows", "decode_rows"]

_SIZE = np.uint32(0x7FFFFFFF)  # the bits of a float32 without its sign: they rise as the magnitude does
_SHORT = 256  # columns


def best_means(value_RC: Tensor) -> Tensor:
    """float64 (R, 2): the means on both sides of the split of a row's magnitudes with the least squared error."""
    if value_RC.device.type != "cpu":
        return best_means_anywhere(value_RC)
    mean_R2 = np.empty((len(value_RC), 2), dtype=np.float64)
    values = value_RC.contiguous().numpy()
    _best_means(values, values.view(np.uint32), mean_R2)
    return torch.from_numpy(mean_R2)


def code_rows(value_RC: Tensor, halfway_R: Tensor) -> Tensor:
    """uint8 (R, C): bit 0 for a magnitude above the row's half-way, bit 1 for a sign."""
    if value_RC.device.type != "cpu":
        return code_rows_anywhere(value_RC, halfway_R)
    code_RC = np.empty(tuple(value_RC.shape), dtype=np.uint8)
    _code_rows(value_RC.contiguous().numpy(), halfway_R.numpy(), code_RC)
    return torch.from_numpy(code_RC)


def decode_rows(code_RC: Tensor, size_R2: Tensor) -> Tensor:
    """float32 (R, C): the small or the large size of the row, with its sign; codes are below 4."""
    if code_RC.device.type != "cpu":
        size_RC = torch.where((code_RC & 1).bool(), size_R2[:, 1:], size_R2[:, :1])
        return torch.where((code_RC & 2).bool(), -size_RC, size_RC)
    value_RC = np.empty(tuple(code_RC.shape), dtype=np.float32)
    _decode_rows(code_RC.numpy(), size_R2.numpy(), value_RC)
    return torch.from_numpy(value_RC)


def best_means_anywhere(value_RC: Tensor) -> Tensor:
    rows, columns = value_RC.shape
    if rows == 0 or columns == 1:
        return (value_RC.abs().expand(rows, 2) if rows else value_RC.new_zeros(0, 2)).double()
    return _means_of_best_split(value_RC)


@one_kernel
def code_rows_anywhere(value_RC: Tensor, halfway_R: Tensor) -> Tensor:
    return (value_RC.abs() > halfway_R[:, None]).to(torch.uint8) | ((value_RC < 0).to(torch.uint8) << 1)


@one_kernel
def _means_of_best_split(value_RC: Tensor) -> Tensor:
    size_RC, columns = value_RC.abs(), value_RC.shape[1]
    sum_RC = size_RC.sort(dim=1).values.to(torch.float64).cumsum(dim=1)  # float64: 1e38 squared has to fit
    count_S = torch.arange(1, columns, dtype=torch.float64, device=size_RC.device)  # 1..C-1 small ones
    small_RS = sum_RC[:, :-1] / count_S
    large_RS = (sum_RC[:, -1:] - sum_RC[:, :-1]) / (columns - count_S)
    explained_RS = small_RS**2 * count_S + large_RS**2 * (columns - count_S)
    is_best_RS = count_S - 1 == explained_RS.argmax(dim=1, keepdim=True)  # looked up in registers, as memory is far
    found = (torch.where(is_best_RS, mean_RS, 0.0).sum(dim=1) for mean_RS in (small_RS, large_RS))
    return torch.stack(list(found), dim=1)


@compiled
def _best_means(values, bits, means):  # type: ignore[no-untyped-def]
    """Exact: every split of the sorted magnitudes is tried. Sums in float64, because 1e38 squared has to fit."""
    rows, columns = values.shape
    size, given = np.empty(columns, dtype=np.float32), np.empty(columns, dtype=np.uint32)
    total = np.empty(columns + 1, dtype=np.float64)
    share = 1 / np.arange(columns + 1)
    for r in range(rows):
        _sort_sizes(bits[r], given, size.view(np.uint32))
        total[0] = 0.0
        for n in range(columns):
            total[n + 1] = total[n] + np.float64(size[n])
        split, best = columns, -1.0
        for n in range(1, columns):
            below, above = total[n], total[columns] - total[n]
            explained = below * below * share[n] + above * above * share[columns - n]
            if explained > best:
                split, best = n, explained
        means[r] = total[columns] / columns
        if split < columns:
            means[r, 0], means[r, 1] = total[split] / split, (total[columns] - total[split]) / (columns - split)


@compiled
def _sort_sizes(bits, given, size):  # type: ignore[no-untyped-def]
    """Magnitudes, rising, as their bits. In a short row each entry counts the smaller ones: 64 of them take 0.34
    microseconds so, 0.92 by insertion, and 1.47 by numba's sort, because counting becomes vector code.
    """
    columns = bits.size
    for i in range(columns):
        given[i], size[i] = bits[i] & _SIZE, 0
    if columns > _SHORT:
        size[:] = given
        size.sort()
        return
    for i in range(columns):
        own, place = given[i], np.uint32(0)
        for j in range(columns):
            place += np.uint32(given[j] < own)
        while size[place] == own and own:  # its equals came before
            place += np.uint32(1)
        size[place] = own


@compiled
def _code_rows(values, halfway, codes):  # type: ignore[no-untyped-def]
    for r in range(values.shape[0]):
        for c in range(values.shape[1]):
            value = values[r, c]
            codes[r, c] = np.uint8(abs(value) > halfway[r]) | (np.uint8(value < 0) << np.uint8(1))


@compiled
def _decode_rows(codes, sizes, values):  # type: ignore[no-untyped-def]
    level = np.empty(4, dtype=np.float32)
    for r in range(codes.shape[0]):
        level[0], level[1], level[2], level[3] = sizes[r, 0], sizes[r, 1], -sizes[r, 0], -sizes[r, 1]
        for c in range(codes.shape[1]):
            values[r, c] = level[codes[r, c] & np.uint8(3)]
