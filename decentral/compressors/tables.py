"""A code means a level: a table of 256, times the scale of the block. NaN is the level of a code that is not used.

Levels have at most 16 significant bits and scales 8, so that the product is exact on every device.
"""
# Shape suffixes: N = values, B = blocks.

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from decentral.compressors import fused
from decentral.compressors.base import Method, Payload, require
from decentral.compressors.blocks import spread

__all__ = ["UNUSED", "Coded", "Tabled", "table"]

UNUSED = math.nan


@dataclass(frozen=True, slots=True)
class Coded:
    """Checked parts, and what their codes mean."""

    levels: tuple[float, ...]  # a `table`
    code_N: Tensor
    scale_B: Tensor
    block: int
    rule: str  # what codes must be, for the error


class Tabled(Method):
    """A method whose values are level * scale."""

    __slots__ = ()

    def read(self, payload: Payload) -> Coded:
        """The codes, once parts and scales are checked. PayloadError."""
        raise NotImplementedError

    def decompress(self, payload: Payload) -> Tensor:
        """level * scale; PayloadError when a code is not used."""
        coded = self.read(payload)
        level_256 = self._levels_of(coded)
        if _on_processor(coded.code_N):
            return fused.look_up(coded.code_N, level_256, coded.scale_B.float(), coded.block).reshape(payload.shape)
        level_N = level_256.index_select(0, coded.code_N.int())
        return spread(coded.scale_B.float(), level_N, coded.block).reshape(payload.shape)

    def accumulate(self, total: Tensor, payload: Payload, weight: float) -> None:
        """``total += weight * decompress(payload)``: on the processor in one pass, without the dense tensor."""
        if not (_on_processor(total) and total.is_contiguous()):
            total += self.decompress(payload) * weight
            return
        coded = self.read(payload)
        level_256 = self._levels_of(coded)
        fused.add_looked_up(total, coded.code_N, level_256, coded.scale_B.float(), coded.block, weight)

    def _levels_of(self, coded: Coded) -> Tensor:
        """The table as a tensor, once all codes are known to be in use."""
        level_256 = torch.tensor(coded.levels, dtype=torch.float32, device=coded.code_N.device)
        if _on_processor(coded.code_N):
            used = torch.tensor(fused.all_used(coded.code_N, level_256))
        else:
            used = ~level_256.isnan()[coded.code_N.int()].any()
        require(used, self, coded.rule)
        return level_256


def table(levels: Sequence[float]) -> tuple[float, ...]:
    """The levels of codes 0, 1, ..., filled up to 256 with unused codes."""
    return (*levels, *[UNUSED] * (256 - len(levels)))


def _on_processor(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"
