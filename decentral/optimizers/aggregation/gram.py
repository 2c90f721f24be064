"""Inner products of contributions, whole, by tensor or from sketches, and what rules and methods make of them.

All but the sketches, which no peer compares with another's, have the same bits on every peer.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from decentral.optimizers.aggregation.base import Aggregation, Floats, Sent, norm
from decentral.optimizers.base import RoundInfo
from decentral.tensors.compiled import compiled
from decentral.tensors.ops import WIDTH, float32, rows_of, sum_of_lanes

__all__ = [
    "Dense",
    "Sketching",
    "Sparse",
    "Values",
    "cosine",
    "cosines",
    "direction",
    "factor",
    "gram",
    "inner",
    "largest_eigenvectors",
    "ranges",
    "scales_through",
    "sketch",
    "weighted_sum",
]

# ---- inner products ----
#
# Products are the same whether contributions are sparse or dense.
#
# <x, y> over one tensor: products of float32 are exact in float64, each is added to the lane of its place modulo 1024
# in the order of places, and the lanes in halves. A product with a zero changes no lane, so looking at the places that
# are in both gives what looking at all gives. Tensors are added in their order.
#
# For K contributors K (K + 1) / 2 products: with 16 peers and 25 million parameters of which 64 in 4096 are sent, 136
# times a merge of 390,000 places each; a dense one reads all 25 million.

# Shape suffixes: N = elements of one tensor, S = those that are not zero, K = contributors.


@dataclass(frozen=True, slots=True, eq=False)
class Dense:
    """Every value of a tensor."""

    value_N: NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class Sparse:
    """The values of a tensor that may differ from zero, by their places, which rise strictly."""

    place_S: NDArray[np.int64]
    value_S: NDArray[np.float32]


Values = Dense | Sparse


def inner(one: Values, other: Values) -> float:
    """The inner product of two contributions to the same tensor."""
    lane_L = np.zeros(WIDTH, dtype=np.float64)
    if isinstance(one, Dense) and isinstance(other, Dense):
        _add_dense(one.value_N, other.value_N, lane_L)
    elif isinstance(one, Sparse) and isinstance(other, Sparse):
        _add_sparse(one.place_S, one.value_S, other.place_S, other.value_S, lane_L)
    elif isinstance(one, Sparse) and isinstance(other, Dense):
        _add_dense_at(one.place_S, one.value_S, other.value_N, lane_L)
    else:
        return inner(other, one)
    return sum_of_lanes(lane_L)


def gram(tensors: Iterable[Sequence[Values]], count: int) -> Floats:
    """The inner products (K, K) of ``count`` contributions, of which each tensor's values come together."""
    found_KK = np.zeros((count, count), dtype=np.float64)
    for values in tensors:
        for i, one in enumerate(values):
            for j in range(i + 1):
                found_KK[i, j] += inner(one, values[j])
    lower_KK: Floats = np.tril(found_KK, -1)
    return np.tril(found_KK) + lower_KK.T


@compiled
def _add_dense(one_N, other_N, lane_L):  # type: ignore[no-untyped-def]
    whole = one_N.size // WIDTH * WIDTH
    for start in range(0, whole, WIDTH):
        for lane in range(WIDTH):
            lane_L[lane] += np.float64(one_N[start + lane]) * np.float64(other_N[start + lane])
    for place in range(whole, one_N.size):
        lane_L[place - whole] += np.float64(one_N[place]) * np.float64(other_N[place])


@compiled
def _add_sparse(place_S, value_S, place_T, value_T, lane_L):  # type: ignore[no-untyped-def]
    s, t = 0, 0
    while s < place_S.size and t < place_T.size:
        if place_S[s] < place_T[t]:
            s += 1
        elif place_S[s] > place_T[t]:
            t += 1
        else:
            lane_L[place_S[s] % WIDTH] += np.float64(value_S[s]) * np.float64(value_T[t])
            s, t = s + 1, t + 1


@compiled
def _add_dense_at(place_S, value_S, value_N, lane_L):  # type: ignore[no-untyped-def]
    for s in range(place_S.size):
        place = place_S[s]
        lane_L[place % WIDTH] += np.float64(value_S[s]) * np.float64(value_N[place])


# ---- rules on mixtures of contributions ----
#
# A rule that decides over mixtures is said as what each contribution counts.

# Shape suffixes: K = contributions, J = mixtures of them.


