"""Keep the k largest cosine coefficients of every chunk: DeMo's sparsifier.

Parts: indices int16 (C, k) of every region of equal chunks, rising strictly; then the kept coefficients, float32 when
used alone; ``>>`` quantises coefficients. As many bits as `topk`: 7.4 for an index at most evenly spread, fewer where
coefficients crowd at low frequencies. Decoding is dense: every value of a chunk moves.
A matrix is cut into 64x64 tiles and transformed along both sides; any other tensor into runs of 64, transformed alone,
and the coefficients of 64 neighbouring runs are one chunk. What is left over at the borders makes smaller tiles and
runs of any length, so a prime dimension costs nothing (DeMo takes divisors: a prime would give tiles one value wide).
Coefficients are orthonormal, halved six times for a tile of 64x64 so that float32's range holds them.

Peers must decode the same bits, and floating-point matrix products do not give them: here whole numbers are multiplied.
Decoding costs two products of 64x64 matrices per tile, 0.08 s per million values on one core where topk takes 0.01; its
rounding is 2e-5 of the root mean square of a Gaussian tile, and is owed like all else.

This is DeMo's sparsifier alone. Its optimizer, which sends a momentum (beta 0.999) after every step, k = 32 of 4096,
and steps by the sign of the mean, is not here: error feedback and the outer optimizer are as for any other method.

Source: Peng, Quesnelle, Kingma, "DeMo: Decoupled Momentum Optimization", 2024, arXiv:2411.19870.
"""

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from decentral.coding import Rising
from decentral.compressors.base import About, Decoded, PartSpec, Selected, Shape, check_input, require_rising
from decentral.compressors.chain import SparsifierBase
from decentral.compressors.chunks import Region, as_matrix, bands, cut, largest_of_rows, paste, regions
from decentral.errors import ConfigError

__all__ = ["DCT", "basis", "from_spectrum", "halvings", "to_spectrum"]


# Shape suffixes: C = chunks of a region, L = values per chunk, H * W = L, k = coefficients kept per chunk.

_LONGEST_CHUNK = 4096  # tiles of 64x64: the largest that are transformed exactly
_AT_ONCE, _ELSEWHERE = 64, 4096  # chunks: 2 MiB of float64; a device is told of each operation on its own


