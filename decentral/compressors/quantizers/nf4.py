"""4-bit codes for levels that a Gaussian fills equally often, with one scale per block of values.

Parts: codes uint8 below 16 (N,), rising with the level; code 7 is zero; scales bfloat16 (B,), the largest magnitude of
the block, rounded up to 8 significant bits (by up to 1/128, below 2**-126 by up to 2**-133). At most 4 + 16/block bits
per value; entropy coded 4.0 on Gaussian data, at an error of 0.092 of the norm. Equally full levels are the best use of
4 bits that are sent as they are; an entropy coder takes less for unequal ones, so here int4(block=16), 4.3 bits and
0.085, does as well. The levels are NF4's, rounded to 16 significant bits (off by 2**-17 at most) so that level * scale
is exact. Rounding is to the nearest level: a value is off by at most 0.152 * scale, half the widest gap, and by at most
itself. There is one positive level more than negative ones, so the tensor -x does not decode to minus what x decodes
to.

QLoRA quantises the scales once more ("double quantisation"); here they are sent as they are.

Source: Dettmers et al., "QLoRA: Efficient Finetuning of Quantized LLMs", 2023, arXiv:2305.14314, appendix E.
"""
# Shape suffixes: N = values, B = blocks, L = values in a block.

from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import torch
from torch import Tensor

from decentral.compressors.base import About
from decentral.compressors.kernels import tables
from decentral.compressors.kernels.blocks import check_block, peaks, positive, short_scale, to_blocks
from decentral.tensors.device import one_kernel

__all__ = ["NF4"]

_PUBLISHED = [
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
]
_LEVELS = [round(level * 2**16) / 2**16 for level in _PUBLISHED]
_HALFWAY = [(low + high) / 2 for low, high in pairwise(_LEVELS)]  # 17 bits: exact in float32
_CODE = tables.Code(4, tables.table(_LEVELS), 1, "codes must be below 16")


@dataclass(frozen=True, slots=True)
class NF4(tables.Tabled):
    """Blockwise 4-bit NormalFloat; ``block`` values share a scale."""

    name: ClassVar[str] = "nf4"
    about: ClassVar[About] = About(
        layout="codes 4 bits (N), scales bfloat16 (N/block)",
        biased=True,
        source='Dettmers et al., "QLoRA", 2023, arXiv:2305.14314',
        bound="|error| <= min(|value|, 0.154 * largest of the block + 2**-135) per value",
    )
    block: int = 64

    def __post_init__(self) -> None:
        check_block(self, self.block)

    @property
    def code(self) -> tables.Code:
        """16 levels."""
        return _CODE

    def quantised(self, value_N: Tensor) -> tuple[Tensor, Tensor]:
        """The nearest of 16 levels of the block."""
        return _nearest(value_N, self.block)


@one_kernel
def _nearest(value_N: Tensor, block: int) -> tuple[Tensor, Tensor]:
    scale_B = short_scale(peaks(value_N, block))
    size_BL = to_blocks(value_N, block) / positive(scale_B)[:, None]
    if torch.compiler.is_compiling():  # comparisons in registers; bucketize would be a kernel of its own
        code_BL = torch.zeros_like(size_BL, dtype=torch.uint8)
        for halfway in _HALFWAY:
            code_BL = code_BL + (size_BL > halfway)
    else:
        halfway_15 = torch.tensor(_HALFWAY, dtype=torch.float32, device=value_N.device)
        code_BL = torch.bucketize(size_BL, halfway_15, out_int32=True)
    return code_BL.flatten()[: value_N.numel()], scale_B
