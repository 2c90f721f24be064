"""A code means a level: a table of 256, times the scale of the block. NaN is the level of a code that is not used.

Levels have at most 16 significant bits and scales 8, so that the product is exact on every device.
"""
# Shape suffixes: N = values, B = blocks.

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from decentral.compressors import fused
from decentral.compressors.base import require
from decentral.compressors.blocks import spread

__all__ = ["UNUSED", "decode", "table"]

UNUSED = math.nan


def table(levels: Sequence[float]) -> tuple[float, ...]:
    """The levels of codes 0, 1, ..., filled up to 256 with unused codes."""
    return (*levels, *[UNUSED] * (256 - len(levels)))


def decode(method: object, levels: tuple[float, ...], code_N: Tensor, scale_B: Tensor, block: int, rule: str) -> Tensor:
    """level * scale, flat float32; PayloadError naming ``rule`` when a code is not used. ``levels`` is a `table`."""
    level_256 = torch.tensor(levels, dtype=torch.float32, device=code_N.device)
    if _on_processor(code_N):
        value_N, used = fused.look_up(code_N, level_256, scale_B.float(), block)
        require(torch.tensor(used), method, rule)
        return value_N
    level_N = level_256.index_select(0, code_N.int())
    require(~level_N.isnan().any(), method, rule)
    return spread(scale_B.float(), level_N, block)


def _on_processor(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"
