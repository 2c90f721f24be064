"""A matrix as the product of two thin ones: rank r, found by power iteration.

Parts of a matrix (n, m): left float16 (n, r) and right float16 (m, r), none above 1 in magnitude; scales uint8 (1,),
the power of two of the right one plus 120, 0 for a matrix of zeros. At most 16 * r * (n + m) / (n * m) bits per value:
0.125 for rank 4 of 1024x1024. A tensor of more dimensions is the matrix (first, all others). Vectors, and matrices that
would not get half as small in numbers, go dense: values float32 (N,).
left has orthonormal columns (then rounded), right = matrix.T @ left, and what arrives is left @ right.T.

Peers must decode the same bits: float16 numbers up to 1 are multiples of 2**-24, so sixteen products add up exactly in
float64, in any order and fused or not; sixteens are added one after the other, and the sum is rounded to a multiple of
2**-20 of the scale, so that ``tensor - decoded`` is as good as exact. Rounding to float16 costs 3e-4 of the norm.

This is the factorization of PowerSGD and not the rest of it. There the peers' factors are averaged, and the right one
is carried from step to step because each iteration costs an all-reduce. Here a peer sends factors of its own, receivers
average their products, and iterating costs nothing on the wire; so it starts from the same hashed numbers every time
(block power method). There is no state, and an aborted round repeats bit for bit. What is lost of a 1024x1024 matrix
with the singular values i**-0.5, at rank 4: 0.952 of its norm after one iteration, 0.880 after two, 0.857 after four;
the best is 0.850.

Source: Halko, Martinsson, Tropp, "Finding structure with randomness", 2009, arXiv:0909.4061; factors as messages from
Vogels, Karimireddy, Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization", 2019,
arXiv:1905.13727.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from decentral.coding import Floats, Symbols
from decentral.compressors.base import About, Method, PartSpec, Payload, Shape, check_input, check_parts, require
from decentral.compressors.random import hash32
from decentral.errors import ConfigError
from decentral.tensors.ops import is_finite

__all__ = ["LowRank"]

# Shape suffixes: n, m = rows and columns of the matrix, r = rank, N = values.

_LARGEST_RANK = 256
_OFFSET = 120  # of the scale's exponent, -119 to 135: a matrix of 2**14 rows at the end of float32's range fits
_GRID = 2.0**20
_EXACT_RANK = 16  # 16 products of multiples of 2**-24 up to 1: 4 + 48 bits
_SLAB = 1 << 20  # values at a time
_LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True, slots=True)
class LowRank(Method):
    """``rank`` columns and rows for every matrix, after ``iterations`` of the power method."""

    name: ClassVar[str] = "lowrank"
    about: ClassVar[About] = About(
        layout="left and right float16 (r*(n + m)), vectors dense",
        biased=True,
        source='Halko et al., "Finding structure with randomness", 2009, arXiv:0909.4061',
    )
    rank: int = 4
    iterations: int = 4

    def __post_init__(self) -> None:
        if not 1 <= self.rank <= _LARGEST_RANK:
            raise ConfigError(f"{self}: want 1 <= rank <= {_LARGEST_RANK}; 4 is usual")
        if not 1 <= self.iterations <= 100:
            raise ConfigError(f"{self}: want 1 <= iterations <= 100; 4 is usual")

    def layout(self, shape: Shape) -> tuple[PartSpec, ...]:
        """Return left, right and scale of a matrix; else the values."""
        if self._is_dense(shape):
            return (PartSpec("dense", torch.float32, (math.prod(shape),), Floats()),)
        rows, columns = _matrix(shape)
        return (
            PartSpec("left", torch.float16, (rows, self.rank), Floats()),
            PartSpec("right", torch.float16, (columns, self.rank), Floats()),
            PartSpec("scales", torch.uint8, (1,), Symbols(8)),
        )

    def compress_one(self, tensor: Tensor) -> Payload:
        """Project the matrix on the space that iteration found."""
        flat_N, shape = check_input(tensor).flatten(), tuple(tensor.shape)
        if self._is_dense(shape):
            return Payload(shape, (flat_N.clone(),))
        exponent = _exponent(flat_N.abs().amax())
        half = -exponent >> 1  # in two steps: 2**149 is no float32
        matrix_nm = flat_N.view(_matrix(shape)) * _power(half).float() * _power(-exponent - half).float()
        left_nr = self._iterate(matrix_nm).half()
        right_mr = (matrix_nm.T @ left_nr.float()).double()
        top = _exponent(right_mr.abs().amax())
        code = (exponent + top + _OFFSET).clamp(0, 255)
        half_mr = (right_mr * _power(exponent - (code - _OFFSET))).clamp(-1, 1).half()
        return Payload(shape, (left_nr, half_mr * (code > 0), code.to(torch.uint8).reshape(1)))

    def decompress_one(self, payload: Payload) -> Tensor:
        """Return left @ right.T."""
        check_parts(self, payload, self.layout(payload.shape))
        if self._is_dense(payload.shape):
            require(is_finite(payload.parts[0]), self, "every value must be finite")
            return payload.parts[0].clone().reshape(payload.shape)
        left_nr, right_mr, code = payload.parts
        for name, part in (("left", left_nr), ("right", right_mr)):
            require((part.abs() <= 1).all(), self, f"{name} is above 1 or not a number")  # NaN compares false
        scale = _power(code.long() - _OFFSET) * (code > 0) / _GRID
        rows = max(1, _SLAB // right_mr.shape[0])
        slabs = torch.split_with_sizes(left_nr.double(), _sizes(left_nr.shape[0], rows))
        done = [_single(_product(slab_nr, right_mr.double()) * scale) for slab_nr in slabs]
        return torch.cat(done).reshape(payload.shape)

    def _is_dense(self, shape: Shape) -> bool:
        rows, columns = _matrix(shape)
        return len(shape) < 2 or not 0 < 2 * self.rank * (rows + columns) <= rows * columns

    def _iterate(self, matrix_nm: Tensor) -> Tensor:
        """Return orthonormal columns (n, r) near the space of the largest singular values."""
        columns = matrix_nm.shape[1]
        place = torch.arange(columns * self.rank, device=matrix_nm.device, dtype=torch.int64)
        right_mr = (hash32(place + 1).double() / 2**31 - 1).float().view(columns, self.rank)
        left_nr = _orthonormal(matrix_nm @ right_mr)
        for _ in range(self.iterations - 1):
            left_nr = _orthonormal(matrix_nm @ _orthonormal(matrix_nm.T @ left_nr))
        return left_nr


def _matrix(shape: Shape) -> tuple[int, int]:
    return (shape[0], math.prod(shape[1:])) if shape else (1, 1)


def _orthonormal(value_nr: Tensor) -> Tensor:
    """Return an orthonormal basis, made in float64, so that nearly parallel columns do not lose each other."""
    basis_nr: Tensor = torch.linalg.qr(value_nr.double()).Q
    return basis_nr.float().contiguous()


def _exponent(size: Tensor) -> Tensor:
    """Return int64 e with ``size < 2**e``; far below float32's range for zero."""
    return ((size.double().view(torch.int64) >> 52) - 1022).clamp(min=-200)


def _power(exponent: Tensor) -> Tensor:
    """Return float64 ``2 ** exponent``, from its bits."""
    return ((exponent + 1023) << 52).view(torch.float64)


def _product(left_nr: Tensor, right_mr: Tensor) -> Tensor:
    """Return whole numbers: the product in units of the grid."""
    total_nm = torch.zeros(left_nr.shape[0], right_mr.shape[0], dtype=torch.float64, device=left_nr.device)
    for start in range(0, left_nr.shape[1], _EXACT_RANK):
        some = slice(start, start + _EXACT_RANK)
        total_nm = total_nm + left_nr[:, some] @ right_mr[:, some].T
    return (total_nm * _GRID).round_()


def _single(value_nm: Tensor) -> Tensor:
    return value_nm.clamp_(-_LARGEST, _LARGEST).float()


def _sizes(total: int, step: int) -> list[int]:
    return [min(step, total - start) for start in range(0, total, step)]
