"""Stochastic rounding to evenly spaced levels: what arrives is right on average.

Parts: codes uint8 (N,), 0 to 2 * levels for -levels..levels; scales bfloat16 (B,). At most b + 16/block bits per value
with b the bits of 2 * levels; entropy coded 3.3 on Gaussian data for 7 levels, at an error of 0.179 of the norm, and
7.5 for 127, at 0.0099. scale = largest magnitude of the block / levels, rounded up to 8 significant bits; |value| /
scale lies between two whole numbers and goes up with a probability of its distance from the lower one. So the mean is
the value itself, to 2**-24 of a scale, and E|error|**2 <= min(block / (4 levels**2), sqrt(block) / levels) *
(129/128)**2 * |block|**2. The paper divides by the 2-norm; the largest magnitude is never above it and keeps the
paper's bound, with fewer zeros. A bound above 1 (few levels, long blocks) means that error feedback may blow the debt
up: it wants a contraction.

The rounding is drawn from the tensor and ``seed`` (`chance`): repeatable, unbiased over tensors. `compress_with` takes
the numbers instead. Against rounding to nearest (int8, int4) the error's energy is twice as large on Gaussian data;
use it where many peers' errors average out and none keeps a debt.

Source: Alistarh et al., "QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding", 2017,
arXiv:1610.02132.
"""
# Shape suffixes: N = values, B = blocks, L = values in a block.

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from decentral.coding import Floats, Symbols
from decentral.compressors import tables
from decentral.compressors.base import About, PartSpec, Payload, Shape, check_input, check_parts, require
from decentral.compressors.blocks import check_block, largest_scale, num_blocks, positive, short_scale, to_blocks
from decentral.compressors.chance import check_seed, uniform
from decentral.errors import ConfigError

__all__ = ["QSGD"]


@dataclass(frozen=True, slots=True)
class QSGD(tables.Tabled):
    """Blockwise stochastic rounding to ``levels`` levels and their negatives; ``block`` values share a scale."""

    name: ClassVar[str] = "qsgd"
    about: ClassVar[About] = About(
        layout="codes (N), 4 bits for 7 levels; scales bfloat16 (N/block)",
        biased=False,
        source='Alistarh et al., "QSGD", 2017, arXiv:1610.02132',
        bound="unbiased; E|error|**2 <= 1.02 * min(block / (4 levels**2), sqrt(block) / levels) * |x|**2, per block",
    )
    levels: int = 7
    block: int = 256
    seed: int = 0

    def __post_init__(self) -> None:
        check_block(self, self.block)
        check_seed(self, self.seed)
        if not 1 <= self.levels <= 127:
            raise ConfigError(f"{self}: a code has at most 8 bits, so levels must be 1 to 127; 7 and 127 are usual")

    def layout(self, shape: Shape) -> tuple[PartSpec, ...]:
        """Codes, then scales."""
        numel = math.prod(shape)
        return (
            PartSpec("codes", torch.uint8, (numel,), Symbols((2 * self.levels).bit_length())),
            PartSpec("scales", torch.bfloat16, (num_blocks(numel, self.block),), Floats()),
        )

    def compress(self, tensor: Tensor) -> Payload:
        """Round every value up or down, as the tensor's own hash decides."""
        return self.compress_with(tensor, uniform(check_input(tensor).flatten(), self.seed))

    def compress_with(self, tensor: Tensor, uniform_N: Tensor) -> Payload:
        """Round every value up if its number in [0, 1) is below the distance from the lower level, else down."""
        value_BL = to_blocks(check_input(tensor).flatten(), self.block)
        scale_B = short_scale(value_BL.abs().amax(dim=1) / self.levels, largest_scale(self.levels))
        size_N = (value_BL.abs() / positive(scale_B)[:, None]).flatten()[: tensor.numel()].clamp_(max=self.levels)
        level_N = size_N.floor()
        level_N += uniform_N < size_N - level_N
        code_N = level_N.copysign_(tensor.detach().flatten()).add_(self.levels).to(torch.uint8)
        return Payload(tuple(tensor.shape), (code_N, scale_B.to(torch.bfloat16)))

    def read(self, payload: Payload) -> tables.Coded:
        """Codes and scales, checked."""
        check_parts(self, payload, self.layout(payload.shape))
        code_N, scale_B = payload.parts
        fits = ((scale_B >= 0) & torch.isfinite(scale_B.float() * self.levels)).all()
        require(fits, self, f"a scale is bad: want 0 <= {self.levels} * scale < Inf")
        levels = tables.table([float(whole) for whole in range(-self.levels, self.levels + 1)])
        rule = f"codes must be at most {2 * self.levels}"
        return tables.Coded(levels, code_N, scale_B, self.block, rule)
