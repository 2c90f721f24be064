"""Blockwise quantisers as one loop each: a block is read once, and its second pass finds it in the cache.

For the processor. `linear` and `tables` say the same with torch for other devices, to the bit. Per value and core:
0.6 ns to quantise, 0.4 ns to look up; in torch, whose every operation goes through memory again, 15 times that.
"""
# Shape suffixes: N = values, B = blocks.

import numpy as np
import torch
from torch import Tensor

from decentral.tensors.compiled import compiled
from decentral.tensors.memory import fresh_like

__all__ = ["add_looked_up", "all_used", "look_up", "quantise"]

_ROUND = np.float32(3 << 22)  # x + this has the nearest whole number to x, ties to even, in its lowest bits
_SIZE = np.uint32(0x7FFFFFFF)  # the bits of a float32 without its sign: they rise as the magnitude does
_INF = np.uint32(0x7F800000)
_LONG_BITS = np.uint32(0xFFFF)  # as in blocks.short_scale


def quantise(flat_N: Tensor, block: int, top: int, largest: float) -> tuple[Tensor, Tensor] | None:
    """Codes uint8 (N,), 1 to 2 * top + 1, and scales float32 (B,); None when a value is NaN or Inf."""
    values = flat_N.contiguous().numpy()
    code_N = torch.from_numpy(np.empty(values.size, dtype=np.uint8))
    scale_B = torch.empty(-(-values.size // block), dtype=torch.float32)
    row, scales = np.empty(min(block, values.size), dtype=np.float32), scale_B.numpy()
    bits = (values.view(np.uint32), scales.view(np.uint32), row.view(np.uint32))
    finite = _quantise(values, scales, row, *bits, block, top, np.float32(largest), code_N.numpy())
    return (code_N, scale_B) if finite else None


def look_up(code_N: Tensor, level_256: Tensor, scale_B: Tensor, block: int) -> Tensor:
    """level * scale of every code, float32 (N,)."""
    value_N = fresh_like(code_N)
    codes, scales = code_N.contiguous().numpy(), scale_B.contiguous().numpy()
    _look_up(codes, level_256.numpy(), scales, block, value_N.numpy())
    return value_N


def add_looked_up(total: Tensor, code_N: Tensor, level_256: Tensor, scale_B: Tensor, block: int, weight: float) -> None:
    """``total += weight * (level * scale)`` in place; ``total`` is contiguous, of any shape."""
    codes, scales = code_N.contiguous().numpy(), scale_B.contiguous().numpy()
    _add_looked_up(codes, level_256.numpy(), scales, block, np.float32(weight), total.view(-1).numpy())


def all_used(code_N: Tensor, level_256: Tensor) -> bool:
    """Whether every code has a level that is not NaN."""
    return bool(_all_used(code_N.contiguous().numpy(), level_256.isnan().numpy()))


@compiled
def _quantise(values, scales, row, value_bits, scale_bits, row_bits, block, top, largest, codes):  # type: ignore
    end, zero = np.float32(top), np.uint32(top + 1)
    for b in range(scales.size):
        start = b * block
        size = min(block, values.size - start)
        value, bits, code = values[start : start + size], value_bits[start : start + size], codes[start : start + size]
        peak = np.uint32(0)
        for i in range(size):
            peak = max(peak, bits[i] & _SIZE)
        if peak >= _INF:
            return False
        scale_bits[b] = peak
        scales[b] /= end
        scale_bits[b] = (scale_bits[b] + _LONG_BITS) & ~_LONG_BITS
        scales[b] = min(scales[b], largest)
        step = scales[b] if scales[b] > 0 else np.float32(1)
        for i in range(size):
            row[i] = min(max(value[i] / step, -end), end) + _ROUND
        for i in range(size):  # apart from the loop above, which computes in float32: both become vector code
            code[i] = np.uint8(row_bits[i] + zero)
    return True


@compiled
def _all_used(codes, unused):  # type: ignore[no-untyped-def]
    found = False
    for code in codes:
        found |= unused[code]
    return not found


@compiled
def _look_up(codes, levels, scales, block, values):  # type: ignore[no-untyped-def]
    for b in range(scales.size):
        start = b * block
        size = min(block, values.size - start)
        code, value, scale = codes[start : start + size], values[start : start + size], scales[b]
        for i in range(size):
            value[i] = levels[code[i]] * scale


@compiled
def _add_looked_up(codes, levels, scales, block, weight, total):  # type: ignore[no-untyped-def]
    for b in range(scales.size):
        start = b * block
        size = min(block, total.size - start)
        code, value, scale = codes[start : start + size], total[start : start + size], scales[b]
        for i in range(size):
            value[i] += weight * (levels[code[i]] * scale)
