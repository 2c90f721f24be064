"""A codebook of the tensor's own, 8 bits: 256 bins over six sigmas, each decoded to the mean of its members.

Parts: codes uint8 (N,), rising with the value; codebook float32 (K,), 0 for a bin without members. K = 256 from 8192
values on; below, the power of two that costs at most one bit per value (K <= N / 32), yet at least 16. So a bias of
768 pays 64 bytes and not 1 KiB, and has 16 bins in place of 256: wider ones, as the bounds say. At most log2 K + 32
K / N bits per value; entropy coded 7.5 on Gaussian data, at an error of 0.016 of the norm. Bin b holds mean + sigma
* 6 / K * [b - K/2, b - K/2 + 1): the bins lie evenly on both sides of the mean, and what is more than three sigmas
away goes to the end bins. Between these a value is off by less than a bin, 6 sigma / K; in an end bin by as much as
outliers differ. What is lost is at most the variance: |error|**2 <= N sigma**2. Means are rounded once, so that a
level lies between its members, and both hold for neighbouring floats.

INTELLECT-1's paper centres by the mean and speaks of six sigmas on both sides; its code has three, as here, and does
not centre, so all values of a tensor whose mean is ten sigmas fall into the last bin, and it rounds, which puts the
first bin half a bin further out than the last. Its ring quantises anew at every hop; here a contribution is
quantised once, and in a reduce its result once.

Source: Jaghouar et al., "INTELLECT-1 Technical Report", 2024, arXiv:2412.01152; bin means as in hivemind's
Uniform8BitQuantization.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from decentral.coding import Floats, Symbols
from decentral.compressors.base import About, Method, PartSpec, Payload, Shape, check_input, check_parts, require
from decentral.compressors.blocks import put_in_bins

__all__ = ["Codebook8"]

_FEWEST_BITS, _MOST_BITS = 4, 8
_VALUES_PER_BIN = 32  # a bin's mean has 32 bits: at most one bit per value
_WINDOW = 6.0  # sigmas


@dataclass(frozen=True, slots=True)
class Codebook8(Method):
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
        found = put_in_bins(value_N, bins, _WINDOW, lambda place_n: place_n.floor().add_(bins // 2))
        level_K = (found.mean + found.place_K * found.width).where(found.count_K > 0, 0.0)
        return Payload(tuple(tensor.shape), (found.code_N, level_K.float()))

    def decompress_one(self, payload: Payload) -> Tensor:
        """Return codebook[code]."""
        check_parts(self, payload, self.layout(payload.shape))
        code_N, level_K = payload.parts
        require(torch.isfinite(level_K).all(), self, "every level must be finite")
        return level_K.index_select(0, code_N.int()).reshape(payload.shape)


def _codebook_bits(numel: int) -> int:
    """Return the bits of a code of a tensor of so many values."""
    return min(_MOST_BITS, max(_FEWEST_BITS, (numel // _VALUES_PER_BIN).bit_length() - 1))
