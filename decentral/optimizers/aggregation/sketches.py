"""A contribution as 1024 numbers whose angles tell those of the contributions: who does the same work twice?

sketch[(j + turn_r) mod 1024] += sign_r * value[1024 r + j]      turn and sign of row r from a seed

The inner product of two sketches is that of the contributions, give or take 3 % of their norms' product, and exact for
equal ones: near cosine 1 the error is 3 % of the sine squared. A row is turned as one, which keeps the loop at the
speed of memory; without the turn a matrix of rank one would count its rows as one.

Source: Charikar, Chen and Farach-Colton, "Finding Frequent Items in Data Streams", 2002 (CountSketch).
"""
# Shape suffixes: N = elements of a contribution, R = rows of S elements, K = contributions, S = numbers of a sketch,
# V = values that are not zero.

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from decentral.tensors.compiled import compiled
from decentral.tensors.ops import WIDTH, rows_of

__all__ = ["WIDTH", "Sketching", "cosines", "sketch"]  # WIDTH numbers: 4 KiB for each contributor of a round

_SEED = 1  # any: a sketch is compared with others of the same process only


class Sketching:
    """The sketch of values that come row by row; which rows come together changes no bit."""

    def __init__(self, numel: int) -> None:
        """``numel``: how many values will come."""
        random, rows = np.random.default_rng(_SEED), -(-numel // WIDTH)
        self._turn_R = random.integers(0, WIDTH, rows)
        self._sign_R = random.integers(0, 2, rows).astype(np.float32) * 2 - 1
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
        for j in range(WIDTH):  # see norms
            turned_S[j] += sign * value_RS[row, j]


@compiled
def _add_places(place_V, value_V, turn_R, sign_R, made_2S):  # type: ignore[no-untyped-def]
    for i in range(place_V.size):
        row, j = place_V[i] // WIDTH, place_V[i] % WIDTH
        made_2S[turn_R[row] + j] += sign_R[row] * value_V[i]
