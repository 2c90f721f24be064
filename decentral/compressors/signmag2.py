"""Sign and magnitude bit: the bit says whether a magnitude is a small or a large one of its row.

Parts: codes uint8 below 4 (N,), bit 0 magnitude, bit 1 sign; peaks uint8 (1,), the exponent of the largest level plus
100; levels uint8 (rows,) of the large magnitudes; steps uint8 (rows,) from there down to the small ones. At most 2 +
16/columns bits per value; behind topk 64 of 4096, entropy coded, 1.9: a large magnitude is one of four. Rows are the
last dimension: behind topk, one row is one chunk. The levels are the means of the small and of the large magnitudes,
split where the squared error is least (exact: all splits of the sorted magnitudes are tried); each value then takes
the nearer level. A level is a sixteenth of a power of two, counted down from the largest level of all rows: off by at
most 2.2 %, which leaves the code's error at 0.062 of the norm on Gaussian top-64-of-4096 (0.061 with exact levels);
4.3 % at the end of float32, above 1.9 * 2**127. Fifteen to sixteen powers of two below the largest (t of the printed
bound), and below 2**-115, a magnitude counts as zero, so a row of such is lost whole, and error feedback keeps it.

Source: Sarfi et al., "SparseLoCo", 2025, arXiv:2508.15706 sends 2-bit values with one uniform grid per tensor; on
top-k output only two of its four bins are populated. The split is Lloyd's ("Least squares quantization in PCM",
1982).
"""

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from decentral.coding import Symbols
from decentral.compressors.base import (
    About,
    Decoded,
    Dense,
    Method,
    PartSpec,
    Payload,
    Shape,
    check_dtype,
    check_shapes,
    non_finite,
    require,
)
from decentral.tensors.compiled import compiled
from decentral.tensors.device import one_kernel
from decentral.tensors.ops import is_finite

__all__ = ["SignMag2", "best_means", "code_rows", "decode_rows"]

# Shape suffixes: R = rows, C = columns (values per row), N = R * C values, S = splits of a row, M = tensors.


@dataclass(frozen=True, slots=True)
class SignMag2(Method):
    """Sign and one magnitude bit, two levels per row."""

    name: ClassVar[str] = "signmag2"
    about: ClassVar[About] = About(
        layout="codes 2 bits (N), levels 8 + 8 bits (rows), one exponent",
        biased=True,
        source='Sarfi et al., "SparseLoCo", 2025, arXiv:2508.15706; Lloyd, 1982',
        bound=(
            "|error|**2 <= |x|**2 - 0.998 * sum(|x|)**2 / columns + columns * t**2 per row, "
            "t = 2**-14.9 * max(largest of all rows, 2**-100)"
        ),
    )

    def layout(self, shape: Shape) -> tuple[PartSpec, ...]:
        """Return codes, the exponent of the largest level, large levels, steps to the small ones."""
        return _layout(shape)

    def compress(self, tensors: Sequence[Tensor]) -> list[Payload]:
        """Fit two levels to each row, then take the nearer one; matrices with as many columns together."""
        shapes = [_matrix(tuple(tensor.shape)) for tensor in tensors]
        payloads: dict[int, Payload] = {}
        for here in _by_columns(shapes).values():
            value_RC = check_dtype(torch.cat([tensors[i].reshape(shapes[i]) for i in here]))
            if not is_finite(value_RC):
                raise non_finite(next(tensors[i] for i in here if not is_finite(tensors[i])))
            parts = self._compress_rows(value_RC, [shapes[i][0] for i in here])
            payloads |= {i: Payload(tuple(tensors[i].shape), own) for i, own in zip(here, parts, strict=True)}
        return [payloads[i] for i in range(len(tensors))]

    def _compress_rows(self, value_RC: Tensor, counts: list[int]) -> list[tuple[Tensor, ...]]:
        """Return the parts of matrices that lie one behind the other, of so many rows each."""
        level_R2, peak_M, peak_R = _encode_levels(best_means(value_RC), counts)
        halfway_R = _level_sizes(peak_R, level_R2).mul(0.5).sum(dim=1)  # halved first: the sum could overflow
        code_RC = code_rows(value_RC, halfway_R)
        large_R, step_R = level_R2[:, 1].to(torch.uint8), (level_R2[:, 1] - level_R2[:, 0]).to(torch.uint8)
        codes = [code_rC.flatten() for code_rC in code_RC.split_with_sizes(counts)]
        peaks = peak_M.to(torch.uint8).split_with_sizes([1] * len(counts))
        return list(zip(codes, peaks, large_R.split_with_sizes(counts), step_R.split_with_sizes(counts), strict=True))

    def decompress(self, payloads: Sequence[Payload]) -> list[Decoded]:
        """Return +-level; matrices with as many columns together."""
        for payload in payloads:
            check_shapes(self, payload, self.layout(payload.shape))
        shapes = [_matrix(payload.shape) for payload in payloads]
        decoded: dict[int, Decoded] = {}
        for columns, here in _by_columns(shapes).items():
            counts = [shapes[i][0] for i in here]
            code_N, peak_M, large_R, step_R = (torch.cat([payloads[i].parts[n] for i in here]) for n in range(4))
            value_RC = self._decode_rows(code_N.view(sum(counts), columns), peak_M, large_R, step_R, tuple(counts))
            for i, rows in zip(here, value_RC.split_with_sizes(counts), strict=True):
                decoded[i] = Dense(rows.reshape(payloads[i].shape))
        return [decoded[i] for i in range(len(payloads))]

    def _decode_rows(
        self, code_RC: Tensor, peak_M: Tensor, large_R: Tensor, step_R: Tensor, counts: tuple[int, ...]
    ) -> Tensor:
        """Return the float32 (R, C) of matrices that lie one behind the other, of so many rows each. PayloadError
        unless the parts, which have their shapes, keep their rules.
        """
        if code_RC.device.type == "cpu":
            value_RC, broken = decode_rows(code_RC, peak_M, large_R, step_R, counts)
            require(not broken, self, _RULES[broken])
            return value_RC
        for holds, rule in zip(_hold(code_RC, peak_M, large_R, step_R), _RULES[1:], strict=True):
            require(holds, self, rule)
        return decode_rows_anywhere(code_RC, peak_M, large_R, step_R, counts)


