"""Quantisers that scale each block and give every value the nearest level of a table."""

import functools
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import torch
from torch import Tensor

from decentral.compressors.base import About, Payload, check_dtype, non_finite
from decentral.compressors.blocks import (
    UNUSED,
    Code,
    Tabled,
    largest_scale,
    quantise,
    scale_blocks,
    table,
    to_blocks,
)
from decentral.tensors.device import one_kernel

__all__ = ["E3M0", "FP8", "NF4", "Int4", "Int8", "Linear", "Sign"]

# Shape suffixes: N = values, B = blocks, L = values in a block, K = bins of a codebook.

# ---- evenly spaced codes of any width ----
#
# Shared by int8 and int4: one scale per block of values.
#
# scale = largest magnitude of the block / top, rounded up to 8 significant bits; code = round(value / scale), ties to
# even, plus top + 1. Code 0 is not used. The error is at most scale / 2 per value, where the largest magnitude is at
# least top * 2**-126; below that a scale is off by up to 2**-133. A block is a run of the flattened tensor; the last
# one may be short.


@dataclass(frozen=True, slots=True)
class Linear(Tabled):
    """Blockwise absmax with codes for ``-top`` to ``top``."""

    bits: ClassVar[int]
    block: int

    @property
    def top(self) -> int:
        """The largest whole number a code stands for."""
        return (1 << (self.bits - 1)) - 1

    @property
    def code(self) -> Code:
        """Whole numbers."""
        return _linear_code(self.bits, self.top)

    def compress_one(self, tensor: Tensor) -> Payload:
        """Round every value to the nearest of 2 * top + 1 levels of its block."""
        if tensor.device.type != "cpu":
            return Tabled.compress_one(self, tensor)  # not super(): slots=True makes another class of this one
        found = quantise(check_dtype(tensor).flatten(), self.block, self.top, largest_scale(self.top))
        if found is None:
            raise non_finite(tensor)
        code_N, scale_B = found
        return Payload(tuple(tensor.shape), (code_N, scale_B.to(self.scale_dtype)))

    def nearest_codes(self, value_N: Tensor) -> tuple[Tensor, Tensor]:
        """Do what `quantise` does in one pass, which finds NaN and Inf too, on any device."""
        return _nearest_linear(value_N, self.block, self.top)


@one_kernel
def _nearest_linear(value_N: Tensor, block: int, top: int) -> tuple[Tensor, Tensor]:
    size_BL, scale_B = scale_blocks(value_N, block, top)
    code_BL = size_BL.round().clamp(-top, top).add(top + 1).to(torch.uint8)
    return code_BL.flatten()[: value_N.numel()], scale_B


@functools.cache
def _linear_code(bits: int, top: int) -> Code:
    levels = table([UNUSED, *(float(whole) for whole in range(-top, top + 1))])
    return Code(bits, levels, top, "code 0 is not used")


# ---- int8: evenly spaced, 8 bits ----
#
# Parts: codes uint8 (N,), 1..255 for -127..127; scales float32 (B,). At most 8 + 32/block bits per value, entropy coded
# about 7.1 on Gaussian data in blocks of 4096. scale = largest magnitude of the block / 127. The error is at most scale
# / 2 per value (2**-134 more where scales are denormals).
#
# Source: Dettmers et al., "8-bit Optimizers via Block-wise Quantization", 2022, arXiv:2110.02861 (blockwise absmax);
# the linear code is the usual one of int8 all-reduces (INTELLECT-1, Jaghouar et al., 2024, arXiv:2412.01152).


@dataclass(frozen=True, slots=True)
class Int8(Linear):
    """Blockwise 8-bit absmax; ``block`` values share a scale."""

    name: ClassVar[str] = "int8"
    bits: ClassVar[int] = 8
    scale_dtype: ClassVar[torch.dtype] = torch.float32
    about: ClassVar[About] = About(
        layout="codes 8 bits (N), scales float32 (N/block)",
        biased=False,
        source='Dettmers et al., "8-bit Optimizers via Block-wise Quantization", 2022, arXiv:2110.02861',
        bound="|error| <= min(|value|, largest of the block / 252 + 2**-134) per value",
    )
    block: int = 4096


