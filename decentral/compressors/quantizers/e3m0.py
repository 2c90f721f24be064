"""4-bit codes: a sign, 3 exponent bits, no mantissa, and one scale per block of values.

Parts: codes uint8 below 16 (N,); scales bfloat16 (B,). At most 4 + 16/block bits per value. Code 0 is zero, code c in
1..7 is scale * 2**(c-7), bit 3 is the sign; "minus zero" (code 8) is not used. scale = largest magnitude of the block,
rounded up to 8 significant bits. Rounding is to the nearest level (linearly: 0.75 * 2**e goes up), so a value is off
by at most a third of itself, or by scale / 128 if that is more (where scales are denormals, 2**-140 more).

Source: Douillard et al., "Streaming DiLoCo with overlapping communication", 2025, arXiv:2501.18512, which leaves
scale, block and rounding open; those three are ours.
"""
# Shape suffixes: N = values, B = blocks, L = values in a block.

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from decentral.compressors.base import About
from decentral.compressors.kernels import tables
from decentral.compressors.kernels.blocks import check_block, peaks, positive, short_scale, to_blocks
from decentral.tensors.device import one_kernel

__all__ = ["E3M0"]

_LEVELS = [0.0, *(2.0**-place for place in range(6, -1, -1))]
_SIGNED = tables.table([*_LEVELS, tables.UNUSED, *(-level for level in _LEVELS[1:])])  # bit 3 is the sign
_CODE = tables.Code(4, _SIGNED, 1, "code 8, minus zero, is not used")


@dataclass(frozen=True, slots=True)
class E3M0(tables.Tabled):
    """Blockwise 4-bit powers of two; ``block`` values share a scale."""

    name: ClassVar[str] = "e3m0"
    about: ClassVar[About] = About(
        layout="codes 4 bits (N), scales bfloat16 (N/block)",
        biased=True,
        source='Douillard et al., "Streaming DiLoCo", 2025, arXiv:2501.18512',
        bound="|error| <= max(|value| / 3, largest of the block / 127 + 2**-140) per value",
    )
    block: int = 256

    def __post_init__(self) -> None:
        check_block(self, self.block)

    @property
    def code(self) -> tables.Code:
        """Seven powers of two, their negatives, and zero."""
        return _CODE

    def quantised(self, value_N: Tensor) -> tuple[Tensor, Tensor]:
        """The nearest of 15 levels of the block."""
        return _nearest(value_N, self.block)


@one_kernel
def _nearest(value_N: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Codes of sizes in [0, 1]: float32's own exponent field does the logarithm."""
    scale_B = short_scale(peaks(value_N, block))
    value_BL = to_blocks(value_N, block)
    size_BL = value_BL.abs() / positive(scale_B)[:, None]
    exponent_BL = (size_BL * (4 / 3)).view(torch.int32) >> 23  # 127 for [0.75, 1.5), one less per halving
    code_BL = (exponent_BL - 120).clamp_(1, 7).to(torch.uint8)
    code_BL = code_BL | (value_BL < 0).to(torch.uint8) << 3
    code_BL = torch.where(size_BL >= 2.0**-7, code_BL, torch.zeros_like(code_BL))  # halfway between 0 and 2**-6
    return code_BL.flatten()[: value_N.numel()], scale_B
