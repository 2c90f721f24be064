"""Runs of consecutive values that share one scale, and scales short enough to multiply exactly.

A scale has 8 significant bits (it fits bfloat16), so ``code * scale`` with an 8-bit code is exact in float32:
every device decodes the same bits, fused multiply-add or not, and ``tensor - decoded`` loses nothing to rounding.
Rounding the scale up costs less than 1/128 of its size; below 2**-126, where float32 has denormals, 2**-133, so that
there the values of a block may be lost whole.
"""

import math

import torch
from torch import Tensor

from decentral.errors import ConfigError

__all__ = [
    "LARGEST_SCALE",
    "check_block",
    "largest_scale",
    "num_blocks",
    "over",
    "peaks",
    "positive",
    "short_scale",
    "spread",
    "to_blocks",
]

LARGEST_SCALE = torch.finfo(torch.bfloat16).max  # 3.39e38; float32 ends at 3.40e38
_LARGEST_BLOCK = 65536  # a short tensor is filled up to a whole block, so a block must not be huge
_LONG_BITS = 0xFFFF  # the mantissa bits float32 has and bfloat16 has not


def check_block(method: object, block: int) -> None:
    """ConfigError unless a block has a sensible size."""
    if not 1 <= block <= _LARGEST_BLOCK:
        raise ConfigError(f"{method}: a block has 1 to {_LARGEST_BLOCK} values; 256 and 4096 are usual")


def num_blocks(numel: int, block: int) -> int:
    """Blocks that cover ``numel`` values, the last one possibly short."""
    return -(-numel // block)


def to_blocks(flat_N: Tensor, block: int) -> Tensor:
    """The values as rows (num_blocks, block), the last row filled up with zeros."""
    missing = -flat_N.numel() % block
    if missing:
        flat_N = torch.nn.functional.pad(flat_N, (0, missing))
    return flat_N.reshape(-1, block)


def peaks(flat_N: Tensor, block: int) -> Tensor:
    """The largest magnitude of every block, float32 (num_blocks,)."""
    return to_blocks(flat_N, block).abs().amax(dim=1)


def spread(scale_B: Tensor, flat_N: Tensor, block: int) -> Tensor:
    """``flat_N`` with each block multiplied by its float32 scale."""
    return (to_blocks(flat_N, block) * scale_B[:, None]).flatten()[: flat_N.numel()]


def over(size_B: Tensor, top: float) -> Tensor:
    """The true quotient on every device, by way of float64: by a number, CUDA divides as it multiplies by its
    reciprocal, and kernels divide to the last bit but one. A size that is a short scale times ``top`` must not be
    rounded up to the next scale. No quotient by a short number lies so near to halfway that float64 misses it.
    """
    return (size_B.double() / top).float()


def short_scale(size_B: Tensor, largest: float = LARGEST_SCALE) -> Tensor:
    """Sizes >= 0 rounded up to 8 significant bits (denormals: multiples of 2**-133), float32, at most ``largest``."""
    bits_B = (size_B.view(torch.int32) + _LONG_BITS) & ~_LONG_BITS
    return bits_B.view(torch.float32).clamp(max=largest)


def largest_scale(top: float) -> float:
    """The largest scale of 8 significant bits for which ``top * scale`` is finite."""
    mantissa, exponent = math.frexp(torch.finfo(torch.float32).max / top)
    return math.ldexp(math.floor(mantissa * 256) / 256, exponent)


def positive(scale_B: Tensor) -> Tensor:
    """Scales to divide by: 1 for a block of zeros."""
    return torch.where(scale_B > 0, scale_B, torch.ones_like(scale_B))