# ---- int4: evenly spaced, 4 bits ----
#
# Parts: codes uint8 below 16 (N,), 1..15 for -7..7; scales bfloat16 (B,). At most 4 + 16/block bits per value, entropy
# coded 3.3 on Gaussian data, at an error of 0.127 of the norm (block=64: 3.6 and 0.108; block=4096: 3.0 and 0.158).
# scale = largest magnitude of the block / 7. The error is at most scale / 2 per value (2**-134 more where scales are
# denormals), and at most the value itself.
#
# Source: the linear code of MuLoCo's compression study (Therien et al., "MuLoCo", 2025, arXiv:2505.23725), there per
# tensor or row and without a coder; blockwise absmax from Dettmers et al., 2022, arXiv:2110.02861.


@dataclass(frozen=True, slots=True)
class Int4(Linear):
    """Blockwise linear 4-bit absmax; ``block`` values share a scale."""

    name: ClassVar[str] = "int4"
    bits: ClassVar[int] = 4
    scale_dtype: ClassVar[torch.dtype] = torch.bfloat16
    about: ClassVar[About] = About(
        layout="codes 4 bits (N), scales bfloat16 (N/block)",
        biased=True,
        source='Therien et al., "MuLoCo", 2025, arXiv:2505.23725; Dettmers et al., 2022, arXiv:2110.02861',
        bound="|error| <= min(|value|, largest of the block / 13.8 + 2**-134) per value",
    )
    block: int = 256


# ---- fp8: 8-bit floats ----
#
# float8 e4m3 (the "fn" kind, without infinities), with one scale per block of values.
#
# Parts: codes uint8 (N,), the bits of the float: sign, 4 exponent bits with bias 7, 3 mantissa bits; scales bfloat16
# (B,). At most 8 + 16/block bits per value, entropy coded 6.5 on Gaussian data. scale = largest magnitude of the block
# / 448, rounded up to 8 significant bits; 448 is the largest e4m3. "Minus zero" (0x80) and NaN (0x7F, 0xFF) are not
# used. Rounding is to nearest, so a value is off by at most 1/16 of itself, or by scale / 1024 if that is more, which
# is the largest magnitude / 455000; a block below 448 * 2**-150 arrives as zeros. e4m3 and not e5m2, whose range
# nobody needs once there is a scale per block, and whose error is twice as large. On Gaussian data the error is 0.026
# of the norm, where int8 has 0.009 at 7.1 bits: fp8 is for blocks of very unequal values. Decoded by table, because
# devices without float8 have no conversion, and because it is the same bits everywhere.
#
# Source: Micikevicius et al., "FP8 Formats for Deep Learning", 2022, arXiv:2209.05433; the scale per block is ours.

_FP8_TOP = 448
_FP8_MINUS_ZERO = 0x80


def _fp8_level(code: int) -> float:
    """Return the float that these 8 bits are, by the standard's formula."""
    sign, exponent, mantissa = code >> 7, code >> 3 & 15, code & 7
    if code == _FP8_MINUS_ZERO or code & 0x7F == 0x7F:
        return UNUSED
    size = (8 + mantissa) * 2.0 ** (exponent - 10) if exponent else mantissa * 2.0**-9
    return -size if sign else size


_FP8_RULE = "codes 0x7F, 0x80 and 0xFF, NaN and minus zero, are not used"
_FP8_CODE = Code(8, table([_fp8_level(code) for code in range(256)]), _FP8_TOP, _FP8_RULE)


@dataclass(frozen=True, slots=True)
class FP8(Tabled):
    """Blockwise float8 e4m3; ``block`` values share a scale."""

    name: ClassVar[str] = "fp8"
    about: ClassVar[About] = About(
        layout="codes 8 bits (N), scales bfloat16 (N/block)",
        biased=False,
        source='Micikevicius et al., "FP8 Formats for Deep Learning", 2022, arXiv:2209.05433',
        bound="|error| <= max(|value| / 16, largest of the block / 455000 + 2**-141) per value",
    )
    code: ClassVar[Code] = _FP8_CODE
    block: int = 256

    def nearest_codes(self, value_N: Tensor) -> tuple[Tensor, Tensor]:
        """Return the nearest float8 of the block."""
        return _nearest_fp8(value_N, self.block)


@one_kernel
def _nearest_fp8(value_N: Tensor, block: int) -> tuple[Tensor, Tensor]:
    size_BL, scale_B = scale_blocks(value_N, block, _FP8_TOP)
    size_BL = size_BL.clamp(-_FP8_TOP, _FP8_TOP)  # beyond it the conversion gives NaN
    code_N = size_BL.to(torch.float8_e4m3fn).view(torch.uint8).flatten()[: value_N.numel()]
    return code_N.masked_fill(code_N == _FP8_MINUS_ZERO, 0), scale_B


