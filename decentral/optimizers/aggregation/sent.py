"""What a rule may know of the contributions to a round: their norms, weights and inner products. No vector is needed.

A point is a mixture v = sum c_i x_i, said by its shares c. With G_ij = <x_i, x_j>:

<x_i, v> = sum_j c_j G_ij ;  |v|^2 = sum_i c_i <x_i, v> ;  |x_i - v|^2 = G_ii - 2 <x_i, v> + |v|^2

Every peer must get the same bits: elementwise float64, sums by `total` or row by row in the order of peer ids, and no
product of matrices by a library, which adds in an order of the machine's choice.
"""
# Shape suffixes: K = contributors, J = mixtures of them.

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["Floats", "Sent", "total"]

Floats = NDArray[np.float64]


def total(values: Floats) -> float:
    """The sum, rounded once: the same in any order and on any machine."""
    return math.fsum(values.ravel().tolist())


@dataclass(frozen=True, slots=True, eq=False)
class Sent:
    """The contributions that a rule looks at, by peer id."""

    norm_K: Floats
    weight_K: Floats  # above 0 once ``weigh`` has left out who counts nothing
    gram_KK: Floats | None = None  # symmetric; None where only norms are known
    seed: bytes = b""  # of the round: alike on every peer, and not known before all have contributed

    @classmethod
    def of_norms(cls, norms: Sequence[float], weights: Sequence[float], seed: bytes = b"") -> Sent:
        """Of contributions whose inner products nobody asked for."""
        return cls(np.array(norms, dtype=np.float64), np.array(weights, dtype=np.float64), None, seed)

    @classmethod
    def of_gram(cls, gram_KK: Floats, weights: Sequence[float], seed: bytes = b"") -> Sent:
        """Of contributions by their inner products."""
        return cls(_roots(np.diagonal(gram_KK)), np.array(weights, dtype=np.float64), gram_KK, seed)

    def __len__(self) -> int:
        return len(self.norm_K)

    @property
    def products_KK(self) -> Floats:
        """The inner products, of a rule that asked for them."""
        assert self.gram_KK is not None, "the rule's `needs` does not say that it needs inner products"
        return self.gram_KK

    def among(self, places: Sequence[int]) -> Sent:
        """Those at these places alone."""
        chosen = list(places)
        gram_KK = None if self.gram_KK is None else self.gram_KK[np.ix_(chosen, chosen)]
        return Sent(self.norm_K[chosen], self.weight_K[chosen], gram_KK, self.seed)

    def shortened(self, scale_K: Floats) -> Sent:
        """Each contribution times its scale."""
        gram_KK = None if self.gram_KK is None else self.gram_KK * scale_K[:, None] * scale_K[None, :]
        return Sent(self.norm_K * scale_K, self.weight_K, gram_KK, self.seed)

    def mixed(self, share_JK: Floats, weight_J: Floats) -> Sent:
        """Mixtures of the contributions, each with a weight of its own."""
        half_JK = _times(share_JK, self.products_KK)
        gram_JJ = _times(half_JK, np.ascontiguousarray(share_JK.T))
        gram_JJ = np.tril(gram_JJ) + np.tril(gram_JJ, -1).T  # rounding may tell the halves apart
        return Sent(_roots(np.diagonal(gram_JJ)), weight_J, gram_JJ, self.seed)

    def squared_distances_KK(self) -> Floats:
        """|x_i - x_j|^2, symmetric to the last bit and 0 with itself."""
        gram_KK = self.products_KK
        square_K = np.diagonal(gram_KK)
        found_KK = np.maximum((square_K[:, None] + square_K[None, :]) - 2.0 * gram_KK, 0.0)
        np.fill_diagonal(found_KK, 0.0)
        return found_KK

    def distances_from(self, share_K: Floats) -> Floats:
        """|x_i - v| (K,) of a mixture v."""
        product_K = _times(share_K[None], self.products_KK)[0]
        square = total(share_K * product_K)
        return _roots(np.diagonal(self.products_KK) - 2.0 * product_K + square)

    def mean_shares(self, chosen: Sequence[int] | None = None) -> Floats:
        """The weighted mean of some, or all, as a mixture."""
        weight_K = self.weight_K.copy()
        if chosen is not None:
            left_K = np.ones(len(self), dtype=bool)
            left_K[list(chosen)] = False
            weight_K[left_K] = 0.0
        return weight_K / total(weight_K)

    def scales_of(self, share_K: Floats) -> list[float]:
        """What each must be multiplied by so that the weighted mean of all is this mixture."""
        scale_K: Floats = share_K * total(self.weight_K) / self.weight_K
        return scale_K.tolist()  # type: ignore[no-any-return]  # numpy's stubs say object

    def shares_of(self, scales: Sequence[float]) -> Floats:
        """The mixture that the weighted mean is after such scales."""
        return self.weight_K * np.array(scales, dtype=np.float64) / total(self.weight_K)


def _roots(square_K: Floats) -> Floats:
    found_K: Floats = np.sqrt(np.maximum(square_K, 0.0))
    return found_K


def _times(left_JK: Floats, right_KL: Floats) -> Floats:
    """left @ right, its terms added in the order of K."""
    found_JL = np.zeros((left_JK.shape[0], right_KL.shape[1]), dtype=np.float64)
    for k in range(right_KL.shape[0]):
        found_JL += left_JK[:, k, None] * right_KL[k]
    return found_JL
