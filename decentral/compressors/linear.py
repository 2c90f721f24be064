"""What int8 and int4 share: evenly spaced codes, and one scale per block of values.

scale = largest magnitude of the block / top, rounded up to 8 significant bits; code = round(value / scale), ties to
even, plus top + 1. Code 0 is not used. The error is at most scale / 2 per value.
"""
# Shape suffixes: N = values, B = blocks, L = values in a block.

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from decentral.coding import Floats, Symbols
from decentral.compressors import fused, tables
from decentral.compressors.base import (
    PartSpec,
    Payload,
    Shape,
    check_dtype,
    check_input,
    check_parts,
    non_finite,
    require,
)
from decentral.compressors.blocks import check_block, largest_scale, num_blocks, positive, short_scale, to_blocks

__all__ = ["Linear"]


@dataclass(frozen=True, slots=True)
class Linear(tables.Tabled):
    """Blockwise absmax with codes for ``-top`` to ``top``."""

    bits: ClassVar[int]
    scale_dtype: ClassVar[torch.dtype]
    block: int

    def __post_init__(self) -> None:
        check_block(self, self.block)

    @property
    def top(self) -> int:
        """The largest whole number a code stands for."""
        return (1 << (self.bits - 1)) - 1

    def layout(self, shape: Shape) -> tuple[PartSpec, ...]:
        """Codes, then scales."""
        numel = math.prod(shape)
        return (
            PartSpec("codes", torch.uint8, (numel,), Symbols(self.bits)),
            PartSpec("scales", self.scale_dtype, (num_blocks(numel, self.block),), Floats()),
        )

    def compress(self, tensor: Tensor) -> Payload:
        """Round every value to the nearest of 2 * top + 1 levels of its block."""
        quantise = _fused if tensor.device.type == "cpu" else _quantised
        code_N, scale_B = quantise(tensor, self.block, self.top)
        return Payload(tuple(tensor.shape), (code_N, scale_B.to(self.scale_dtype)))

    def read(self, payload: Payload) -> tables.Coded:
        """Codes and scales, checked."""
        check_parts(self, payload, self.layout(payload.shape))
        code_N, scale_B = payload.parts
        fits = ((scale_B >= 0) & torch.isfinite(scale_B.float() * self.top)).all()
        require(fits, self, f"a scale is bad: want 0 <= {self.top} * scale < Inf")
        levels = tables.table([tables.UNUSED, *(float(whole) for whole in range(-self.top, self.top + 1))])
        return tables.Coded(levels, code_N, scale_B, self.block, "code 0 is not used")


def _fused(tensor: Tensor, block: int, top: int) -> tuple[Tensor, Tensor]:
    """What `_quantised` does, in one pass, which finds NaN and Inf too."""
    found = fused.quantise(check_dtype(tensor).flatten(), block, top, largest_scale(top))
    if found is None:
        raise non_finite(tensor)
    return found


def _quantised(tensor: Tensor, block: int, top: int) -> tuple[Tensor, Tensor]:
    """Codes and scales on any device."""
    value_BL = to_blocks(check_input(tensor).flatten(), block)
    scale_B = short_scale(value_BL.abs().amax(dim=1) / top, largest_scale(top))
    code_BL = (value_BL / positive(scale_B)[:, None]).round_().clamp_(-top, top).add_(top + 1).to(torch.uint8)
    return code_BL.flatten()[: tensor.numel()], scale_B