# ---- e3m0: 4-bit powers of two ----
#
# A sign, 3 exponent bits, no mantissa, and one scale per block of values.
#
# Parts: codes uint8 below 16 (N,); scales bfloat16 (B,). At most 4 + 16/block bits per value. Code 0 is zero, code c
# in 1..7 is scale * 2**(c-7), bit 3 is the sign; "minus zero" (code 8) is not used. scale = largest magnitude of the
# block, rounded up to 8 significant bits. Rounding is to the nearest level (linearly: 0.75 * 2**e goes up), so a value
# is off by at most a third of itself, or by scale / 128 if that is more (where scales are denormals, 2**-140 more).
#
# Source: Douillard et al., "Streaming DiLoCo with overlapping communication", 2025, arXiv:2501.18512, which leaves
# scale, block and rounding open; those three are ours.

_E3M0_LEVELS = [0.0, *(2.0**-place for place in range(6, -1, -1))]
_E3M0_SIGNED = table([*_E3M0_LEVELS, UNUSED, *(-level for level in _E3M0_LEVELS[1:])])  # bit 3 is the sign
_E3M0_CODE = Code(4, _E3M0_SIGNED, 1, "code 8, minus zero, is not used")


@dataclass(frozen=True, slots=True)
class E3M0(Tabled):
    """Blockwise 4-bit powers of two; ``block`` values share a scale."""

    name: ClassVar[str] = "e3m0"
    about: ClassVar[About] = About(
        layout="codes 4 bits (N), scales bfloat16 (N/block)",
        biased=True,
        source='Douillard et al., "Streaming DiLoCo", 2025, arXiv:2501.18512',
        bound="|error| <= max(|value| / 3, largest of the block / 127 + 2**-140) per value",
    )
    code: ClassVar[Code] = _E3M0_CODE
    block: int = 256

    def nearest_codes(self, value_N: Tensor) -> tuple[Tensor, Tensor]:
        """Return the nearest of 15 levels of the block."""
        return _nearest_e3m0(value_N, self.block)


