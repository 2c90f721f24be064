"""The orthonormal cosine transform (DCT-II) of small tiles and its inverse, with the same bits on every machine.

A matrix product in floating point depends on the order of its sums, and so on the BLAS, the processor and the number
of threads. Here every product is one of whole numbers held in float64: tiles have 22 bits and the basis 24, so that no
partial sum reaches 2**53 and every order, with fused multiply-add or without, gives the same exact number. Only
single values are rounded, which IEEE 754 defines. The basis itself is made from integers: no libm is asked.

What comes back is a multiple of 2**-16 of the tile's largest number: off by no more than half of that for rounding, so
``tensor - decoded`` is as good as exact, at 5e-9 of the energy of a tile of 64x64.

Source: Ahmed, Natarajan, Rao, "Discrete Cosine Transform", 1974; transform coding of updates from Peng et al., "DeMo",
2024, arXiv:2411.19870.
"""
# Shape suffixes: C = tiles, H, W = height and width of one, u = frequency.

import functools
import math

import torch
from torch import Tensor

__all__ = ["basis", "from_spectrum", "halvings", "to_spectrum"]

_VALUE_BITS = 22
_BASIS_BITS = 24  # 22 + 24 bits, times 8 for a row of 64 (its absolute sum), twice: 2**25 * 2**24 * 8 = 2**52
_GRID_BITS = 16
_LARGEST = torch.finfo(torch.float32).max
_PI = 0x3243F6A8885A308D313198A2E03707344  # times 2**128
_ONE = 1 << 128


def to_spectrum(value_CHW: Tensor, both: bool) -> Tensor:
    """float32 coefficients of finite float32 tiles, times ``2 ** -halvings``; ``both``: along columns too."""
    height, width = value_CHW.shape[1:]
    whole_CHW, scale_C11 = _whole(value_CHW.double())
    left = basis(height, value_CHW.device) if both else None
    coef_CHW = _product(left, whole_CHW, basis(width, value_CHW.device).T)
    return _single(coef_CHW * scale_C11 * 0.5 ** halvings(height, width, both))


def from_spectrum(coef_CHW: Tensor, both: bool) -> Tensor:
    """float32 tiles of finite float32 coefficients; beyond float32's range, its ends."""
    height, width = coef_CHW.shape[1:]
    whole_CHW, scale_C11 = _whole(coef_CHW.double())
    left = basis(height, coef_CHW.device).T if both else None
    fine_CHW = _product(left, whole_CHW, basis(width, coef_CHW.device))
    coarse = 2.0 ** (_VALUE_BITS - _GRID_BITS)
    return _single((fine_CHW / coarse).round_() * (scale_C11 * coarse * 2.0 ** halvings(height, width, both)))


def halvings(height: int, width: int, both: bool) -> int:
    """How often coefficients are halved, so that none is larger than the largest value: 6 for 64x64."""
    return ((height * width if both else width) - 1).bit_length() + 1 >> 1


@functools.lru_cache(maxsize=64)  # 32 KiB each at most; making one of 64 anew took 0.2 ms, and a copy to the device
def basis(length: int, device: torch.device) -> Tensor:
    """float64 (u, length): the orthonormal DCT-II, whole numbers of 24 bits. Shared: not to be written to."""
    with torch.inference_mode(False):  # whoever asks first, others may need gradients
        return torch.tensor(_basis(length), dtype=torch.float64, device=device)


def _basis(length: int) -> list[list[int]]:
    turn = [_cosine(_PI * m // (2 * length)) for m in range(4 * length)]
    size = [math.isqrt((2 if u else 1) * _ONE * _ONE // length) for u in range(length)]
    shift = 256 - _BASIS_BITS
    half = 1 << (shift - 1)
    return [
        [(size[u] * turn[(2 * x + 1) * u % (4 * length)] + half) >> shift for x in range(length)] for u in range(length)
    ]


def _cosine(angle: int) -> int:
    """Of an angle in [0, 2 pi), all times 2**128: Taylor's series."""
    square, term, total, n = angle * angle >> 128, _ONE, 0, 0
    while term:
        total += -term if n % 2 else term
        n += 1
        term = (term * square >> 128) // ((2 * n - 1) * 2 * n)
    return total


def _whole(value_CHW: Tensor) -> tuple[Tensor, Tensor]:
    """Whole numbers of 22 bits, and the power of two (C, 1, 1) that scales them back."""
    size_C = value_CHW.abs().amax(dim=(1, 2)) if value_CHW.numel() else value_CHW.new_zeros(value_CHW.shape[0])
    exponent_C = ((size_C.view(torch.int64) >> 52) - 1022).clamp(min=-200)  # size < 2**exponent; zeros, too
    down_C11 = _power(_VALUE_BITS - exponent_C)[:, None, None]
    return (value_CHW * down_C11).round_(), _power(exponent_C - _VALUE_BITS)[:, None, None]


def _power(exponent_C: Tensor) -> Tensor:
    """float64 ``2 ** exponent``, from its bits."""
    return ((exponent_C + 1023) << 52).view(torch.float64)


def _product(left_HH: Tensor | None, whole_CHW: Tensor, right_WW: Tensor) -> Tensor:
    """``left @ whole @ right`` in units of ``whole``; rounded to whole numbers in between."""
    if left_HH is not None:
        whole_CHW = (left_HH @ whole_CHW).mul_(0.5**_BASIS_BITS).round_()
    return (whole_CHW @ right_WW).mul_(0.5**_BASIS_BITS)


def _single(value_CHW: Tensor) -> Tensor:
    return value_CHW.clamp(-_LARGEST, _LARGEST).float()
