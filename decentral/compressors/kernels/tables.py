"""A code means a level: a table of 256, times the scale of the block.

Parts: codes uint8 (N,), scales (B,). Levels have at most 16 significant bits and scales 8, so that the product is exact
on every device.
"""
# Shape suffixes: N = values, B = blocks; n, b = those of a slab.

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from decentral.coding import Floats, Symbols
from decentral.compressors.base import Method, PartSpec, Payload, Shape, check_input, check_parts, require
from decentral.compressors.kernels import fused
from decentral.compressors.kernels.blocks import num_blocks, spread
from decentral.tensors.device import slabs

__all__ = ["UNUSED", "Code", "Tabled", "table"]

UNUSED = math.nan


@dataclass(frozen=True, slots=True)
class Code:
    """What the codes of a method mean."""

    bits: int  # of a code
    levels: tuple[float, ...]  # a `table`
    top: float  # the largest magnitude of a level: times a scale, it must be finite
    rule: str  # what codes must be, for the error


class Tabled(Method):
    """A method whose values are level * scale; ``block`` of them share a scale."""

    __slots__ = ()
    scale_dtype: ClassVar[torch.dtype] = torch.bfloat16
    block: int

    @property
    def code(self) -> Code:
        """What its codes mean."""
        raise NotImplementedError

    def quantised(self, value_N: Tensor) -> tuple[Tensor, Tensor]:
        """Codes (N,) and scales (B,) of finite float32 values, whole blocks of a tensor or its end."""
        raise NotImplementedError

    def layout(self, shape: Shape) -> tuple[PartSpec, ...]:
        """Codes, then scales."""
        numel = math.prod(shape)
        return (
            PartSpec("codes", torch.uint8, (numel,), Symbols(self.code.bits)),
            PartSpec("scales", self.scale_dtype, (num_blocks(numel, self.block),), Floats()),
        )

    def compress(self, tensor: Tensor) -> Payload:
        """Every value to a level of its block."""
        value_N = check_input(tensor).flatten()
        return self.filled(tuple(tensor.shape), value_N, lambda start, stop: self.quantised(value_N[start:stop]))

    def filled(self, shape: Shape, value_N: Tensor, slab: Callable[[int, int], tuple[Tensor, Tensor]]) -> Payload:
        """A payload whose codes and scales ``slab(start, stop)`` gives, a run of whole blocks at a time."""
        codes, scales = self.layout(shape)
        runs = list(slabs(value_N, self.block))
        if len(runs) == 1:
            code_N, scale_B = slab(*runs[0])
            return Payload(shape, (code_N.to(codes.dtype), scale_B.to(scales.dtype)))
        code_N = torch.empty(codes.shape, dtype=codes.dtype, device=value_N.device)
        scale_B = torch.empty(scales.shape, dtype=scales.dtype, device=value_N.device)
        for start, stop in runs:
            code_n, scale_b = slab(start, stop)
            code_N[start:stop] = code_n
            scale_B[start // self.block :][: scale_b.numel()] = scale_b
        return Payload(shape, (code_N, scale_B))

    def decompress(self, payload: Payload) -> Tensor:
        """level * scale; PayloadError when a scale is bad or a code is not used."""
        code_N, level_256, scale_B = self._read(payload)
        if _on_processor(code_N):
            return fused.look_up(code_N, level_256, scale_B, self.block).reshape(payload.shape)
        level_N = level_256.index_select(0, code_N.int())
        return spread(scale_B, level_N, self.block).reshape(payload.shape)

    def accumulate(self, total: Tensor, payload: Payload, weight: float) -> None:
        """``total += weight * decompress(payload)``: on the processor in one pass, without the dense tensor."""
        if not (_on_processor(total) and total.is_contiguous()):
            total += self.decompress(payload) * weight
            return
        code_N, level_256, scale_B = self._read(payload)
        fused.add_looked_up(total, code_N, level_256, scale_B, self.block, weight)

    def _read(self, payload: Payload) -> tuple[Tensor, Tensor, Tensor]:
        """The codes, the table as a tensor, the scales in float32; all of them checked."""
        check_parts(self, payload, self.layout(payload.shape))
        (code_N, scale_B), code = payload.parts, self.code
        scale_B = scale_B.float()
        fits = ((scale_B >= 0) & torch.isfinite(scale_B * code.top)).all()
        require(fits, self, f"a scale is bad: want 0 <= {code.top:g} * scale < Inf")
        level_256 = torch.tensor(code.levels, dtype=torch.float32, device=code_N.device)
        require(_all_used(code_N, level_256), self, code.rule)
        return code_N, level_256, scale_B


def table(levels: Sequence[float]) -> tuple[float, ...]:
    """The levels of codes 0, 1, ..., filled up to 256 with unused codes."""
    return (*levels, *[UNUSED] * (256 - len(levels)))


def _all_used(code_N: Tensor, level_256: Tensor) -> Tensor | bool:
    if _on_processor(code_N):
        return fused.all_used(code_N, level_256)
    return ~level_256.isnan()[code_N.int()].any()


def _on_processor(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"
