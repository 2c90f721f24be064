"""2 bits per value: its sign, and whether its magnitude is a small or a large one of its row.

Parts: codes uint8 below 4 (N,), bit 0 magnitude, bit 1 sign; peaks uint8 (1,), the exponent of the largest level plus
100; levels uint8 (rows,) of the large magnitudes; steps uint8 (rows,) from there down to the small ones. At most 2 +
16/columns bits per value; behind topk 64 of 4096, entropy coded, 1.9: a large magnitude is one of four. Rows are the
last dimension: behind topk, one row is one chunk. The levels are the means of the small and of the large magnitudes,
split where the squared error is least (exact: all splits of the sorted magnitudes are tried); each value then takes the
nearer level. A level is a sixteenth of a power of two, counted down from the largest level of all rows: off by at most
2.2 %, which leaves the code's error at 0.062 of the norm on Gaussian top-64-of-4096 (0.061 with exact levels); 4.3 % at
the end of float32, above 1.9 * 2**127. Fifteen to sixteen powers of two below the largest (t of the printed bound), and
below 2**-115, a magnitude counts as zero, so a row of such is lost whole, and error feedback keeps it. Levels have 8
significant bits: products are exact on every device.

Source: Sarfi et al., "SparseLoCo", 2025, arXiv:2508.15706 sends 2-bit values with one uniform grid per tensor; on
top-k output only two of its four bins are populated. The split is Lloyd's ("Least squares quantization in PCM", 1982).
"""
# Shape suffixes: R = rows, C = columns (values per row), N = R * C.

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from decentral.coding import Symbols
from decentral.compressors.base import About, Method, PartSpec, Payload, Shape, check_input, check_shapes, require
from decentral.compressors.kernels.levels import (
    NUM_PEAKS,
    coded_levels,
    coded_levels_of,
    counts_on,
    level_sizes,
    sizes_below,
)
from decentral.compressors.kernels.two_levels import best_means, code_rows, decode_rows

__all__ = ["SignMag2"]


