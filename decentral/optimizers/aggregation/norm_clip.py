"""How large contributions are, and the scale that shortens those far above the typical one before the mean.

scale_i = min(1, median(norms) / norm_i)      the mean's divisor stays the sum of the weights

One peer with a wrong learning rate, or a flipped exponent, cannot move the anchor further than a typical peer does; a
direction that is wrong at the usual length is not found. Every peer computes the scales itself and must get the same
bits: squares of float32 are exact in float64, they are added lane by lane in the order of the values, and the lanes in
halves. ``torch.sum`` splits by the number of threads.

Source: median-norm clipping of Templar's SparseLoCo runs, "Covenant-72B", 2026; Lidin et al., "Incentivizing
Permissionless Distributed Learning of LLMs", 2025, arXiv:2505.21684.
"""
# Shape suffixes: N = elements of a contribution, L = lanes, R = rows of so many elements.

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from decentral.tensors.compiled import compiled
from decentral.tensors.ops import WIDTH, float32, rows_of, sum_of_lanes

__all__ = ["ENOUGH", "SquareSum", "clip_scales", "norm", "typical_norm"]

ENOUGH = 3  # contributors: the lower median of two is the smaller one, which would shorten the other in every round


class SquareSum:
    """The squares of values that come row by row; which rows come together changes no bit."""

    def __init__(self) -> None:
        self._lane_L = np.zeros(WIDTH, dtype=np.float64)

    def add(self, value_RL: NDArray[np.float32]) -> None:
        """The next rows."""
        _add_squares(value_RL, self._lane_L)

    def root(self) -> float:
        """The Euclidean norm: finite if, and only if, every value is, for float64 holds all sums of their squares."""
        return math.sqrt(sum_of_lanes(self._lane_L))


def norm(value_N: Tensor) -> float:
    """The Euclidean norm of a flat float32 tensor on the processor: the same bits on every machine."""
    squares = SquareSum()
    for value_RL in rows_of((value_N,)):
        squares.add(value_RL)
    return squares.root()


def typical_norm(norms: Sequence[float]) -> float | None:
    """The lower median: a norm that some contribution has. None when there are too few to say, or it is 0."""
    typical = statistics.median_low(norms) if len(norms) >= ENOUGH else 0.0
    return typical or None


def clip_scales(norms: Sequence[float]) -> list[float]:
    """What each contribution is multiplied by, in (0, 1] and rounded to float32; all 1 where nothing is typical."""
    typical = typical_norm(norms)
    if typical is None:
        return [1.0] * len(norms)
    return [1.0 if one <= typical else float32(typical / one) for one in norms]


@compiled
def _add_squares(value_RL, lane_L):  # type: ignore[no-untyped-def]
    for row in range(value_RL.shape[0]):
        for lane in range(WIDTH):  # a constant: 16 million values take 2 ms, and 14 with a bound that is not known
            value = np.float64(value_RL[row, lane])
            lane_L[lane] += value * value