def scales_through(sent: Sent, share_JK: Floats, weight_J: Floats, rule: Aggregation) -> list[float]:
    """Return the scale of each contribution where ``rule`` decides over mixtures of them."""
    mixed = sent.mix(share_JK, weight_J)
    of_mixture_J = mixed.shares_of(rule.weigh(mixed))
    share_K = of_mixture_J[0] * share_JK[0]
    for j in range(1, len(share_JK)):
        share_K = share_K + of_mixture_J[j] * share_JK[j]
    return sent.scales_of(share_K)


# ---- eigenvectors of a small matrix ----
#
# Those of a library differ from machine to machine. Jacobi, for a symmetric matrix: turn every pair of axes, in one
# order, until what is off the diagonal is rounding. Sums, products, quotients and square roots of float64 only.
#
# Source: Golub, Van Loan, "Matrix Computations", 1996, 8.4.

# Shape suffixes: K = rows, R = the largest eigenvalues.

_SWEEPS = 30  # it takes 6 to 10; a bound
_ROUNDING = 1e-15  # of the largest value


def largest_eigenvectors(matrix_KK: Floats, count: int) -> Floats:
    """The eigenvectors of the ``count`` largest eigenvalues, one a row (R, K); fewer where the others are rounding."""
    diagonal_KK, vector_KK = matrix_KK.copy(), np.eye(len(matrix_KK))
    _turn(diagonal_KK, vector_KK)
    value_K = np.diagonal(diagonal_KK)
    order = np.argsort(-value_K, kind="stable")[:count]
    kept = [place for place in order.tolist() if value_K[place] > 1e-10 * value_K[order[0]]]
    return np.ascontiguousarray(vector_KK[:, kept].T)


@compiled
def _turn(matrix_KK, vector_KK):  # type: ignore[no-untyped-def]
    """Make the matrix diagonal, in place; the columns of ``vector_KK`` follow."""
    size, largest = matrix_KK.shape[0], 0.0
    for i in range(size):
        for j in range(size):
            largest = max(largest, abs(matrix_KK[i, j]))
    for _ in range(_SWEEPS):
        turned = False
        for p in range(size - 1):
            for q in range(p + 1, size):
                off = matrix_KK[p, q]
                if abs(off) <= _ROUNDING * largest:
                    continue
                turned = True
                slope = (matrix_KK[q, q] - matrix_KK[p, p]) / (2.0 * off)
                tangent = 1.0 / (abs(slope) + np.sqrt(slope * slope + 1.0))
                if slope < 0.0:
                    tangent = -tangent
                cosine = 1.0 / np.sqrt(tangent * tangent + 1.0)
                sine = tangent * cosine
                for k in range(size):
                    one, other = matrix_KK[k, p], matrix_KK[k, q]
                    matrix_KK[k, p], matrix_KK[k, q] = cosine * one - sine * other, sine * one + cosine * other
                for k in range(size):
                    one, other = matrix_KK[p, k], matrix_KK[q, k]
                    matrix_KK[p, k], matrix_KK[q, k] = cosine * one - sine * other, sine * one + cosine * other
                for k in range(size):
                    one, other = vector_KK[k, p], vector_KK[k, q]
                    vector_KK[k, p], vector_KK[k, q] = cosine * one - sine * other, sine * one + cosine * other
        if not turned:
            return


# ---- a fragment's tensors one by one ----
#
# For methods that look at the length and the direction of each. All is elementwise float32 with lengths of `norm`.

_SHORTEST = 1e-30  # a length below it counts as none: the inverse of one that is smaller yet is beyond float32
_LARGEST_FACTOR = 1e38  # for a vector of length 1: lengths of float32 vectors may be beyond float32

# Shape suffix: N = elements of one tensor, flat.


def ranges(info: RoundInfo, numel: int) -> Iterator[tuple[str, slice]]:
    """Name and place of each tensor in the flat vector; all of it, without a name, where a round tells no shapes."""
    start = 0
    for n, shape in enumerate(info.shapes or ((numel,),)):
        stop = start + prod(shape)
        yield info.names[n] if n < len(info.names) else "", slice(start, stop)
        start = stop


def direction(value_N: Tensor) -> tuple[Tensor, float]:
    """A vector divided by its length, and the length; zeros where that is next to nothing."""
    length = norm(value_N)
    return value_N * (float32(1.0 / length) if length > _SHORTEST else 0.0), length


def factor(value: float) -> float:
    """Return the factor of a vector of length 1, in float32; a peer that sends values near 1e38 ends no step."""
    return float32(max(-_LARGEST_FACTOR, min(value, _LARGEST_FACTOR)))


