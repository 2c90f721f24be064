"""Codebooks of the tensor's own: its range is cut into equal bins, and each is decoded to the mean of its members.

The mean minimises the squared error of a bin, so what is lost is never more than the tensor's variance.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from decentral.coding import Floats, Symbols
from decentral.compressors.base import About, Method, PartSpec, Payload, Shape, check_input, check_parts, require
from decentral.tensors.device import slabs

__all__ = ["Codebook8", "SparseLoCo2"]

# Shape suffixes: N = values, n = values of a slab, K = bins.

_WINDOW = 6.0  # sigmas
_GROUPS = 4096  # of a device's sums: neighbours that add to one place would wait for each other
_LARGEST_MEAN = 64  # of the magnitudes of places, in bins: sigma is at most 43 of them


@dataclass(frozen=True, slots=True)
class _Binned:
    """Values in their bins. A place is a distance from the mean of all values, in bins; all but codes in float64."""

    code_N: Tensor  # uint8
    mean: Tensor
    width: Tensor  # of a bin; 1 when all values are equal
    place_K: Tensor  # the mean of each bin's members; 0 where there are none
    count_K: Tensor  # int64: how many these are


def _put_in_bins(value_N: Tensor, bins: int, code_of: Callable[[Tensor], Tensor]) -> _Binned:
    """Put every value in the bin that ``code_of(places)`` says; ``bins`` of them span six sigmas.

    Sigma is that of a sample: N - 1 in the denominator. Bins are summed as integers: parallel sums of floats differ
    from run to run on CUDA, and equal tensors must give equal bits.
    """
    mean, width = _centre(value_N, bins)
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
            code_n += bins * (torch.arange(stop - start, device=value_N.device, dtype=torch.int64) % groups)
        sum_GK.view(-1).index_add_(0, code_n, whole_n)
        count_GK.view(-1).index_add_(0, code_n, torch.ones_like(whole_n))
    sum_K, count_K = sum_GK.sum(dim=0), count_GK.sum(dim=0)
    return _Binned(code_N, mean, width, sum_K.double() * unit / count_K.clamp(min=1), count_K)


def _centre(value_N: Tensor, bins: int) -> tuple[Tensor, Tensor]:
    """Return the mean and the width of a bin; float64, as the square of 1e38 has to fit."""
    mean, square = value_N.new_zeros((), dtype=torch.float64), value_N.new_zeros((), dtype=torch.float64)
    for start, stop in slabs(value_N):
        mean += value_N[start:stop].sum(dtype=torch.float64)
    mean /= max(1, value_N.numel())
    for start, stop in slabs(value_N):
        square += (value_N[start:stop].double() - mean).square_().sum()
    width = square.sqrt() * (_WINDOW / bins / math.sqrt(max(1, value_N.numel() - 1)))
    return mean, torch.where(width > 0, width, torch.ones_like(width))


class _Codebook(Method):
    """Codes, then the level of each in float32; zero of a bin without members."""

    __slots__ = ()

    def decompress_one(self, payload: Payload) -> Tensor:
        """Return the level of every code."""
        check_parts(self, payload, self.layout(payload.shape))
        code_N, level_K = payload.parts
        require(torch.isfinite(level_K).all(), self, "every level must be finite")
        return level_K.index_select(0, code_N.int()).reshape(payload.shape)


# ---- codebook8: 256 bins over six sigmas ----
#
# Parts: codes uint8 (N,), rising with the value; codebook float32 (K,), 0 for a bin without members. K = 256 from 8192
# values on; below, the power of two that costs at most one bit per value (K <= N / 32), yet at least 16. So a bias of
# 768 pays 64 bytes and not 1 KiB, and has 16 bins in place of 256: wider ones, as the bounds say. At most log2 K + 32
# K / N bits per value; entropy coded 7.5 on Gaussian data, at an error of 0.016 of the norm. Bin b holds mean + sigma
# * 6 / K * [b - K/2, b - K/2 + 1): the bins lie evenly on both sides of the mean, and what is more than three sigmas
# away goes to the end bins. Between these a value is off by less than a bin, 6 sigma / K; in an end bin by as much as
# outliers differ. What is lost is at most the variance: |error|**2 <= N sigma**2. Means are rounded once, so that a
# level lies between its members, and both hold for neighbouring floats.
#
# INTELLECT-1's paper centres by the mean and speaks of six sigmas on both sides; its code has three, as here, and does
# not centre, so all values of a tensor whose mean is ten sigmas fall into the last bin, and it rounds, which puts the
# first bin half a bin further out than the last. Its ring quantises anew at every hop; here a contribution is
# quantised once, and in a reduce its result once.
#
# Source: Jaghouar et al., "INTELLECT-1 Technical Report", 2024, arXiv:2412.01152; bin means as in hivemind's
# Uniform8BitQuantization.

_FEWEST_BITS, _MOST_BITS = 4, 8
_VALUES_PER_BIN = 32  # a bin's mean has 32 bits: at most one bit per value


@dataclass(frozen=True, slots=True)
class Codebook8(_Codebook):
    """Uniform bins, decoded to the means of their members."""

    name: ClassVar[str] = "codebook8"
    about: ClassVar[About] = About(
        layout="codes 8 bits (N), codebook float32 (256); fewer bins below 8192 values",
        biased=False,
        source='Jaghouar et al., "INTELLECT-1 Technical Report", 2024, arXiv:2412.01152',
        bound=(
            "|error|**2 <= N * variance; |error| <= 6 * sigma / K per value, but in the two end bins, "
            "K = 256 from 8192 values on, 16 to 128 below"
        ),
    )

    def layout(self, shape: Shape) -> tuple[PartSpec, ...]:
        """Return codes, then the codebook."""
        numel = math.prod(shape)
        bits = _codebook_bits(numel)
        return (
            PartSpec(f"codes{bits}", torch.uint8, (numel,), Symbols(bits)),  # codes of other widths are other numbers
            PartSpec("codebook", torch.float32, (1 << bits,), Floats()),
        )

    def compress_one(self, tensor: Tensor) -> Payload:
        """Sort the values into bins, then take the bins' means."""
        value_N = check_input(tensor).flatten()
        bins = 1 << _codebook_bits(value_N.numel())
        found = _put_in_bins(value_N, bins, lambda place_n: place_n.floor().add_(bins // 2))
        level_K = (found.mean + found.place_K * found.width).where(found.count_K > 0, 0.0)
        return Payload(tuple(tensor.shape), (found.code_N, level_K.float()))


def _codebook_bits(numel: int) -> int:
    """Return the bits of a code of a tensor of so many values."""
    return min(_MOST_BITS, max(_FEWEST_BITS, (numel // _VALUES_PER_BIN).bit_length() - 1))


# ---- sparseloco2: one uniform grid per tensor ----
#
# Exactly as SparseLoCo's code has it, decoded to its bins' means.
#
# Parts: codes uint8 below 4 (N,), rising with the value; levels float32 (4,). At most 2 + 128/N bits per value. shift =
# mean(v); scale = 6 * std(v) / 4; code = clamp(round((v - shift) / scale + 2), 0, 3), ties to even; level = shift +
# mean of the code's members, less shift. The published code sends shift and the four means apart; their sum, rounded to
# float32, decodes to the same bits; where that overflows, at 3.4e38, it is the largest float. What is lost is at most
# the variance, |error|**2 <= N std**2, but for rounding: shift and mean are rounded apart, which is more than std where
# values differ in their last bits only.
#
# Here for comparison with published runs; use signmag2. The edges of the bins lie 2.25 and 0.75 sigmas below the mean
# and 0.75 above it. What topk keeps is bimodal, with magnitudes around one sigma, and so only two of the four bins are
# populated: two bits buy the sign. On Gaussian top-64-of-4096 the error is 0.113 of the norm over many chunks where
# signmag2's is 0.063, and entropy coding finds that the second bit says nothing: 1.02 bits against 1.93. One grid per
# tensor also sends all values of chunks with small values to one bin; and bin 0 reaches less far than bin 3, so the
# tensor -x does not decode to minus what x decodes to.
#
# Source: Sarfi et al., "Communication Efficient LLM Pre-training with SparseLoCo", 2025, arXiv:2508.15706, and the
# authors' code (sparseloco.py), with n_bins=4 as Templar sets it.

_BINS = 4
_LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True, slots=True)
class SparseLoCo2(_Codebook):
    """SparseLoCo's published 2-bit quantiser."""

    name: ClassVar[str] = "sparseloco2"
    about: ClassVar[About] = About(
        layout="codes 2 bits (N), levels float32 (4)",
        biased=True,
        source='Sarfi et al., "SparseLoCo", 2025, arXiv:2508.15706',
        bound="|error| <= sqrt(N) * (sigma + 2**-23 * |mean| + 2**-149)",
    )

    def layout(self, shape: Shape) -> tuple[PartSpec, ...]:
        """Return codes, then levels."""
        return (
            PartSpec("codes", torch.uint8, (math.prod(shape),), Symbols(2)),
            PartSpec("levels", torch.float32, (_BINS,), Floats()),
        )

    def compress_one(self, tensor: Tensor) -> Payload:
        """Sort the values into four bins, then take the bins' means."""
        value_N = check_input(tensor).flatten()
        found = _put_in_bins(value_N, _BINS, lambda place_n: (place_n + _BINS // 2).round_())
        mean_4 = (found.place_K * found.width).float()
        level_4 = (mean_4 + found.mean.float()).clamp_(-_LARGEST, _LARGEST)  # rounded apart, 3.4e38 would be Inf
        return Payload(tuple(tensor.shape), (found.code_N, level_4))