@one_kernel
def _nearest_e3m0(value_N: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Return codes of sizes in [0, 1]: float32's own exponent field does the logarithm."""
    value_BL, scale_B = scale_blocks(value_N, block)
    size_BL = value_BL.abs()
    exponent_BL = (size_BL * (4 / 3)).view(torch.int32) >> 23  # 127 for [0.75, 1.5), one less per halving
    code_BL = (exponent_BL - 120).clamp_(1, 7).to(torch.uint8)
    code_BL = code_BL | (value_BL < 0).to(torch.uint8) << 3
    code_BL = torch.where(size_BL >= 2.0**-7, code_BL, torch.zeros_like(code_BL))  # halfway between 0 and 2**-6
    return code_BL.flatten()[: value_N.numel()], scale_B


# ---- nf4: 4 bits for Gaussian values ----
#
# Levels that a Gaussian fills equally often, with one scale per block of values.
#
# Parts: codes uint8 below 16 (N,), rising with the level; code 7 is zero; scales bfloat16 (B,), the largest magnitude
# of the block, rounded up to 8 significant bits (by up to 1/128, below 2**-126 by up to 2**-133). At most 4 + 16/block
# bits per value; entropy coded 4.0 on Gaussian data, at an error of 0.092 of the norm. Equally full levels are the
# best use of 4 bits that are sent as they are; an entropy coder takes less for unequal ones, so here int4(block=16),
# 4.3 bits and 0.085, does as well. The levels are NF4's, rounded to 16 significant bits (off by 2**-17 at most) so
# that level * scale is exact. Rounding is to the nearest level: a value is off by at most 0.152 * scale, half the
# widest gap, and by at most itself. There is one positive level more than negative ones, so the tensor -x does not
# decode to minus what x decodes to.
#
# QLoRA quantises the scales once more ("double quantisation"); here they are sent as they are.
#
# Source: Dettmers et al., "QLoRA: Efficient Finetuning of Quantized LLMs", 2023, arXiv:2305.14314, appendix E.

_NF4_PUBLISHED = [
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
]
_NF4_LEVELS = [round(level * 2**16) / 2**16 for level in _NF4_PUBLISHED]
_NF4_HALFWAY = [(low + high) / 2 for low, high in pairwise(_NF4_LEVELS)]  # 17 bits: exact in float32
_NF4_CODE = Code(4, table(_NF4_LEVELS), 1, "codes must be below 16")


@dataclass(frozen=True, slots=True)
class NF4(Tabled):
    """Blockwise 4-bit NormalFloat; ``block`` values share a scale."""

    name: ClassVar[str] = "nf4"
    about: ClassVar[About] = About(
        layout="codes 4 bits (N), scales bfloat16 (N/block)",
        biased=True,
        source='Dettmers et al., "QLoRA", 2023, arXiv:2305.14314',
        bound="|error| <= min(|value|, 0.154 * largest of the block + 2**-135) per value",
    )
    code: ClassVar[Code] = _NF4_CODE
    block: int = 64

    def nearest_codes(self, value_N: Tensor) -> tuple[Tensor, Tensor]:
        """Return the nearest of 16 levels of the block."""
        return _nearest_nf4(value_N, self.block)


@one_kernel
def _nearest_nf4(value_N: Tensor, block: int) -> tuple[Tensor, Tensor]:
    size_BL, scale_B = scale_blocks(value_N, block)
    if torch.compiler.is_compiling():  # comparisons in registers; bucketize would be a kernel of its own
        code_BL = torch.zeros_like(size_BL, dtype=torch.uint8)
        for halfway in _NF4_HALFWAY:
            code_BL = code_BL + (size_BL > halfway)
    else:
        halfway_15 = torch.tensor(_NF4_HALFWAY, dtype=torch.float32, device=value_N.device)
        code_BL = torch.bucketize(size_BL, halfway_15, out_int32=True)
    return code_BL.flatten()[: value_N.numel()], scale_B


# ---- sign: 1 bit and a mean ----
#
# The bit is the value's sign; one magnitude per block of values is their mean.
#
# Parts: codes uint8 below 2 (N,), 1 for negative (-0.0 too, so that -x always decodes to minus what x does); scales
# bfloat16 (B,), the mean magnitude of the block, cut to 8 significant bits. 1 + 16/block bits per value: signs have no
# pattern, so entropy coding gains nothing. Of all magnitudes the mean loses least: |error|**2 = |x|**2 - (sum of
# |x|)**2 / block, which for Gaussian data is 0.363 |x|**2, an error of 0.603 of the norm. The cut costs up to 2**-14
# of what the mean saves, and a mean below 2**-133 is cut to zero. A zero decodes to +-scale unless its whole block is
# zero. Use error feedback: the largest values always arrive too small.
#
# Source: Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient Compression Schemes", 2019,
# arXiv:1901.09847 (one scale per tensor; a block is ours).

_SIGN_CODE = Code(1, table([1.0, -1.0]), 1, "codes must be below 2")
_SHORT_BITS = ~0xFFFF  # the bits that a bfloat16 keeps of a float32


@dataclass(frozen=True, slots=True)
class Sign(Tabled):
    """Scaled sign; ``block`` values share a magnitude."""

    name: ClassVar[str] = "sign"
    about: ClassVar[About] = About(
        layout="codes 1 bit (N), scales bfloat16 (N/block)",
        biased=True,
        source='Karimireddy et al., "Error Feedback Fixes SignSGD", 2019, arXiv:1901.09847',
        bound="|error|**2 <= |x|**2 - (1 - 2**-14) * sum(|x|)**2 / block + block * 2**-266, per block",
    )
    code: ClassVar[Code] = _SIGN_CODE
    block: int = 1024

    def nearest_codes(self, value_N: Tensor) -> tuple[Tensor, Tensor]:
        """Return signs, and mean magnitudes."""
        return _signs_and_means(value_N, self.block)


@one_kernel
def _signs_and_means(value_N: Tensor, block: int) -> tuple[Tensor, Tensor]:
    return torch.signbit(value_N).to(torch.uint8), _next_shorter(_means(value_N, block))


def _means(value_N: Tensor, block: int) -> Tensor:
    """Return the mean magnitude of each block, float32; what fills up the last one does not count."""
    size_BL = to_blocks(value_N.abs(), block)
    start_B = block * torch.arange(len(size_BL), device=value_N.device, dtype=torch.int64)
    sum_B = size_BL.sum(dim=1, dtype=torch.float64)  # float64: 4096 times 1e38 has to fit
    return (sum_B / (value_N.numel() - start_B).clamp(max=block)).float()


def _next_shorter(size_B: Tensor) -> Tensor:
    """Return the next smaller float32 of 8 significant bits: too small a scale loses as much as one as much too large,
    and never more than sending nothing.
    """
    return (size_B.view(torch.int32) & _SHORT_BITS).view(torch.float32)