@dataclass(frozen=True, slots=True)
class SignMag2(Method):
    """Sign and one magnitude bit, two levels per row."""

    name: ClassVar[str] = "signmag2"
    about: ClassVar[About] = About(
        layout="codes 2 bits (N), levels 8 + 8 bits (rows), one exponent",
        biased=True,
        source='Sarfi et al., "SparseLoCo", 2025, arXiv:2508.15706; Lloyd, 1982',
        bound=(
            "|error|**2 <= |x|**2 - 0.998 * sum(|x|)**2 / columns + columns * t**2 per row, "
            "t = 2**-14.9 * max(largest of all rows, 2**-100)"
        ),
    )

    def layout(self, shape: Shape) -> tuple[PartSpec, ...]:
        """Codes, the exponent of the largest level, large levels, steps to the small ones."""
        return _layout(shape)

    def compress(self, tensor: Tensor) -> Payload:
        """Fit two levels to each row, then take the nearer one."""
        value_RC = check_input(tensor).reshape(_matrix(tuple(tensor.shape)))
        level_R2, peak = coded_levels(best_means(value_RC))
        halfway_R = level_sizes(peak)[level_R2].mul(0.5).sum(dim=1)  # halved first: the sum could overflow
        small_R, large_R = level_R2.unbind(1)
        parts = (code_rows(value_RC, halfway_R).flatten(), peak, large_R, large_R - small_R)
        return Payload(tuple(tensor.shape), tuple(part.to(torch.uint8) for part in parts))

    def compress_all(self, tensors: Sequence[Tensor]) -> list[Payload]:
        """``compress`` of finite tensors, those with as many columns together."""
        shapes = [_matrix(tuple(one.shape)) for one in tensors]
        made: list[Payload | None] = [None] * len(tensors)
        for columns in dict.fromkeys(shape[1] for shape in shapes):
            here = [i for i, shape in enumerate(shapes) if shape[1] == columns]
            counts = [shapes[i][0] for i in here]
            parts = self._compress_rows(torch.cat([tensors[i].reshape(shapes[i]) for i in here]), counts)
            for i, found in zip(here, parts, strict=True):
                made[i] = Payload(tuple(tensors[i].shape), found)
        return [one for one in made if one is not None]

    def _compress_rows(self, value_RC: Tensor, counts: list[int]) -> list[tuple[Tensor, ...]]:
        """Parts of matrices that lie one behind the other, of so many rows each."""
        level_R2, peak_M, peak_R = coded_levels_of(best_means(value_RC), counts)
        halfway_R = sizes_below(peak_R, level_R2).mul(0.5).sum(dim=1)
        code_RC = code_rows(value_RC, halfway_R)
        large_R, step_R = level_R2[:, 1].to(torch.uint8), (level_R2[:, 1] - level_R2[:, 0]).to(torch.uint8)
        codes = [code_rC.flatten() for code_rC in code_RC.split_with_sizes(counts)]
        peaks = peak_M.to(torch.uint8).split_with_sizes([1] * len(counts))
        return list(zip(codes, peaks, large_R.split_with_sizes(counts), step_R.split_with_sizes(counts), strict=True))

    def decompress_all(self, payloads: Sequence[Payload]) -> list[Tensor]:
        """``decompress`` of each, those with as many columns together. PayloadError as there."""
        for payload in payloads:
            check_shapes(self, payload, self.layout(payload.shape))
        shapes = [_matrix(payload.shape) for payload in payloads]
        made = [torch.empty(0)] * len(payloads)
        for columns in dict.fromkeys(shape[1] for shape in shapes):
            here = [i for i, shape in enumerate(shapes) if shape[1] == columns]
            counts = [shapes[i][0] for i in here]
            code_N, peak_M, large_R, step_R = (torch.cat([payloads[i].parts[n] for i in here]) for n in range(4))
            self._check(code_N, peak_M, large_R, step_R)
            peak_R = peak_M.repeat_interleave(counts_on(tuple(counts), peak_M.device), output_size=sum(counts))
            size_R2 = sizes_below(peak_R, torch.stack([large_R - step_R, large_R], dim=1))
            value_RC = decode_rows(code_N.view(-1, columns), size_R2)
            for i, rows in zip(here, value_RC.split_with_sizes(counts), strict=True):
                made[i] = rows.reshape(payloads[i].shape)
        return made

    def decompress(self, payload: Payload) -> Tensor:
        """+-level."""
        check_shapes(self, payload, self.layout(payload.shape))
        code_N, peak, large_R, step_R = payload.parts
        self._check(code_N, peak, large_R, step_R)
        size_R2 = level_sizes(peak)[torch.stack([large_R - step_R, large_R], dim=1).int()]
        return decode_rows(code_N.view(_matrix(payload.shape)), size_R2).reshape(payload.shape)

    def _check(self, code_N: Tensor, peak_M: Tensor, large_R: Tensor, step_R: Tensor) -> None:
        """PayloadError unless the parts, which have their shapes, keep their rules."""
        require(code_N.amax() < 4 if code_N.numel() else True, self, "codes must be below 4")
        require((step_R <= large_R).all(), self, "a small level lies below zero")
        require((peak_M < NUM_PEAKS).all(), self, "a peak is beyond float32")


@functools.lru_cache(maxsize=4096)  # asked for at every step of a round
def _layout(shape: Shape) -> tuple[PartSpec, ...]:
    rows, columns = _matrix(shape)
    return (
        PartSpec("codes", torch.uint8, (rows * columns,), Symbols(2)),
        PartSpec("peaks", torch.uint8, (1,), Symbols(8)),
        PartSpec("levels", torch.uint8, (rows,), Symbols(8)),
        PartSpec("steps", torch.uint8, (rows,), Symbols(8)),
    )


def _matrix(shape: Shape) -> tuple[int, int]:
    """(rows, columns): the last dimension against all others; no rows when there are no values."""
    columns = shape[-1] if shape else 1
    return (math.prod(shape[:-1]), columns) if columns else (0, 0)
