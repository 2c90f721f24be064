"""Quantisers that round by chance and are right in the mean.

The rounding is drawn from the tensor and ``seed`` (`draws`): repeatable, unbiased over tensors. ``compress_with`` takes
the numbers instead.
"""

import functools
import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from decentral.coding import Symbols
from decentral.compressors.base import (
    About,
    Method,
    PartSpec,
    Payload,
    Shape,
    check_dtype,
    check_input,
    check_parts,
    non_finite,
    require,
)
from decentral.compressors.blocks import (
    Code,
    Tabled,
    check_block,
    scale_blocks,
    table,
    to_blocks,
)
from decentral.compressors.random import Draws, check_seed, draws, uniform
from decentral.errors import ConfigError
from decentral.tensors.device import in_slabs, one_kernel

__all__ = ["QSGD", "Natural"]

# Shape suffixes: N = values, B = blocks, L = values in a block.

# ---- natural: powers of two ----
#
# No value's error depends on its neighbours.
#
# Parts: codes uint8 (N,); base uint8 (1,), the exponent of code 1 plus 149. Code 0 is zero, code c in 1..127 is 2**(c -
# 1 + base - 149), 128 + c is its negative, 128 is not used. At most 8 bits per value; entropy coded 3.6 on Gaussian
# data, at an error of 0.285 of the norm. A value between 2**e and 2**(e + 1) goes up with a probability of (|value| -
# 2**e) / 2**e: the mean is the value itself, and E|error|**2 <= |x|**2 / 8; each value is off by at most itself. The
# base is chosen for the largest value, 126 powers of two below it; what is smaller still becomes the lowest power or
# zero, unbiased too, though that power may be more than the value. Above 2**127, where the next power is not a float32,
# values go down: biased, and off by up to half.
#
# The paper sends sign and exponent of a float32, 9 bits; a base per tensor makes it 8, and one stream to code. Decoded
# from a table made of bits: no power is computed.
#
# Source: Horvath et al., "Natural Compression for Distributed Deep Learning", 2019, arXiv:1905.10988.

_LOWEST, _HIGHEST = -149, 127  # exponents of float32, denormals included
_LEVELS = 127
_MINUS = 128  # the sign bit; alone it would be a second spelling of zero
_LARGEST_BASE = _HIGHEST - (_LEVELS - 1) - _LOWEST


@dataclass(frozen=True, slots=True)
class Natural(Method):
    """Unbiased powers of two."""

    name: ClassVar[str] = "natural"
    about: ClassVar[About] = About(
        layout="codes 8 bits (N), one exponent",
        biased=False,
        source='Horvath et al., "Natural Compression", 2019, arXiv:1905.10988',
        bound=(
            "unbiased, E|error|**2 <= |x|**2 / 8 while no value is above 2**127; "
            "|error| <= max(|value|, largest * 2**-125) per value"
        ),
    )
    seed: int = 0

    def __post_init__(self) -> None:
        check_seed(self, self.seed)

    def layout(self, shape: Shape) -> tuple[PartSpec, ...]:
        """Return codes, then the exponent of code 1."""
        return (
            PartSpec("codes", torch.uint8, (math.prod(shape),), Symbols(8)),
            PartSpec("base", torch.uint8, (1,), Symbols(8)),
        )

    def compress_one(self, tensor: Tensor) -> Payload:
        """Round every value up or down, as the tensor's own hash decides."""
        value_N, base = _values_and_base(tensor)
        return _payload(tuple(tensor.shape), value_N, base, draws(value_N, self.seed))

    def compress_with(self, tensor: Tensor, uniform_N: Tensor) -> Payload:
        """Round every magnitude up if its number in [0, 1) is below the distance from the lower power, else down."""
        return _payload(tuple(tensor.shape), *_values_and_base(tensor), lambda start, stop: uniform_N[start:stop])

    def decompress_one(self, payload: Payload) -> Tensor:
        """Return +-2**exponent."""
        check_parts(self, payload, self.layout(payload.shape))
        code_N, base = payload.parts
        require((base <= _LARGEST_BASE).all(), self, f"the base must be at most {_LARGEST_BASE}")
        require((code_N != _MINUS).all(), self, "code 128, minus zero, is not used")
        return _powers(base).index_select(0, code_N.int()).reshape(payload.shape)