_RULES = ("", "codes must be below 4", "a small level lies below zero", "a peak is beyond float32")


def _hold(code_RC: Tensor, peak_M: Tensor, large_R: Tensor, step_R: Tensor) -> Iterator[Tensor]:
    """Yield whether each rule holds."""
    yield (code_RC < 4).all()
    yield (step_R <= large_R).all()
    yield (peak_M < _NUM_PEAKS).all()


@functools.lru_cache(maxsize=4096)  # asked for at every step of a round
def _layout(shape: Shape) -> tuple[PartSpec, ...]:
    rows, columns = _matrix(shape)
    return (
        PartSpec("codes", torch.uint8, (rows * columns,), Symbols(2)),
        PartSpec("peaks", torch.uint8, (1,), Symbols(8)),
        PartSpec("levels", torch.uint8, (rows,), Symbols(8)),
        PartSpec("steps", torch.uint8, (rows,), Symbols(8)),
    )


def _by_columns(shapes: Sequence[tuple[int, int]]) -> dict[int, list[int]]:
    """Return the numbers of the matrices that have so many columns."""
    numbers: dict[int, list[int]] = {}
    for number, (_, columns) in enumerate(shapes):
        numbers.setdefault(columns, []).append(number)
    return numbers


def _matrix(shape: Shape) -> tuple[int, int]:
    """Return (rows, columns): the last dimension against all others; no rows when there are no values."""
    columns = shape[-1] if shape else 1
    return (math.prod(shape[:-1]), columns) if columns else (0, 0)


# ---- magnitudes in one byte ----
#
# Sixteenths of a power of two, counted down from the largest of a tensor.
#
# Level 0 is zero; level 255 is just below the next power of two above the tensor's largest magnitude, whose exponent,
# plus 100, is the peak (1,). Fifteen powers of two below 2**exponent, a magnitude counts as zero. A level is off by at
# most 2.2 % (4.3 % at the end of float32) and has 8 significant bits, so that products with it are exact on every
# device.

_PER_OCTAVE = 16
_LOWEST_PEAK, _HIGHEST_PEAK = -100, 127  # exponents: from the lowest, the smallest level is still a normal float32
_NUM_PEAKS = _HIGHEST_PEAK - _LOWEST_PEAK + 1


