"""Stochastic rounding to evenly spaced levels: what arrives is right on average.

Parts: codes uint8 (N,), 0 to 2 * levels for -levels..levels; scales bfloat16 (B,). At most b + 16/block bits per value
with b the bits of 2 * levels; entropy coded 3.3 on Gaussian data for 7 levels, at an error of 0.179 of the norm, and
7.5 for 127, at 0.0099. scale = largest magnitude of the block / levels, rounded up to 8 significant bits; |value| /
scale lies between two whole numbers and goes up with a probability of its distance from the lower one. So the mean is
the value itself, to 2**-24 of a scale, and E|error|**2 <= min(block / (4 levels**2), sqrt(block) / levels) *
(129/128)**2 * |block|**2. That is for blocks whose largest magnitude is from levels * 2**-126, below which scales are
denormals and off by up to 2**-133, to 3.37e38, above which values are cut to what a scale reaches. The paper divides by
the 2-norm; the largest magnitude is never above it and keeps the paper's bound, with fewer zeros. A bound above 1 (few
levels, long blocks) means that error feedback may blow the debt up: it wants a contraction.

The rounding is drawn from the tensor and ``seed`` (`chance`): repeatable, unbiased over tensors. `compress_with` takes
the numbers instead. Against rounding to nearest (int8, int4) the error's energy is twice as large on Gaussian data;
use it where many peers' errors average out and none keeps a debt.

The paper codes whole numbers by Elias' code; here they go through the coder of all codes (`decentral.coding`).

Source: Alistarh et al., "QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding", 2017,
arXiv:1610.02132.
"""
# Shape suffixes: N = values, B = blocks, L = values in a block.

import functools
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from decentral.compressors.base import About, Payload, Shape, check_input
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
from decentral.compressors.kernels.stochastic_rounding import Draws, check_seed, draws, uniform
from decentral.errors import ConfigError
from decentral.tensors.device import one_kernel

__all__ = ["QSGD"]


@dataclass(frozen=True, slots=True)
class QSGD(tables.Tabled):
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
    def code(self) -> tables.Code:
        """Whole numbers."""
        return _code(self.levels)

    def compress(self, tensor: Tensor) -> Payload:
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

        return self.filled(shape, value_N, slab)


@one_kernel
def _up_or_down(value_N: Tensor, drawn: Tensor, block: int, levels: int) -> tuple[Tensor, Tensor]:
    scale_B = short_scale(over(peaks(value_N, block), levels), largest_scale(levels))
    value_BL, uniform_BL = to_blocks(value_N, block), to_blocks(uniform(drawn, value_N), block)
    size_BL = (value_BL.abs() / positive(scale_B)[:, None]).clamp(max=levels)
    level_BL = size_BL.floor()
    level_BL = level_BL + (uniform_BL < size_BL - level_BL)
    code_BL = torch.where(value_BL < 0, levels - level_BL, levels + level_BL).to(torch.uint8)
    return code_BL.flatten()[: value_N.numel()], scale_B


@functools.cache
def _code(top: int) -> tables.Code:
    levels = tables.table([float(whole) for whole in range(-top, top + 1)])
    return tables.Code((2 * top).bit_length(), levels, top, f"codes must be at most {2 * top}")
