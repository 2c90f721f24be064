"""2 bits per value: its sign, and whether its magnitude is a small or a large one of its row.

Parts: codes uint8 (ceil(N/4),), four in a byte, bit 0 magnitude, bit 1 sign; levels bfloat16 (rows, 2), small then
large. 2 + 32/columns bits per value. Rows are the last dimension: behind topk, one row is one chunk.
The levels are the means of the small and of the large magnitudes, split where the squared error is least (exact: all
splits of the sorted magnitudes are tried); each value then takes the nearer level.
bfloat16, because float16 loses precision below 6e-5, where late pseudo-gradients lie, and ends at 65504; rounding a
level by at most 0.4 % adds nothing visible to the code's own error (0.061 of the norm on Gaussian top-64-of-4096).

Source: Sarfi et al., "SparseLoCo", 2025, arXiv:2508.15706 sends 2-bit values with one uniform grid per tensor; on
top-k output only two of its four bins are populated. The split is Lloyd's ("Least squares quantization in PCM", 1982).
"""
# Shape suffixes: R = rows, C = columns (values per row), N = R * C.

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from decentral.compressors.base import About, Method, PartSpec, Payload, Shape, check_input, check_parts, require
from decentral.compressors.blocks import LARGEST_SCALE
from decentral.compressors.packing import pack, packed_nbytes, unpack

__all__ = ["SignMag2"]


@dataclass(frozen=True, slots=True)
class SignMag2(Method):
    """Sign and one magnitude bit, two levels per row."""

    name: ClassVar[str] = "signmag2"
    about: ClassVar[About] = About(
        layout="codes 2 bits (N), levels bfloat16 (rows, 2)",
        biased=True,
        source='Sarfi et al., "SparseLoCo", 2025, arXiv:2508.15706; Lloyd, 1982',
    )

    def layout(self, shape: Shape) -> tuple[PartSpec, ...]:
        """Codes, then levels."""
        rows, columns = _matrix(shape)
        return (
            PartSpec(torch.uint8, (packed_nbytes(rows * columns, 2),)),
            PartSpec(torch.bfloat16, (rows, 2)),
        )

    def compress(self, tensor: Tensor) -> Payload:
        """Fit two levels to each row, then take the nearer one."""
        value_RC = check_input(tensor).reshape(_matrix(tuple(tensor.shape)))
        size_RC = value_RC.abs()
        level_R2 = _levels(size_RC)
        halfway_R = level_R2.float().mul(0.5).sum(dim=1)  # halved first: the sum could overflow
        code_RC = (size_RC > halfway_R[:, None]).to(torch.uint8) | ((value_RC < 0).to(torch.uint8) << 1)
        return Payload(tuple(tensor.shape), (pack(code_RC.flatten(), 2), level_R2))

    def decompress(self, payload: Payload) -> Tensor:
        """+-level."""
        check_parts(self, payload, self.layout(payload.shape))
        packed, level_R2 = payload.parts
        small_R, large_R = level_R2.float().unbind(1)
        well_formed = (small_R >= 0) & (large_R >= small_R) & torch.isfinite(large_R)
        require(well_formed.all(), self, "levels must be finite and 0 <= small <= large")
        rows, columns = _matrix(payload.shape)
        code_RC = unpack(packed, 2, rows * columns, self).view(rows, columns)
        size_RC = torch.where((code_RC & 1).bool(), large_R[:, None], small_R[:, None])
        return torch.where((code_RC & 2).bool(), -size_RC, size_RC).reshape(payload.shape)


def _matrix(shape: Shape) -> tuple[int, int]:
    """(rows, columns): the last dimension against all others; no rows when there are no values."""
    columns = shape[-1] if shape else 1
    return (math.prod(shape[:-1]), columns) if columns else (0, 0)


def _levels(size_RC: Tensor) -> Tensor:
    """bfloat16 (R, 2): the means on both sides of the split with the least squared error."""
    rows, columns = size_RC.shape
    if rows == 0 or columns == 1:
        return _short(size_RC.expand(rows, 2) if rows else size_RC.new_zeros(0, 2))
    sum_RC = size_RC.sort(dim=1).values.to(torch.float64).cumsum(dim=1)  # float64: 1e38 squared has to fit
    count_S = torch.arange(1, columns, dtype=torch.float64, device=size_RC.device)  # S splits: 1..C-1 small ones
    small_RS = sum_RC[:, :-1] / count_S
    large_RS = (sum_RC[:, -1:] - sum_RC[:, :-1]) / (columns - count_S)
    explained_RS = small_RS**2 * count_S + large_RS**2 * (columns - count_S)
    best_R1 = explained_RS.argmax(dim=1, keepdim=True)
    return _short(torch.cat([small_RS.gather(1, best_R1), large_RS.gather(1, best_R1)], dim=1))


def _short(level_R2: Tensor) -> Tensor:
    """bfloat16, never Inf, and in order whatever the rounding of equal means did."""
    level_R2 = level_R2.float().clamp(max=LARGEST_SCALE).to(torch.bfloat16)
    return torch.stack([level_R2.amin(dim=1), level_R2.amax(dim=1)], dim=1)
