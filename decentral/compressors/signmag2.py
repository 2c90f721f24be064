"""2 bits per value: its sign, and whether its magnitude is a small or a large one of its row.

Parts: codes uint8 below 4 (N,), bit 0 magnitude, bit 1 sign; peaks uint8 (1,), the exponent of the largest level plus 100;
levels uint8 (rows,) of the large magnitudes; steps uint8 (rows,) from there down to the small ones. At most 2 +
16/columns bits per value; behind topk 64 of 4096, entropy coded, 1.9: a large magnitude is one of four.
Rows are the last dimension: behind topk, one row is one chunk.
The levels are the means of the small and of the large magnitudes, split where the squared error is least (exact: all
splits of the sorted magnitudes are tried); each value then takes the nearer level. A level is a sixteenth of a power of
two, counted down from the largest level of all rows: off by at most 2.2 %, which leaves the code's error at
0.062 of the norm on Gaussian top-64-of-4096 (0.061 with exact levels). Sixteen powers of two below the largest, a
row counts as zero, and error feedback keeps it. Levels have 8 significant bits: products are exact on every device.

Source: Sarfi et al., "SparseLoCo", 2025, arXiv:2508.15706 sends 2-bit values with one uniform grid per tensor; on
top-k output only two of its four bins are populated. The split is Lloyd's ("Least squares quantization in PCM", 1982).
"""
# Shape suffixes: R = rows, C = columns (values per row), N = R * C.

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from decentral.coding import Symbols
from decentral.compressors.base import About, Method, PartSpec, Payload, Shape, check_input, check_parts, require

__all__ = ["SignMag2"]

_PER_OCTAVE = 16
_HIGHEST = 255  # the code of the largest level; 0 is a row of zeros
_MANTISSAS = [round(128 * 2 ** (step / _PER_OCTAVE)) / 128 for step in range(_PER_OCTAVE)]
_LOWEST_PEAK, _HIGHEST_PEAK = -100, 127  # exponents: from the lowest, the smallest level is still a normal float32


@dataclass(frozen=True, slots=True)
class SignMag2(Method):
    """Sign and one magnitude bit, two levels per row."""

    name: ClassVar[str] = "signmag2"
    about: ClassVar[About] = About(
        layout="codes 2 bits (N), levels 8 + 8 bits (rows), one exponent",
        biased=True,
        source='Sarfi et al., "SparseLoCo", 2025, arXiv:2508.15706; Lloyd, 1982',
        bound="|error|**2 <= |x|**2 - 0.999 * sum(|x|)**2 / columns, per row",
    )

    def layout(self, shape: Shape) -> tuple[PartSpec, ...]:
        """Codes, the exponent of the largest level, large levels, steps to the small ones."""
        rows, columns = _matrix(shape)
        return (
            PartSpec("codes", torch.uint8, (rows * columns,), Symbols(2)),
            PartSpec("peaks", torch.uint8, (1,), Symbols(8)),
            PartSpec("levels", torch.uint8, (rows,), Symbols(8)),
            PartSpec("steps", torch.uint8, (rows,), Symbols(8)),
        )

    def compress(self, tensor: Tensor) -> Payload:
        """Fit two levels to each row, then take the nearer one."""
        value_RC = check_input(tensor).reshape(_matrix(tuple(tensor.shape)))
        size_RC = value_RC.abs()
        level_R2, peak = _coded(_means(size_RC))
        decoded_R2 = _decoded(level_R2, peak)
        halfway_R = decoded_R2.mul(0.5).sum(dim=1)  # halved first: the sum could overflow
        code_RC = (size_RC > halfway_R[:, None]).to(torch.uint8) | ((value_RC < 0).to(torch.uint8) << 1)
        small_R, large_R = level_R2.unbind(1)
        parts = (code_RC.flatten(), peak, large_R.to(torch.uint8), (large_R - small_R).to(torch.uint8))
        return Payload(tuple(tensor.shape), parts)

    def decompress(self, payload: Payload) -> Tensor:
        """+-level."""
        check_parts(self, payload, self.layout(payload.shape))
        code_N, peak, large_R, step_R = payload.parts
        require((step_R <= large_R).all(), self, "a small level lies below zero")
        require((peak <= _HIGHEST_PEAK - _LOWEST_PEAK).all(), self, f"the peak is above 2**{_HIGHEST_PEAK}")
        small_R, large_R = _decoded(torch.stack([large_R - step_R, large_R], dim=1).int(), peak).unbind(1)
        code_RC = code_N.view(_matrix(payload.shape))
        size_RC = torch.where((code_RC & 1).bool(), large_R[:, None], small_R[:, None])
        return torch.where((code_RC & 2).bool(), -size_RC, size_RC).reshape(payload.shape)


