"""8-bit floats, float8 e4m3 (the "fn" kind, without infinities), with one scale per block of values.

Parts: codes uint8 (N,), the bits of the float: sign, 4 exponent bits with bias 7, 3 mantissa bits; scales bfloat16
(B,). At most 8 + 16/block bits per value, entropy coded 6.5 on Gaussian data. scale = largest magnitude of the block /
448, rounded up to 8 significant bits; 448 is the largest e4m3. "Minus zero" (0x80) and NaN (0x7F, 0xFF) are not used.
Rounding is to nearest, so a value is off by at most 1/16 of itself, or by scale / 1024 if that is more, which is the
largest magnitude / 455000; a block below 448 * 2**-150 arrives as zeros. e4m3 and not e5m2, whose range nobody needs
once there is a scale per block, and whose error is twice as large. On Gaussian data the error is 0.026 of the norm,
where int8 has 0.009 at 7.1 bits: fp8 is for blocks of very unequal values. Decoded by table, because devices without
float8 have no conversion, and because it is the same bits everywhere.

Source: Micikevicius et al., "FP8 Formats for Deep Learning", 2022, arXiv:2209.05433; the scale per block is ours.
"""
# Shape suffixes: N = values, B = blocks, L = values in a block.

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from decentral.compressors.base import About
from decentral.compressors.kernels import tables
from decentral.compressors.kernels.blocks import (
    check_block,
    largest_scale,
    over,
    peaks,
    positive,
    short_scale,
    to_blocks,
)
from decentral.tensors.device import one_kernel

__all__ = ["FP8"]

_TOP = 448
_MINUS_ZERO = 0x80


def _level(code: int) -> float:
    """The float that these 8 bits are, by the standard's formula."""
    sign, exponent, mantissa = code >> 7, code >> 3 & 15, code & 7
    if code == _MINUS_ZERO or code & 0x7F == 0x7F:
        return tables.UNUSED
    size = (8 + mantissa) * 2.0 ** (exponent - 10) if exponent else mantissa * 2.0**-9
    return -size if sign else size


_RULE = "codes 0x7F, 0x80 and 0xFF, NaN and minus zero, are not used"
_CODE = tables.Code(8, tables.table([_level(code) for code in range(256)]), _TOP, _RULE)


@dataclass(frozen=True, slots=True)
class FP8(tables.Tabled):
    """Blockwise float8 e4m3; ``block`` values share a scale."""

    name: ClassVar[str] = "fp8"
    about: ClassVar[About] = About(
        layout="codes 8 bits (N), scales bfloat16 (N/block)",
        biased=False,
        source='Micikevicius et al., "FP8 Formats for Deep Learning", 2022, arXiv:2209.05433',
        bound="|error| <= max(|value| / 16, largest of the block / 455000 + 2**-141) per value",
    )
    block: int = 256

    def __post_init__(self) -> None:
        check_block(self, self.block)

    @property
    def code(self) -> tables.Code:
        """Every float8 but NaN and minus zero."""
        return _CODE

    def quantised(self, value_N: Tensor) -> tuple[Tensor, Tensor]:
        """The nearest float8 of the block."""
        return _nearest(value_N, self.block)


@one_kernel
def _nearest(value_N: Tensor, block: int) -> tuple[Tensor, Tensor]:
    scale_B = short_scale(over(peaks(value_N, block), _TOP), largest_scale(_TOP))
    scaled_BL = to_blocks(value_N, block) / positive(scale_B)[:, None]
    scaled_BL = scaled_BL.clamp(-_TOP, _TOP)  # beyond it the conversion gives NaN
    code_N = scaled_BL.to(torch.float8_e4m3fn).view(torch.uint8).flatten()[: value_N.numel()]
    return code_N.masked_fill(code_N == _MINUS_ZERO, 0), scale_B
