"""Codebooks: the range of a tensor's values cut into equal bins, each decoded to the mean of its members.

The mean minimises the squared error of a bin, so what is lost is never more than the tensor's variance; bins without a
member decode to 0.
"""
# Shape suffixes: N = values, K = bins.

import math

import torch
from torch import Tensor

__all__ = ["bin_means", "centred"]

_LARGEST_MEAN = 64  # of the magnitudes of places, in bins: sigma is at most 43 of them


def centred(value_N: Tensor, bins: int, window: float) -> tuple[Tensor, Tensor, Tensor]:
    """Mean (), bin width () and distances from the mean in bins (N,), float64; ``bins`` of them span ``window`` sigmas.

    The width is 1 when all values are equal. Sigma is that of a sample: N - 1 in the denominator.
    """
    wide_N = value_N.double()  # float64: the square of 1e38 has to fit
    mean = wide_N.sum() / max(1, value_N.numel())
    wide_N = wide_N - mean
    width = wide_N.norm() * (window / bins / math.sqrt(max(1, value_N.numel() - 1)))
    width = torch.where(width > 0, width, torch.ones_like(width))
    return mean, width, wide_N / width


def bin_means(place_N: Tensor, code_N: Tensor, bins: int) -> Tensor:
    """Mean of the places of each bin's members, float64 (K,); 0 where there are none.

    Summed as integers: parallel sums of floats differ from run to run on CUDA, and equal tensors must give equal bits.
    """
    unit = 2.0 ** -min(40, 62 - (_LARGEST_MEAN * place_N.numel()).bit_length())  # sums of N places stay below 2**62
    whole_N = (place_N / unit).round().long()
    sum_K = torch.zeros(bins, dtype=torch.int64, device=place_N.device).index_add_(0, code_N.long(), whole_N)
    count_K = torch.zeros_like(sum_K).index_add_(0, code_N.long(), torch.ones_like(whole_N))
    return sum_K.double() * unit / count_K.clamp(min=1)