def _payload(shape: Shape, value_N: Tensor, base: Tensor, drawn: Draws) -> Payload:
    inverse = ((1023 - base) << 52).view(torch.float64)  # of the power of two of code 1, so that products are exact
    code_N = in_slabs(
        value_N, torch.uint8, lambda start, stop: _natural_codes(value_N[start:stop], inverse, drawn(start, stop))
    )
    return Payload(shape, (code_N, (base - _LOWEST).to(torch.uint8).reshape(1)))


@one_kernel
def _natural_codes(value_N: Tensor, inverse: Tensor, drawn: Tensor) -> Tensor:
    level_N, rest_N = _split(value_N.abs().double() * inverse)  # float64 has no denormals here: exponents are their own
    code_N = (level_N + (uniform(drawn, value_N) < rest_N)).clamp(max=_LEVELS)
    return torch.where((value_N < 0) & (code_N > 0), code_N + _MINUS, code_N).to(torch.uint8)


def _values_and_base(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Return the values, and the exponent that codes count from. NonFiniteError when one is NaN or Inf."""
    value_N = check_dtype(tensor).flatten()
    low, high = torch.aminmax(value_N) if value_N.numel() else (value_N.new_zeros(()), value_N.new_zeros(()))
    largest = torch.maximum(-low, high)
    if not torch.isfinite(largest):
        raise non_finite(tensor)
    return value_N, _base(largest.double())


def _base(largest: Tensor) -> Tensor:
    """Return int64 (): the lowest exponent, such that the largest magnitude can go up to a power of two."""
    exponent = torch.frexp(largest).exponent.long()  # largest < 2**exponent, or both are 0
    exponent = torch.where(largest > 0, exponent, torch.full_like(exponent, _LOWEST))
    return (exponent - (_LEVELS - 1)).clamp(_LOWEST, _LARGEST_BASE + _LOWEST)


def _split(ratio_N: Tensor) -> tuple[Tensor, Tensor]:
    """Return, for sizes over the lowest power of two, the code of the power below each (0: there is none), and the way
    to the next one in [0, 1).
    """
    bits_N = ratio_N.view(torch.int64)
    mantissa_N = (bits_N & (1 << 52) - 1 | 1023 << 52).view(torch.float64)  # in [1, 2)
    below_N = ratio_N < 1
    level_N = torch.where(below_N, 0, (bits_N >> 52) - 1022)
    return level_N, torch.where(below_N, ratio_N, mantissa_N - 1)


def _powers(base: Tensor) -> Tensor:
    """Return float32 (256,): the value of every code for a base as it is sent, made from the bits of a float32."""
    exponent_127 = torch.arange(_LEVELS, device=base.device, dtype=torch.int64) + base.long() + _LOWEST
    normal_127 = (exponent_127 + 127) << 23
    denormal_127 = torch.ones_like(exponent_127) << (exponent_127 - _LOWEST).clamp(0, 22)
    bits_127 = torch.where(exponent_127 >= -126, normal_127, denormal_127).int()
    size_128 = torch.cat([bits_127.new_zeros(1), bits_127]).view(torch.float32)
    return torch.cat([size_128, -size_128])


# ---- qsgd: evenly spaced levels ----
#
# Parts: codes uint8 (N,), 0 to 2 * levels for -levels..levels; scales bfloat16 (B,). At most b + 16/block bits per
# value with b the bits of 2 * levels; entropy coded 3.3 on Gaussian data for 7 levels, at an error of 0.179 of the
# norm, and 7.5 for 127, at 0.0099. scale = largest magnitude of the block / levels, rounded up to 8 significant bits;
# |value| / scale lies between two whole numbers and goes up with a probability of its distance from the lower one. So
# the mean is the value itself, to 2**-24 of a scale, and E|error|**2 <= min(block / (4 levels**2), sqrt(block) /
# levels) * (129/128)**2 * |block|**2. That is for blocks whose largest magnitude is from levels * 2**-126, below which
# scales are denormals and off by up to 2**-133, to 3.37e38, above which values are cut to what a scale reaches. The
# paper divides by the 2-norm; the largest magnitude is never above it and keeps the paper's bound, with fewer zeros. A
# bound above 1 (few levels, long blocks) means that error feedback may blow the debt up: it wants a contraction.
#
# Against rounding to nearest (int8, int4) the error's energy is twice as large on Gaussian data; use it where many
# peers' errors average out and none keeps a debt.
#
# The paper codes whole numbers by Elias' code; here they go through the coder of all codes (`decentral.coding`).
#
# Source: Alistarh et al., "QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding", 2017,
# arXiv:1610.02132.


@dataclass(frozen=True, slots=True)
class QSGD(Tabled):
    """Blockwise stochastic rounding to ``levels`` levels and their negatives; ``block`` values share a scale."""

    name: ClassVar[str] = "qsgd"
    about: ClassVar[About] = About(
        layout="codes (N), 4 bits for 7 levels; scales bfloat16 (N/block)",
        biased=False,
        source='Alistarh et al., "QSGD", 2017, arXiv:1610.02132',
        bound=(
            "unbiased, E|error|**2 <= 1.02 * min(block / (4 levels**2), sqrt(block) / levels) * |x|**2 per block whose "
            "largest lies in [levels * 2**-126, 3.37e38]; |error| <= 1.01 * largest / levels + 2**-133 per value"
        ),
    )
    levels: int = 7
    block: int = 256
    seed: int = 0

    def __post_init__(self) -> None:
        check_block(self, self.block)
        check_seed(self, self.seed)
        if not 1 <= self.levels <= 127:
            raise ConfigError(f"{self}: a code has at most 8 bits, so levels must be 1 to 127; 7 and 127 are usual")

    @property
    def code(self) -> Code:
        """Whole numbers."""
        return _qsgd_code(self.levels)

    def compress_one(self, tensor: Tensor) -> Payload:
        """Round every value up or down, as the tensor's own hash decides."""
        value_N = check_input(tensor).flatten()
        return self._drawn(tuple(tensor.shape), value_N, draws(value_N, self.seed))

    def compress_with(self, tensor: Tensor, uniform_N: Tensor) -> Payload:
        """Round every value up if its number in [0, 1) is below the distance from the lower level, else down."""
        value_N = check_input(tensor).flatten()
        return self._drawn(tuple(tensor.shape), value_N, lambda start, stop: uniform_N[start:stop])

    def _drawn(self, shape: Shape, value_N: Tensor, drawn: Draws) -> Payload:
        def slab(start: int, stop: int) -> tuple[Tensor, Tensor]:
            return _up_or_down(value_N[start:stop], drawn(start, stop), self.block, self.levels)

        return self.fill_payload(shape, value_N, slab)


@one_kernel
def _up_or_down(value_N: Tensor, drawn: Tensor, block: int, levels: int) -> tuple[Tensor, Tensor]:
    value_BL, scale_B = scale_blocks(value_N, block, levels)
    uniform_BL = to_blocks(uniform(drawn, value_N), block)
    size_BL = value_BL.abs().clamp(max=levels)
    level_BL = size_BL.floor()
    level_BL = level_BL + (uniform_BL < size_BL - level_BL)
    code_BL = torch.where(value_BL < 0, levels - level_BL, levels + level_BL).to(torch.uint8)
    return code_BL.flatten()[: value_N.numel()], scale_B


@functools.cache
def _qsgd_code(top: int) -> Code:
    levels = table([float(whole) for whole in range(-top, top + 1)])
    return Code((2 * top).bit_length(), levels, top, f"codes must be at most {2 * top}")