def _encode_levels(mean_R2: Tensor, counts: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Return levels int32 (R, 2) in 0..255 of float64 magnitudes of tensors that lie one behind the other, of so many
    rows each; and the peaks int32 that they count down from, of each tensor (M,) and of each row (R,).
    """
    octave_R2 = torch.log2(mean_R2)  # -inf for zero
    count_M = _counts_on(tuple(counts), mean_R2.device)
    owner_M = torch.arange(len(counts), dtype=torch.int64, device=mean_R2.device)
    owner_R = owner_M.repeat_interleave(count_M, output_size=len(mean_R2))
    highest_M = octave_R2.new_full((len(counts),), _LOWEST_PEAK)  # of one without rows, and the least there is
    highest_M = highest_M.scatter_reduce(0, owner_R, octave_R2.amax(dim=1), "amax")
    peak_M = (highest_M + 0.5 / _PER_OCTAVE).floor_().clamp_(_LOWEST_PEAK, _HIGHEST_PEAK)
    level_R2 = (octave_R2 - peak_M[owner_R][:, None]).mul_(_PER_OCTAVE).round_()
    level_R2 = level_R2.clamp_(-256, _PER_OCTAVE - 1).add_(256 - _PER_OCTAVE).clamp_(min=0).int()
    place_M = (peak_M - _LOWEST_PEAK).int()
    return level_R2, place_M, place_M[owner_R]


def _level_sizes(peak_R: Tensor, level_R2: Tensor) -> Tensor:
    """Return the float32 magnitudes (R, 2) of levels, each below the peak of its row."""
    return _size_table(peak_R.device)[peak_R.long()[:, None], level_R2.long()]


@functools.lru_cache(maxsize=256)
def _counts_on(counts: tuple[int, ...], device: torch.device) -> Tensor:
    """Return whole numbers on a device, which has them from the last round."""
    return torch.tensor(counts, dtype=torch.int64, device=device)


@functools.cache
def _size_table(device: torch.device) -> Tensor:
    """Return float32 (_NUM_PEAKS, 256); exponents from their bits, because pow is not exact on CUDA."""
    mantissas = [round(128 * 2 ** (n / _PER_OCTAVE)) / 128 for n in range(_PER_OCTAVE)]
    mantissa_16 = torch.tensor(mantissas, dtype=torch.float32, device="cpu")
    sixteenth_256 = torch.arange(256, dtype=torch.int32, device="cpu") - (256 - _PER_OCTAVE)
    peak_P1 = torch.arange(_LOWEST_PEAK, _HIGHEST_PEAK + 1, dtype=torch.int32, device="cpu")[:, None]
    power_P256 = ((sixteenth_256 >> 4) + peak_P1 + 127 << 23).view(torch.float32)
    size_P256 = mantissa_16[sixteenth_256 & 15] * power_P256
    size_P256[:, 0] = 0
    return size_P256.to(device)


# ---- two magnitudes for each row ----
#
# `SignMag2` finds them, has each value take the nearer one, and puts that back.
#
# One pass over a row on the processor, where torch would take some thirty calls per tensor; torch on other devices.

_SIZE = np.uint32(0x7FFFFFFF)  # the bits of a float32 without its sign: they rise as the magnitude does
_SHORT = 256  # columns


def best_means(value_RC: Tensor) -> Tensor:
    """Return float64 (R, 2): the means on both sides of the split of a row's magnitudes that loses least."""
    if value_RC.device.type != "cpu":
        return best_means_anywhere(value_RC)
    mean_R2 = np.empty((len(value_RC), 2), dtype=np.float64)
    values = value_RC.contiguous().numpy()
    _best_means(values, values.view(np.uint32), mean_R2)
    return torch.from_numpy(mean_R2)


def code_rows(value_RC: Tensor, halfway_R: Tensor) -> Tensor:
    """Return uint8 (R, C): bit 0 for a magnitude above the row's half-way, bit 1 for a sign."""
    if value_RC.device.type != "cpu":
        return code_rows_anywhere(value_RC, halfway_R)
    code_RC = np.empty(tuple(value_RC.shape), dtype=np.uint8)
    _code_rows(value_RC.contiguous().numpy(), halfway_R.numpy(), code_RC)
    return torch.from_numpy(code_RC)


def decode_rows(
    code_RC: Tensor, peak_M: Tensor, large_R: Tensor, step_R: Tensor, counts: tuple[int, ...]
) -> tuple[Tensor, int]:
    """Return float32 (R, C): the small or the large size of the row, with its sign; and the rule that is broken, 0:
    none. On the processor.
    """
    value_RC, table = np.empty(tuple(code_RC.shape), dtype=np.float32), _size_table(code_RC.device).numpy()
    levels, count_M = (peak_M.numpy(), large_R.numpy(), step_R.numpy()), _counts_on(counts, code_RC.device).numpy()
    broken = int(_decode_rows(code_RC.numpy(), *levels, count_M, table, value_RC))
    return torch.from_numpy(value_RC), broken


def decode_rows_anywhere(
    code_RC: Tensor, peak_M: Tensor, large_R: Tensor, step_R: Tensor, counts: tuple[int, ...]
) -> Tensor:
    """Return the same of parts that keep the rules."""
    peak_R = peak_M.repeat_interleave(_counts_on(counts, peak_M.device), output_size=len(code_RC))
    size_R2 = _level_sizes(peak_R, torch.stack([large_R - step_R, large_R], dim=1))
    size_RC = torch.where((code_RC & 1).bool(), size_R2[:, 1:], size_R2[:, :1])
    return torch.where((code_RC & 2).bool(), -size_RC, size_RC)


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
    """Try every split of the sorted magnitudes. Sums in float64, because 1e38 squared has to fit."""
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
    """Sort magnitudes, as their bits. In a short row each entry counts the smaller ones: 64 of them take 0.34
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
def _decode_rows(codes, peaks, large, steps, counts, table, values):  # type: ignore[no-untyped-def]
    level, seen, r = np.empty(4, dtype=np.float32), np.uint8(0), 0
    for m in range(peaks.size):
        if peaks[m] >= table.shape[0]:
            return 3
        for _ in range(counts[m]):
            if steps[r] > large[r]:
                return 2
            small, big = table[peaks[m], large[r] - steps[r]], table[peaks[m], large[r]]
            level[0], level[1], level[2], level[3] = small, big, -small, -big
            for c in range(codes.shape[1]):
                seen |= codes[r, c]
                values[r, c] = level[codes[r, c] & np.uint8(3)]
            r += 1
    return 1 if seen > 3 else 0