@dataclass(frozen=True, slots=True)
class DCT(SparsifierBase):
    """Keep ``k`` of every ``chunk`` cosine coefficients."""

    name: ClassVar[str] = "dct"
    about: ClassVar[About] = About(
        layout="indices, coded gaps (N*k/chunk), coefficients float32 (N*k/chunk)",
        biased=True,
        source='Peng et al., "DeMo", 2024, arXiv:2411.19870',
        bound="|error| <= |tensor| + sqrt(N) * 2**-149",
    )
    k: int = 64
    chunk: int = 4096

    def __post_init__(self) -> None:
        if not (1 <= self.chunk <= _LONGEST_CHUNK and math.isqrt(self.chunk) ** 2 == self.chunk):
            raise ConfigError(f"{self}: chunk is the area of a square tile of at most 64x64; use 4096, 1024 or 256")
        if not 1 <= self.k <= self.chunk:
            raise ConfigError(f"{self}: k coefficients of a chunk are kept; want 1 <= k <= {self.chunk}")

    def index_layout(self, shape: Shape) -> tuple[PartSpec, ...]:
        """Return indices (C, k) of every region."""
        return tuple(
            PartSpec("index", torch.int16, (region.num_chunks, self._num_kept(region)), Rising(region.length))
            for region in self._regions(shape)
        )

    def value_shapes(self, shape: Shape) -> tuple[Shape, ...]:
        """Return (C, k) of every region."""
        return tuple((region.num_chunks, self._num_kept(region)) for region in self._regions(shape))

    def select_one(self, tensor: Tensor) -> Selected:
        """Return rising indices and kept coefficients, (C, k) of every region."""
        matrix, both = as_matrix(check_input(tensor)), tensor.dim() == 2
        found = [self._largest(matrix, region, both) for region in self._regions(tuple(tensor.shape))]
        return tuple(index_Ck for index_Ck, _ in found), tuple(coef_Ck for _, coef_Ck in found)

    def place_one(self, shape: Shape, index: tuple[Tensor, ...], values: tuple[Tensor, ...]) -> Decoded:
        """Return the tiles of these coefficients; PayloadError unless indices rise inside their chunks."""
        for region, index_Ck in zip(self._regions(shape), index, strict=True):
            require_rising(index_Ck, region.length, self)
        return _Coefficients(self, shape, index, values)

    def add_tiles(self, total: Tensor, index: tuple[Tensor, ...], values: tuple[Tensor, ...], weight: float) -> None:
        """Do ``total += weight * tiles`` of these coefficients, in place; ``total`` is contiguous."""
        matrix, both = as_matrix(total), total.dim() == 2
        for region, index_Ck, coef_Ck in zip(self._regions(tuple(total.shape)), index, values, strict=True):
            for band, own in _bands(region, matrix):
                coef_CL = torch.zeros(band.num_chunks, band.length, device=total.device, dtype=torch.float32)
                coef_CL.scatter_(1, index_Ck[own].long(), coef_Ck.view(index_Ck.shape)[own])
                tile_CL = self._transform(from_spectrum, coef_CL, band, both)
                paste(matrix, band, cut(matrix, band) + tile_CL * weight)

    def _largest(self, matrix: Tensor, region: Region, both: bool) -> tuple[Tensor, Tensor]:
        shape = (region.num_chunks, self._num_kept(region))
        index_Ck = torch.empty(shape, dtype=torch.int16, device=matrix.device)
        coef_Ck = torch.empty(shape, dtype=torch.float32, device=matrix.device)
        for band, own in _bands(region, matrix):
            coef_CL = self._transform(to_spectrum, cut(matrix, band), band, both)
            index_Ck[own], coef_Ck[own] = largest_of_rows(coef_CL, shape[1])
        return index_Ck, coef_Ck

    def _num_kept(self, region: Region) -> int:
        return max(1, round(region.length * self.k / self.chunk))

    def _regions(self, shape: Shape) -> tuple[Region, ...]:
        """Return tiles of a matrix; else chunks of whole runs, one shorter chunk of whole runs, and one short run."""
        if len(shape) == 2:
            return regions(shape, self.chunk)
        side, numel = math.isqrt(self.chunk), math.prod(shape)
        whole = numel // self.chunk * self.chunk
        runs = (numel - whole) // side * side
        spans = (
            (0, whole, self.chunk),
            (whole, runs, runs),
            (whole + runs, numel - whole - runs, numel - whole - runs),
        )
        return tuple(Region(0, start, 1, size // length, 1, length) for start, size, length in spans if size)

    def _transform(self, way: Callable[[Tensor, bool], Tensor], chunk_CL: Tensor, region: Region, both: bool) -> Tensor:
        """Send every chunk through ``way`` as a tile, or as rows of runs."""
        width = region.width if both else min(math.isqrt(self.chunk), region.length)
        return way(chunk_CL.view(region.num_chunks, -1, width), both).view(region.num_chunks, region.length)


@dataclass(frozen=True, slots=True)
class _Coefficients(Decoded):
    """Coefficients that are transformed when they are used: every value of a tile moves."""

    method: DCT
    shape: Shape
    index: tuple[Tensor, ...]
    values: tuple[Tensor, ...]

    def tensor(self) -> Tensor:
        total_N = torch.zeros(math.prod(self.shape), dtype=torch.float32, device=self.values[0].device)
        self.add(0, total_N, 1.0)
        return total_N.view(self.shape)

    def add(self, start: int, total_n: Tensor, weight: float) -> None:
        self.method.add_tiles(total_n.view(self.shape), self.index, self.values, weight)


def _bands(region: Region, matrix: Tensor) -> Iterator[tuple[Region, slice]]:
    """Yield the parts of a region, and which of its chunks they have."""
    start = 0
    for band in bands(region, _AT_ONCE if matrix.device.type == "cpu" else _ELSEWHERE):
        yield band, slice(start, start + band.num_chunks)
        start += band.num_chunks


# ---- exact cosine transform ----
#
# The orthonormal one (DCT-II) of small tiles, and its inverse, with the same bits on every machine.
#
# A matrix product in floating point depends on the order of its sums, and so on the BLAS, the processor and the number
# of threads. Here every product is one of whole numbers held in float64: tiles have 22 bits and the basis 24, so that
# no partial sum reaches 2**53 and every order, with fused multiply-add or without, gives the same exact number. Only
# single values are rounded, which IEEE 754 defines. The basis itself is made from integers: no libm is asked.
#
# What comes back is a multiple of 2**-16 of the tile's largest number: off by no more than half of that for rounding,
# so ``tensor - decoded`` is as good as exact, at 5e-9 of the energy of a tile of 64x64.
#
# Source: Ahmed, Natarajan, Rao, "Discrete Cosine Transform", 1974; transform coding of updates from Peng et al.,
# "DeMo", 2024, arXiv:2411.19870.
#
# Shape suffixes: C = tiles, H, W = height and width of one, u = frequency.

_VALUE_BITS = 22
_BASIS_BITS = 24  # 22 + 24 bits, times 8 for a row of 64 (its absolute sum), twice: 2**25 * 2**24 * 8 = 2**52
_GRID_BITS = 16
_LARGEST = torch.finfo(torch.float32).max
_PI = 0x3243F6A8885A308D313198A2E03707344  # times 2**128
_ONE = 1 << 128


def to_spectrum(value_CHW: Tensor, both: bool) -> Tensor:
    """Return float32 coefficients of finite float32 tiles, times ``2 ** -halvings``; ``both``: along columns too."""
    height, width = value_CHW.shape[1:]
    whole_CHW, scale_C11 = _whole(value_CHW.double())
    left = basis(height, value_CHW.device) if both else None
    coef_CHW = _product(left, whole_CHW, basis(width, value_CHW.device).T)
    return _single(coef_CHW * scale_C11 * 0.5 ** halvings(height, width, both))


def from_spectrum(coef_CHW: Tensor, both: bool) -> Tensor:
    """Return float32 tiles of finite float32 coefficients; beyond float32's range, its ends."""
    height, width = coef_CHW.shape[1:]
    whole_CHW, scale_C11 = _whole(coef_CHW.double())
    left = basis(height, coef_CHW.device).T if both else None
    fine_CHW = _product(left, whole_CHW, basis(width, coef_CHW.device))
    coarse = 2.0 ** (_VALUE_BITS - _GRID_BITS)
    return _single((fine_CHW / coarse).round_() * (scale_C11 * coarse * 2.0 ** halvings(height, width, both)))


def halvings(height: int, width: int, both: bool) -> int:
    """Return how often coefficients are halved, so that none is larger than the largest value: 6 for 64x64."""
    return ((height * width if both else width) - 1).bit_length() + 1 >> 1


@functools.lru_cache(maxsize=64)  # 32 KiB each at most; making one of 64 anew took 0.2 ms, and a copy to the device
def basis(length: int, device: torch.device) -> Tensor:
    """Return float64 (u, length): the orthonormal DCT-II, whole numbers of 24 bits. Shared: not to be written to."""
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
    """Return the cosine of an angle in [0, 2 pi), all times 2**128, by Taylor's series."""
    square, term, total, n = angle * angle >> 128, _ONE, 0, 0
    while term:
        total += -term if n % 2 else term
        n += 1
        term = (term * square >> 128) // ((2 * n - 1) * 2 * n)
    return total


def _whole(value_CHW: Tensor) -> tuple[Tensor, Tensor]:
    """Return whole numbers of 22 bits, and the power of two (C, 1, 1) that scales them back."""
    size_C = value_CHW.abs().amax(dim=(1, 2)) if value_CHW.numel() else value_CHW.new_zeros(value_CHW.shape[0])
    exponent_C = ((size_C.view(torch.int64) >> 52) - 1022).clamp(min=-200)  # size < 2**exponent; zeros, too
    down_C11 = _power(_VALUE_BITS - exponent_C)[:, None, None]
    return (value_CHW * down_C11).round_(), _power(exponent_C - _VALUE_BITS)[:, None, None]


def _power(exponent_C: Tensor) -> Tensor:
    """Return float64 ``2 ** exponent``, from its bits."""
    return ((exponent_C + 1023) << 52).view(torch.float64)


def _product(left_HH: Tensor | None, whole_CHW: Tensor, right_WW: Tensor) -> Tensor:
    """Return ``left @ whole @ right`` in units of ``whole``; rounded to whole numbers in between."""
    if left_HH is not None:
        whole_CHW = (left_HH @ whole_CHW).mul_(0.5**_BASIS_BITS).round_()
    return (whole_CHW @ right_WW).mul_(0.5**_BASIS_BITS)


def _single(value_CHW: Tensor) -> Tensor:
    return value_CHW.clamp(-_LARGEST, _LARGEST).float()