def _matrix(shape: Shape) -> tuple[int, int]:
    """(rows, columns): the last dimension against all others; no rows when there are no values."""
    columns = shape[-1] if shape else 1
    return (math.prod(shape[:-1]), columns) if columns else (0, 0)


def _means(size_RC: Tensor) -> Tensor:
    """float64 (R, 2): the means on both sides of the split with the least squared error."""
    rows, columns = size_RC.shape
    if rows == 0 or columns == 1:
        return (size_RC.expand(rows, 2) if rows else size_RC.new_zeros(0, 2)).double()
    sum_RC = size_RC.sort(dim=1).values.to(torch.float64).cumsum(dim=1)  # float64: 1e38 squared has to fit
    count_S = torch.arange(1, columns, dtype=torch.float64, device=size_RC.device)  # S splits: 1..C-1 small ones
    small_RS = sum_RC[:, :-1] / count_S
    large_RS = (sum_RC[:, -1:] - sum_RC[:, :-1]) / (columns - count_S)
    explained_RS = small_RS**2 * count_S + large_RS**2 * (columns - count_S)
    best_R1 = explained_RS.argmax(dim=1, keepdim=True)
    return torch.cat([small_RS.gather(1, best_R1), large_RS.gather(1, best_R1)], dim=1)


def _coded(mean_R2: Tensor) -> tuple[Tensor, Tensor]:
    """Levels int32 (R, 2) in 0..255, small then large, and the peak uint8 (1,) that they count down from."""
    octave_R2 = torch.log2(mean_R2)  # -inf for zero
    highest = octave_R2.amax() if mean_R2.numel() else octave_R2.new_tensor(-math.inf)
    peak = (highest + 0.5 / _PER_OCTAVE).floor().clamp(_LOWEST_PEAK, _HIGHEST_PEAK)  # of the largest level, before its sixteenths
    down_R2 = torch.round((octave_R2 - peak) * _PER_OCTAVE).clamp(-_HIGHEST - 1, _PER_OCTAVE - 1)
    level_R2 = (down_R2 + (_HIGHEST + 1 - _PER_OCTAVE)).clamp(min=0).int()
    return level_R2, (peak - _LOWEST_PEAK).to(torch.uint8).reshape(1)


def _decoded(level_R2: Tensor, peak: Tensor) -> Tensor:
    """The float32 magnitudes of levels."""
    sixteenth_R2 = level_R2 - (_HIGHEST + 1 - _PER_OCTAVE)
    mantissa_16 = torch.tensor(_MANTISSAS, dtype=torch.float32, device=level_R2.device)
    exponent_R2 = (sixteenth_R2 >> 4) + (peak.int() + _LOWEST_PEAK)
    power_R2 = ((exponent_R2 + 127) << 23).clamp(min=0).view(torch.float32)  # from its bits: pow is not exact on CUDA
    size_R2 = mantissa_16[sixteenth_R2 & 15] * power_R2
    return torch.where(level_R2 > 0, size_R2, torch.zeros_like(size_R2))
