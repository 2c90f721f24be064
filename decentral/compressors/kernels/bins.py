"""Codebooks: the range of a tensor's values cut into equal bins, each decoded to the mean of its members.

The mean minimises the squared error of a bin, so what is lost is never more than the tensor's variance; bins without a
member decode to 0.
"""
# Shape suffixes: N = values, n = values of a slab, K = bins.

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from decentral.tensors.device import slabs

__all__ = ["Binned", "binned"]

_GROUPS = 4096  # of a device's sums: neighbours that add to one place would wait for each other
_LARGEST_MEAN = 64  # of the magnitudes of places, in bins: sigma is at most 43 of them


@dataclass(frozen=True, slots=True)
class Binned:
    """Values in their bins. A place is a distance from the mean of all values, in bins; all but codes in float64."""

    code_N: Tensor  # uint8
    mean: Tensor
    width: Tensor  # of a bin; 1 when all values are equal
    place_K: Tensor  # the mean of each bin's members; 0 where there are none
    count_K: Tensor  # int64: how many these are


def binned(value_N: Tensor, bins: int, window: float, code_of: Callable[[Tensor], Tensor]) -> Binned:
    """Every value in the bin that ``code_of(places)`` says; ``bins`` of them span ``window`` sigmas.

    Sigma is that of a sample: N - 1 in the denominator. Bins are summed as integers: parallel sums of floats differ
    from run to run on CUDA, and equal tensors must give equal bits.
    """
    mean, width = _centre(value_N, bins, window)
    unit = 2.0 ** -min(40, 62 - (_LARGEST_MEAN * value_N.numel()).bit_length())  # sums of N places stay below 2**62
    code_N = torch.empty(value_N.numel(), dtype=torch.uint8, device=value_N.device)
    groups = 1 if value_N.device.type == "cpu" else _GROUPS
    sum_GK = torch.zeros(groups, bins, dtype=torch.int64, device=value_N.device)
    count_GK = torch.zeros_like(sum_GK)
    for start, stop in slabs(value_N):
        place_n = (value_N[start:stop].double() - mean) / width
        code_n = code_of(place_n).clamp_(0, bins - 1).long()
        whole_n = (place_n / unit).round_().long()
        code_N[start:stop] = code_n
        if groups > 1:
            code_n += bins * (torch.arange(stop - start, device=value_N.device) % groups)
        sum_GK.view(-1).index_add_(0, code_n, whole_n)
        count_GK.view(-1).index_add_(0, code_n, torch.ones_like(whole_n))
    sum_K, count_K = sum_GK.sum(dim=0), count_GK.sum(dim=0)
    return Binned(code_N, mean, width, sum_K.double() * unit / count_K.clamp(min=1), count_K)


def _centre(value_N: Tensor, bins: int, window: float) -> tuple[Tensor, Tensor]:
    """Mean and bin width; float64, as the square of 1e38 has to fit."""
    mean, square = value_N.new_zeros((), dtype=torch.float64), value_N.new_zeros((), dtype=torch.float64)
    for start, stop in slabs(value_N):
        mean += value_N[start:stop].sum(dtype=torch.float64)
    mean /= max(1, value_N.numel())
    for start, stop in slabs(value_N):
        square += (value_N[start:stop].double() - mean).square_().sum()
    width = square.sqrt() * (window / bins / math.sqrt(max(1, value_N.numel() - 1)))
    return mean, torch.where(width > 0, width, torch.ones_like(width))
