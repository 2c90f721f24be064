"""Blocks of values that share a scale, and codes that mean a level of it: what most quantisers are made of."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from decentral.coding import Floats, Symbols
from decentral.compressors.base import Decoded, Method, PartSpec, Payload, Shape, check_input, check_parts, require
from decentral.errors import ConfigError
from decentral.tensors.compiled import compiled
from decentral.tensors.device import slabs
from decentral.tensors.memory import fresh_like

__all__ = [
    "UNUSED",
    "Code",
    "Tabled",
    "check_block",
    "largest_scale",
    "quantise",
    "scale_blocks",
    "table",
    "to_blocks",
]

# ---- blocks and their scales ----
#
# Runs of consecutive values that share one scale, and scales short enough to multiply exactly.
#
# A scale has 8 significant bits (it fits bfloat16), so ``code * scale`` with an 8-bit code is exact in float32: every
# device decodes the same bits, fused multiply-add or not, and ``tensor - decoded`` loses nothing to rounding. Rounding
# the scale up costs less than 1/128 of its size; below 2**-126, where float32 has denormals, 2**-133, so that there the
# values of a block may be lost whole.

_LARGEST_BLOCK = 65536  # a short tensor is filled up to a whole block, so a block must not be huge
_LONG_BITS = 0xFFFF  # the mantissa bits float32 has and bfloat16 has not


def check_block(method: object, block: int) -> None:
    """Raise ConfigError unless a block has a sensible size."""
    if not 1 <= block <= _LARGEST_BLOCK:
        raise ConfigError(f"{method}: a block has 1 to {_LARGEST_BLOCK} values; 256 and 4096 are usual")


def _num_blocks(numel: int, block: int) -> int:
    """Return how many blocks cover ``numel`` values, the last one possibly short."""
    return -(-numel // block)


def to_blocks(flat_N: Tensor, block: int) -> Tensor:
    """Return the values as rows (num_blocks, block), the last row filled up with zeros."""
    missing = -flat_N.numel() % block
    if missing:
        flat_N = torch.nn.functional.pad(flat_N, (0, missing))
    return flat_N.reshape(-1, block)


def _peaks(flat_N: Tensor, block: int) -> Tensor:
    """Return the largest magnitude of every block, float32 (num_blocks,)."""
    return to_blocks(flat_N, block).abs().amax(dim=1)


def _spread(scale_B: Tensor, flat_N: Tensor, block: int) -> Tensor:
    """Return ``flat_N`` with each block multiplied by its float32 scale."""
    return (to_blocks(flat_N, block) * scale_B[:, None]).flatten()[: flat_N.numel()]


def _over(size_B: Tensor, top: float) -> Tensor:
    """Return the true quotient on every device, by way of float64: by a number, CUDA divides as it multiplies by its
    reciprocal, and kernels divide to the last bit but one. A size that is a short scale times ``top`` must not be
    rounded up to the next scale. No quotient by a short number lies so near to halfway that float64 misses it.
    """
    return (size_B.double() / top).float()


def _short_scale(size_B: Tensor, largest: float) -> Tensor:
    """Return sizes >= 0 rounded up to 8 significant bits (denormals: multiples of 2**-133), float32, at most
    ``largest``.
    """
    bits_B = (size_B.view(torch.int32) + _LONG_BITS) & ~_LONG_BITS
    return bits_B.view(torch.float32).clamp(max=largest)


def largest_scale(top: float) -> float:
    """Return the largest scale of 8 significant bits for which ``top * scale`` is finite."""
    mantissa, exponent = math.frexp(torch.finfo(torch.float32).max / top)
    return math.ldexp(math.floor(mantissa * 256) / 256, exponent)


def scale_blocks(value_N: Tensor, block: int, top: int = 1) -> tuple[Tensor, Tensor]:
    """Return values over the scales of their blocks (B, block), at most ``top`` in magnitude but for what scales are
    rounded by, and the scales (B,); a block of zeros is divided by 1.
    """
    scale_B = _short_scale(_over(_peaks(value_N, block), top), largest_scale(top))
    divisor_B = torch.where(scale_B > 0, scale_B, torch.ones_like(scale_B))
    return to_blocks(value_N, block) / divisor_B[:, None], scale_B


# ---- codes that mean a level ----
#
# A table of 256 levels, times the scale of the block.
#
# Parts: codes uint8 (N,), scales (B,). Levels have at most 16 significant bits and scales 8, so that the product is
# exact on every device.
#
# Shape suffixes: N = values, B = blocks; n, b = those of a slab.

UNUSED = math.nan


@dataclass(frozen=True, slots=True)
class Code:
    """The meaning of a method's codes."""

    bits: int  # of a code
    levels: tuple[float, ...]  # a `table`
    top: float  # the largest magnitude of a level: times a scale, it must be finite
    rule: str  # what codes must be, for the error


