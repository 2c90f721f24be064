"""What int8 and int4 share: evenly spaced codes, and one scale per block of values.

scale = largest magnitude of the block / top, rounded up to 8 significant bits; code = round(value / scale), ties to
even, plus top + 1. Code 0 is not used. The error is at most scale / 2 per value, where the largest magnitude is at
least top * 2**-126; below that a scale is off by up to 2**-133.
"""
# Shape suffixes: N = values, B = blocks, L = values in a block.

import functools
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from decentral.compressors.base import Payload, check_dtype, non_finite
from decentral.compressors.kernels import fused, tables
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

__all__ = ["Linear"]


@dataclass(frozen=True, slots=True)
class Linear(tables.Tabled):
    """Blockwise absmax with codes for ``-top`` to ``top``."""

    bits: ClassVar[int]
    block: int

    def __post_init__(self) -> None:
        check_block(self, self.block)

    @property
    def top(self) -> int:
        """The largest whole number a code stands for."""
        return (1 << (self.bits - 1)) - 1

    @property
    def code(self) -> tables.Code:
        """Whole numbers."""
        return _code(self.bits, self.top)

    def compress(self, tensor: Tensor) -> Payload:
        """Every value to the nearest of 2 * top + 1 levels of its block."""
        if tensor.device.type != "cpu":
            return tables.Tabled.compress(self, tensor)  # not super(): slots=True makes another class of this one
        found = fused.quantise(check_dtype(tensor).flatten(), self.block, self.top, largest_scale(self.top))
        if found is None:
            raise non_finite(tensor)
        code_N, scale_B = found
        return Payload(tuple(tensor.shape), (code_N, scale_B.to(self.scale_dtype)))

    def quantised(self, value_N: Tensor) -> tuple[Tensor, Tensor]:
        """What `fused.quantise` does in one pass, which finds NaN and Inf too, on any device."""
        return _nearest(value_N, self.block, self.top)


@one_kernel
def _nearest(value_N: Tensor, block: int, top: int) -> tuple[Tensor, Tensor]:
    scale_B = short_scale(over(peaks(value_N, block), top), largest_scale(top))
    size_BL = to_blocks(value_N, block) / positive(scale_B)[:, None]
    code_BL = size_BL.round().clamp(-top, top).add(top + 1).to(torch.uint8)
    return code_BL.flatten()[: value_N.numel()], scale_B


@functools.cache
def _code(bits: int, top: int) -> tables.Code:
    levels = tables.table([tables.UNUSED, *(float(whole) for whole in range(-top, top + 1))])
    return tables.Code(bits, levels, top, "code 0 is not used")