def cosine(one_N: Tensor, other_N: Tensor) -> float:
    """Return the cosine of two vectors that are not zero; exactly 0 where one is zero wherever the other is not.

    The same bits on every peer, see `inner`.
    """
    product = inner(Dense(one_N.detach().numpy()), Dense(other_N.detach().numpy()))
    return product / (norm(one_N) * norm(other_N))


def weighted_sum(values: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Products and sums apart, in the order given; weights are rounded to float32."""
    total_N = torch.zeros_like(values[0])
    for value_N, weight in zip(values, weights, strict=True):
        total_N += value_N * float32(weight)
    return total_N


# ---- sketches, to find who does the same work twice ----
#
# A contribution as 1024 numbers whose angles tell those of the contributions:
#
# sketch[(j + turn_r) mod 1024] += sign_r * value[1024 r + j]      turn and sign of row r from a seed
#
# The inner product of two sketches is that of the contributions, give or take 3 % of their norms' product, and exact
# for equal ones: near cosine 1 the error is 3 % of the sine squared. A row is turned as one, which keeps the loop at
# the speed of memory; without the turn a matrix of rank one would count its rows as one.
#
# Source: Charikar, Chen and Farach-Colton, "Finding Frequent Items in Data Streams", 2002 (CountSketch).

# Shape suffixes: N = elements of a contribution, R = rows of S elements, K = contributions, S = numbers of a sketch,
# V = values that are not zero.

_SKETCH_SEED = 1  # any: a sketch is compared with others of the same process only


@functools.lru_cache(maxsize=8)  # frames of a fragment have one size
def _turns_and_signs(rows: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    random = np.random.default_rng(_SKETCH_SEED)
    return random.integers(0, WIDTH, rows), random.integers(0, 2, rows).astype(np.float32) * 2 - 1


class Sketching:
    """The sketch of values that come row by row; which rows come together changes no bit."""

    def __init__(self, numel: int) -> None:
        """``numel``: how many values will come."""
        self._turn_R, self._sign_R = _turns_and_signs(-(-numel // WIDTH))
        self._made_2S = np.zeros(2 * WIDTH, dtype=np.float32)  # what turns beyond the end is added to the beginning
        self._row = 0

    def add(self, value_RS: NDArray[np.float32]) -> None:
        """The next rows."""
        these = slice(self._row, self._row + len(value_RS))
        _add_rows(value_RS, self._turn_R[these], self._sign_R[these], self._made_2S)
        self._row = these.stop

    def add_at(self, place_V: NDArray[np.int64], value_V: NDArray[np.float32]) -> None:
        """Values at places of the whole, all others being zero; not beside ``add``."""
        _add_places(place_V, value_V, self._turn_R, self._sign_R, self._made_2S)

    def sketch(self) -> Tensor:
        """(S,) float32, once all came."""
        with np.errstate(invalid="ignore"):  # of values near 1e38 sums are Inf, and tell no angle
            return torch.from_numpy(self._made_2S[:WIDTH] + self._made_2S[WIDTH:])


def sketch(value_N: Tensor) -> Tensor:
    """(S,) float32 of a flat float32 tensor on the processor."""
    sketching = Sketching(value_N.numel())
    for value_RS in rows_of((value_N,)):
        sketching.add(value_RS)
    return sketching.sketch()


def cosines(sketches: Sequence[Tensor]) -> Tensor:
    """(K, K) cosines between contributions, by their sketches; 0 with one that is all zeros."""
    stacked_KS = torch.stack(list(sketches)).double()
    stacked_KS /= stacked_KS.norm(dim=1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
    return stacked_KS @ stacked_KS.T


@compiled
def _add_rows(value_RS, turn_R, sign_R, made_2S):  # type: ignore[no-untyped-def]
    for row in range(value_RS.shape[0]):
        turned_S, sign = made_2S[turn_R[row] : turn_R[row] + WIDTH], sign_R[row]
        for j in range(WIDTH):  # a constant, as in `norm`'s loop
            turned_S[j] += sign * value_RS[row, j]


@compiled
def _add_places(place_V, value_V, turn_R, sign_R, made_2S):  # type: ignore[no-untyped-def]
    for i in range(place_V.size):
        place = np.uint64(place_V[i])
        row, j = place // np.uint64(WIDTH), place % np.uint64(WIDTH)
        made_2S[np.uint64(turn_R[row]) + j] += sign_R[row] * value_V[i]
