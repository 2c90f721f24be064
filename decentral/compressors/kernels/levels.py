"""Magnitudes in one byte: sixteenths of a power of two, counted down from the largest of a tensor.

Level 0 is zero; level 255 is just below the next power of two above the tensor's largest magnitude, whose exponent,
plus 100, is the peak (1,). Fifteen powers of two below 2**exponent, a magnitude counts as zero. A level is off by at
most 2.2 % (4.3 % at the end of float32) and has 8 significant bits, so that products with it are exact on every device.
"""
# Shape suffixes: R = rows of two magnitudes.

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["NUM_PEAKS", "coded_levels", "coded_levels_of", "counts_on", "level_sizes", "sizes_below"]

_PER_OCTAVE = 16
_LOWEST_PEAK, _HIGHEST_PEAK = -100, 127  # exponents: from the lowest, the smallest level is still a normal float32
NUM_PEAKS = _HIGHEST_PEAK - _LOWEST_PEAK + 1


def coded_levels(mean_R2: Tensor) -> tuple[Tensor, Tensor]:
    """Levels int32 (R, 2) in 0..255 of float64 magnitudes, and the peak int32 (1,) that they count down from."""
    octave_R2 = torch.log2(mean_R2)  # -inf for zero
    highest = octave_R2.amax().reshape(1) if mean_R2.numel() else octave_R2.new_full((1,), _LOWEST_PEAK)
    peak = (highest + 0.5 / _PER_OCTAVE).floor_().clamp_(_LOWEST_PEAK, _HIGHEST_PEAK)
    level_R2 = (octave_R2 - peak).mul_(_PER_OCTAVE).round_().clamp_(-256, _PER_OCTAVE - 1).add_(256 - _PER_OCTAVE)
    return level_R2.clamp_(min=0).int(), (peak - _LOWEST_PEAK).int()


def coded_levels_of(mean_R2: Tensor, counts: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """``coded_levels`` of tensors that lie one behind the other, of so many rows each: the levels (R, 2), the peak of
    each tensor (M,) and that of each row (R,).
    """
    octave_R2 = torch.log2(mean_R2)
    count_M = counts_on(tuple(counts), mean_R2.device)
    owner_R = torch.arange(len(counts), device=mean_R2.device).repeat_interleave(count_M, output_size=len(mean_R2))
    highest_M = octave_R2.new_full((len(counts),), _LOWEST_PEAK)  # of one without rows, and the least there is
    highest_M = highest_M.scatter_reduce(0, owner_R, octave_R2.amax(dim=1), "amax")
    peak_M = (highest_M + 0.5 / _PER_OCTAVE).floor_().clamp_(_LOWEST_PEAK, _HIGHEST_PEAK)
    level_R2 = (octave_R2 - peak_M[owner_R][:, None]).mul_(_PER_OCTAVE).round_()
    level_R2 = level_R2.clamp_(-256, _PER_OCTAVE - 1).add_(256 - _PER_OCTAVE).clamp_(min=0).int()
    place_M = (peak_M - _LOWEST_PEAK).int()
    return level_R2, place_M, place_M[owner_R]


def sizes_below(peak_R: Tensor, level_R2: Tensor) -> Tensor:
    """The float32 magnitudes (R, 2) of levels, each below the peak of its row."""
    return _sizes(peak_R.device)[peak_R.long()[:, None], level_R2.long()]


@functools.lru_cache(maxsize=256)
def counts_on(counts: tuple[int, ...], device: torch.device) -> Tensor:
    """Whole numbers on a device, which has them from the last round."""
    return torch.tensor(counts, dtype=torch.int64, device=device)


def level_sizes(peak: Tensor) -> Tensor:
    """The float32 magnitude (256,) of every level below this peak (1,), which is less than ``NUM_PEAKS``."""
    return _sizes(peak.device)[peak.int()].view(256)


@functools.cache
def _sizes(device: torch.device) -> Tensor:
    """float32 (NUM_PEAKS, 256); exponents from their bits, because pow is not exact on CUDA."""
    mantissa_16 = torch.tensor([round(128 * 2 ** (n / _PER_OCTAVE)) / 128 for n in range(_PER_OCTAVE)])
    sixteenth_256 = torch.arange(256, dtype=torch.int32) - (256 - _PER_OCTAVE)
    peak_P1 = torch.arange(_LOWEST_PEAK, _HIGHEST_PEAK + 1, dtype=torch.int32)[:, None]
    power_P256 = ((sixteenth_256 >> 4) + peak_P1 + 127 << 23).view(torch.float32)
    size_P256 = mantissa_16[sixteenth_256 & 15] * power_P256
    size_P256[:, 0] = 0
    return size_P256.to(device)
