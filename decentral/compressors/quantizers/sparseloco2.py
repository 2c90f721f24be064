"""2 bits per value, exactly as SparseLoCo's code has them: one uniform grid per tensor, decoded to its bins' means.

Parts: codes uint8 below 4 (N,), rising with the value; levels float32 (4,). At most 2 + 128/N bits per value. shift =
mean(v); scale = 6 * std(v) / 4; code = clamp(round((v - shift) / scale + 2), 0, 3), ties to even; level = shift + mean
of the code's members, less shift. The published code sends shift and the four means apart; their sum, rounded to
float32, decodes to the same bits; where that overflows, at 3.4e38, it is the largest float. What is lost is at most the
variance, |error|**2 <= N std**2, but for rounding: shift and mean are rounded apart, which is more than std where
values differ in their last bits only.

Here for comparison with published runs; use signmag2. The edges of the bins lie 2.25 and 0.75 sigmas below the mean
and 0.75 above it. What topk keeps is bimodal, with magnitudes around one sigma, and so only two of the four bins are
populated: two bits buy the sign. On Gaussian top-64-of-4096 the error is 0.113 of the norm over many chunks where
signmag2's is 0.063, and entropy coding finds that the second bit says nothing: 1.02 bits against 1.93. One grid per
tensor also sends all values of chunks with small values to one bin; and bin 0 reaches less far than bin 3, so the
tensor -x does not decode to minus what x decodes to.

Source: Sarfi et al., "Communication Efficient LLM Pre-training with SparseLoCo", 2025, arXiv:2508.15706, and the
authors' code (sparseloco.py), with n_bins=4 as Templar sets it.
"""
# Shape suffixes: N = values.

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from decentral.coding import Floats, Symbols
from decentral.compressors.base import About, Method, PartSpec, Payload, Shape, check_input, check_parts, require
from decentral.compressors.kernels.bins import binned

__all__ = ["SparseLoCo2"]

_BINS = 4
_WINDOW = 6.0  # sigmas
_LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True, slots=True)
class SparseLoCo2(Method):
    """SparseLoCo's published 2-bit quantiser."""

    name: ClassVar[str] = "sparseloco2"
    about: ClassVar[About] = About(
        layout="codes 2 bits (N), levels float32 (4)",
        biased=True,
        source='Sarfi et al., "SparseLoCo", 2025, arXiv:2508.15706',
        bound="|error| <= sqrt(N) * (sigma + 2**-23 * |mean| + 2**-149)",
    )

    def layout(self, shape: Shape) -> tuple[PartSpec, ...]:
        """Codes, then levels."""
        return (
            PartSpec("codes", torch.uint8, (math.prod(shape),), Symbols(2)),
            PartSpec("levels", torch.float32, (_BINS,), Floats()),
        )

    def compress(self, tensor: Tensor) -> Payload:
        """Sort the values into four bins, then take the bins' means."""
        value_N = check_input(tensor).flatten()
        found = binned(value_N, _BINS, _WINDOW, lambda place_n: (place_n + _BINS // 2).round_())
        mean_4 = (found.place_K * found.width).float()
        level_4 = (mean_4 + found.mean.float()).clamp_(-_LARGEST, _LARGEST)  # rounded apart, 3.4e38 would be Inf
        return Payload(tuple(tensor.shape), (found.code_N, level_4))

    def decompress(self, payload: Payload) -> Tensor:
        """levels[code]."""
        check_parts(self, payload, self.layout(payload.shape))
        code_N, level_4 = payload.parts
        require(torch.isfinite(level_4).all(), self, "every level must be finite")
        return level_4.index_select(0, code_N.int()).reshape(payload.shape)