class Tabled(Method):
    """A method whose values are level * scale; ``block`` of them share a scale."""

    __slots__ = ()
    scale_dtype: ClassVar[torch.dtype] = torch.bfloat16
    block: int

    def __post_init__(self) -> None:
        check_block(self, self.block)

    @property
    def code(self) -> Code:
        """Return the meaning of its codes."""
        raise NotImplementedError

    def nearest_codes(self, value_N: Tensor) -> tuple[Tensor, Tensor]:
        """Return codes (N,) and scales (B,) of finite float32 values, whole blocks of a tensor or its end."""
        raise NotImplementedError

    def layout(self, shape: Shape) -> tuple[PartSpec, ...]:
        """Return codes, then scales."""
        numel = math.prod(shape)
        return (
            PartSpec("codes", torch.uint8, (numel,), Symbols(self.code.bits)),
            PartSpec("scales", self.scale_dtype, (_num_blocks(numel, self.block),), Floats()),
        )

    def compress_one(self, tensor: Tensor) -> Payload:
        """Round every value to a level of its block."""
        value_N = check_input(tensor).flatten()
        return self.fill_payload(
            tuple(tensor.shape), value_N, lambda start, stop: self.nearest_codes(value_N[start:stop])
        )

    def fill_payload(self, shape: Shape, value_N: Tensor, slab: Callable[[int, int], tuple[Tensor, Tensor]]) -> Payload:
        """Return a payload whose codes and scales ``slab(start, stop)`` gives, a run of whole blocks at a time."""
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

    def decompress(self, payloads: Sequence[Payload]) -> list[Decoded]:
        """Return level * scale; PayloadError, at the first use, when a scale is bad or a code is not used."""
        return [_Levels(self, payload) for payload in payloads]

    def check_payload(self, payload: Payload) -> tuple[Tensor, Tensor, Tensor]:
        """Return the codes, the table as a tensor, and the scales in float32; PayloadError as above."""
        check_parts(self, payload, self.layout(payload.shape))
        (code_N, scale_B), code = payload.parts, self.code
        scale_B = scale_B.float()
        fits = ((scale_B >= 0) & torch.isfinite(scale_B * code.top)).all()
        require(fits, self, f"a scale is bad: want 0 <= {code.top:g} * scale < Inf")
        level_256 = torch.tensor(code.levels, dtype=torch.float32, device=code_N.device)
        require(_are_all_used(code_N, level_256), self, code.rule)
        return code_N, level_256, scale_B


@dataclass(frozen=True, slots=True)
class _Levels(Decoded):
    """Codes that are looked up when they are used: added on the processor in one pass, without the dense tensor."""

    method: Tabled
    payload: Payload

    def tensor(self) -> Tensor:
        code_N, level_256, scale_B = self.method.check_payload(self.payload)
        if _on_processor(code_N):
            return look_up(code_N, level_256, scale_B, self.method.block).reshape(self.payload.shape)
        level_N = level_256.index_select(0, code_N.int())
        return _spread(scale_B, level_N, self.method.block).reshape(self.payload.shape)

    def add(self, start: int, total_n: Tensor, weight: float) -> None:
        if not _on_processor(total_n):
            total_n += self.tensor().view(-1) * weight
            return
        code_N, level_256, scale_B = self.method.check_payload(self.payload)
        add_looked_up(total_n, code_N, level_256, scale_B, self.method.block, weight)


def table(levels: Sequence[float]) -> tuple[float, ...]:
    """Return the levels of codes 0, 1, ..., filled up to 256 with unused codes."""
    return (*levels, *[UNUSED] * (256 - len(levels)))


def _are_all_used(code_N: Tensor, level_256: Tensor) -> Tensor | bool:
    if _on_processor(code_N):
        return all_used(code_N, level_256)
    return ~level_256.isnan()[code_N.int()].any()


def _on_processor(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"


# ---- loops over blocks ----
#
# A block is read once, and its second pass finds it in the cache.
#
# For the processor. `Linear.nearest_codes` and `Tabled` say the same with torch for other devices, to the bit. Per
# value and core: 0.6 ns to quantise, 0.4 ns to look up; in torch, whose every operation goes through memory again, 15
# times that.
#
# Shape suffixes: N = values, B = blocks.

_ROUND = np.float32(3 << 22)  # x + this has the nearest whole number to x, ties to even, in its lowest bits
_SIZE = np.uint32(0x7FFFFFFF)  # the bits of a float32 without its sign: they rise as the magnitude does
_INF = np.uint32(0x7F800000)
_LONG_BITS_U32 = np.uint32(_LONG_BITS)  # for numba


def quantise(flat_N: Tensor, block: int, top: int, largest: float) -> tuple[Tensor, Tensor] | None:
    """Return codes uint8 (N,), 1 to 2 * top + 1, and scales float32 (B,); None when a value is NaN or Inf."""
    values = flat_N.contiguous().numpy()
    code_N = torch.from_numpy(np.empty(values.size, dtype=np.uint8))
    scale_B = torch.empty(-(-values.size // block), dtype=torch.float32, device="cpu")
    row, scales = np.empty(min(block, values.size), dtype=np.float32), scale_B.numpy()
    bits = (values.view(np.uint32), scales.view(np.uint32), row.view(np.uint32))
    finite = _quantise(values, scales, row, *bits, block, top, np.float32(largest), code_N.numpy())
    return (code_N, scale_B) if finite else None


def look_up(code_N: Tensor, level_256: Tensor, scale_B: Tensor, block: int) -> Tensor:
    """Return level * scale of every code, float32 (N,)."""
    value_N = fresh_like(code_N)
    codes, scales = code_N.contiguous().numpy(), scale_B.contiguous().numpy()
    _look_up(codes, level_256.numpy(), scales, block, value_N.numpy())
    return value_N


def add_looked_up(total: Tensor, code_N: Tensor, level_256: Tensor, scale_B: Tensor, block: int, weight: float) -> None:
    """Do ``total += weight * (level * scale)`` in place; ``total`` is contiguous, of any shape."""
    codes, scales = code_N.contiguous().numpy(), scale_B.contiguous().numpy()
    _add_looked_up(codes, level_256.numpy(), scales, block, np.float32(weight), total.view(-1).numpy())


def all_used(code_N: Tensor, level_256: Tensor) -> bool:
    """Tell whether every code has a level that is not NaN."""
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
        scale_bits[b] = (scale_bits[b] + _LONG_BITS_U32) & ~_LONG_BITS_U32
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
