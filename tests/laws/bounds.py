"""What each method says that it loses at most, in the words that it prints and as a formula: `test_compressor_bounds`.

A word that is changed in ``About.bound`` is changed here, beside the formula that has to follow.
"""
# Shape suffixes: G = groups of values, L = values in a group; all float64. x is the tensor in its shape.

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from decentral.compressors import Compressor
from decentral.compressors.chunks import as_matrix, cut, regions

PerValue = Callable[[Compressor, Tensor], Tensor]
Groups = Callable[[Compressor, Tensor], list[Tensor]]
Most = Callable[[Compressor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class Bound:
    """``per_value(compressor, x)``: the most that each value is off. ``most(compressor, group_GL, x)``: the squared
    norm of what each of ``groups(compressor, x)`` loses, at most; by default, that of what was there.
    """

    printed: str
    per_value: PerValue | None = None
    groups: Groups | None = lambda compressor, x: [x.reshape(1, -1)]
    most: Most = lambda compressor, group_GL, x: group_GL.square().sum(1)


def name_of(spelling: str) -> str:
    """The method's; of a chain, nothing in the table."""
    return ">>" if ">>" in spelling else spelling.split("(")[0]


def blocks(compressor: Compressor, x: Tensor) -> list[Tensor]:
    """Whole blocks (B, L), and the short one."""
    flat = x.flatten()
    whole = flat.numel() // compressor.block * compressor.block
    return [group for group in (flat[:whole].view(-1, compressor.block), flat[whole:].view(1, -1)) if group.numel()]


def peak(compressor: Compressor, x: Tensor) -> Tensor:
    """The largest magnitude of the block of every value, in the shape of ``x``."""
    peaks = [group.abs().amax(1, True).expand_as(group).flatten() for group in blocks(compressor, x)]
    return torch.cat(peaks).view_as(x)


def _chunks(compressor: Compressor, x: Tensor) -> list[Tensor]:
    return [cut(as_matrix(x), region) for region in regions(tuple(x.shape), compressor.chunk)]


def _kept(length: int, k: int, of: int) -> float:
    return 1 - max(1, round(length * k / of)) / length


def _variance(compressor: Compressor, group: Tensor, x: Tensor) -> Tensor:
    return (x - x.mean()).square().sum()[None]


def _two_levels(compressor: Compressor, group: Tensor, x: Tensor) -> Tensor:
    faint, columns = 2.0**-14.9 * max(float(x.abs().max()), 2.0**-100), group.shape[1]
    return group.square().sum(1) - 0.998 * group.abs().sum(1).square() / columns + columns * faint**2


def _signs(compressor: Compressor, group: Tensor, x: Tensor) -> Tensor:
    length = group.shape[1]
    return group.square().sum(1) - (1 - 2**-14) * group.abs().sum(1).square() / length + length * 2.0**-266


def _coarse(compressor: Compressor, group: Tensor, x: Tensor) -> Tensor:
    sigma = (x - x.mean()).square().mean().sqrt()
    return (x.numel() * (sigma + 2.0**-23 * x.mean().abs() + 2.0**-149).square())[None]


def _in_a_bin(compressor: Compressor, x: Tensor) -> Tensor:
    """Infinite in the two end bins, and in a bin's width beside them: the edges are rounded."""
    bins = 2 ** min(8, max(4, (x.numel() // 32).bit_length() - 1))
    width = 6 * (x.std() if x.numel() > 1 else x.new_zeros(())) / bins
    return torch.where((x - x.mean()).abs() < width * (bins / 2 - 2), width, math.inf)


BOUNDS = {
    "none": Bound(printed="error = 0", per_value=lambda c, x: torch.zeros_like(x)),
    "fp16": Bound(
        printed="|error| <= |value| / 2048 + 2**-25 per value up to 65504",
        per_value=lambda c, x: x.abs() / 2048 + 2.0**-25 + (x.abs() - 65504).clamp(min=0),
    ),
    "bf16": Bound(
        printed="|error| <= |value| / 256 + 2**-134 per value", per_value=lambda c, x: x.abs() / 256 + 2.0**-134
    ),
    "int8": Bound(
        printed="|error| <= min(|value|, largest of the block / 252 + 2**-134) per value",
        per_value=lambda c, x: x.abs().minimum(peak(c, x) / 252 + 2.0**-134),
    ),
    "int4": Bound(
        printed="|error| <= min(|value|, largest of the block / 13.8 + 2**-134) per value",
        per_value=lambda c, x: x.abs().minimum(peak(c, x) / 13.8 + 2.0**-134),
    ),
    "e3m0": Bound(
        printed="|error| <= max(|value| / 3, largest of the block / 127 + 2**-140) per value",
        per_value=lambda c, x: (x.abs() / 3).maximum(peak(c, x) / 127 + 2.0**-140),
    ),
    "nf4": Bound(
        printed="|error| <= min(|value|, 0.154 * largest of the block + 2**-135) per value",
        per_value=lambda c, x: x.abs().minimum(0.154 * peak(c, x) + 2.0**-135),
    ),
    "fp8": Bound(
        printed="|error| <= max(|value| / 16, largest of the block / 455000 + 2**-141) per value",
        per_value=lambda c, x: (x.abs() / 16).maximum(peak(c, x) / 455000 + 2.0**-141),
    ),
    "natural": Bound(
        printed="unbiased, E|error|**2 <= |x|**2 / 8 while no value is above 2**127; "
        "|error| <= max(|value|, largest * 2**-125) per value",
        per_value=lambda c, x: x.abs().maximum(x.abs().amax() * 2.0**-125),
    ),
    "qsgd": Bound(
        printed="unbiased, E|error|**2 <= 1.02 * min(block / (4 levels**2), sqrt(block) / levels) * |x|**2 per block "
        "whose largest lies in [levels * 2**-126, 3.37e38]; |error| <= 1.01 * largest / levels + 2**-133 per value",
        per_value=lambda c, x: 1.01 * peak(c, x) / c.levels + 2.0**-133,
        groups=None,  # one draw may lose more than there was
    ),
    "sign": Bound(
        printed="|error|**2 <= |x|**2 - (1 - 2**-14) * sum(|x|)**2 / block + block * 2**-266, per block",
        groups=blocks,
        most=_signs,
    ),
    "signmag2": Bound(
        printed="|error|**2 <= |x|**2 - 0.998 * sum(|x|)**2 / columns + columns * t**2 per row, "
        "t = 2**-14.9 * max(largest of all rows, 2**-100)",
        groups=lambda c, x: [x.reshape(-1, x.shape[-1])],
        most=_two_levels,
    ),
    "codebook8": Bound(
        printed="|error|**2 <= N * variance; |error| <= 6 * sigma / K per value, but in the two end bins, "
        "K = 256 from 8192 values on, 16 to 128 below",
        per_value=_in_a_bin,
        most=_variance,
    ),
    "sparseloco2": Bound(printed="|error| <= sqrt(N) * (sigma + 2**-23 * |mean| + 2**-149)", most=_coarse),
    "topk": Bound(
        printed="|error|**2 <= (1 - kept / L) * |x|**2 per chunk of L values, kept = max(1, round(L * k / chunk))",
        groups=_chunks,
        most=lambda c, group, x: group.square().sum(1) * _kept(group.shape[1], c.k, c.chunk),
    ),
    "threshold": Bound(
        printed="|error|**2 <= (1 - K / N) * |x|**2, K = max(1, round(N * k / 4096))",
        most=lambda c, group, x: group.square().sum(1) * _kept(group.shape[1], c.k, 4096),
    ),
    "dct": Bound(
        printed="|error| <= |tensor| + sqrt(N) * 2**-149",
        most=lambda c, group, x: (x.square().sum().sqrt() + x.numel() ** 0.5 * 2.0**-149).square()[None],
    ),
    "randk": Bound(printed="|error| <= |tensor|"),
    "lowrank": Bound(printed="|error| <= |tensor|"),
}
ANY = Bound(printed="|error| <= |tensor|")  # of a chain, and of what another package adds
