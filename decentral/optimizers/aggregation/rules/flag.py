"""The flag aggregator: the mean of the directions, as far as it lies in the subspace that most of them share.

u_i = x_i / l_i, l_i = max(|x_i|, d 2^-20)
in turns Y = the ``rank`` main directions of the a_i u_i, a_i = (1 - |Y^T u_i|^2 + 1e-7)^(-1/4)
g = d Y Y^T sum(w_i u_i) / sum(w_i),  d the lower median of the |x_i|

With inner products alone: if v_k are the main eigenvectors of a_i <u_i, u_j> a_j, then |Y^T u_i|^2 = sum_k l_k v_ki^2 /
a_i^2, and x_i counts d a_i / l_i sum_k v_ki sum_j v_kj w_j / a_j / sum(w).

What differs. The authors' code loses all lengths, and how long the paper's result is could not be found out: here it is
d. The term over pairs is left out, the start is a_i = 1 and not random, and there are 5 turns where the code has 1.
A vector a million times shorter than d has hardly a direction; with |x_i| for l_i it could be scaled beyond float32.
``rank`` unset is half of the contributors, rounded up. Above 128 contributors `rfa` decides.

Source: Almasi et al., "Flag Aggregator: Scalable Distributed Training under Failures and Augmented Losses using Convex
Optimization", 2023, arXiv:2302.05865.
"""

import statistics
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from decentral.errors import ConfigError
from decentral.optimizers.aggregation.eigen import largest_eigenvectors
from decentral.optimizers.aggregation.rule import MOST_PEERS, Aggregation, check_iterations
from decentral.optimizers.aggregation.rules.rfa import RFA
from decentral.optimizers.aggregation.sent import Floats, Sent, total
from decentral.optimizers.base import key

__all__ = ["Flag"]

MOST = 128  # contributors: a sweep over so many turns 3 million pairs of values
_SHORTEST = 2.0**-20  # of the typical length: shorter ones are not lengthened beyond a million times
_INSIDE = 1e-7  # of the sine squared: who lies in the subspace does not count without bound


@dataclass(frozen=True, slots=True)
class Flag(Aggregation):
    """A mean of directions in a shared subspace."""

    name: ClassVar[str] = "flag"
    equation: ClassVar[str] = "g = median|x| Y Y^T mean(x_i / |x_i|), Y the main directions, reweighted"
    source: ClassVar[str] = 'Almasi et al., "Flag Aggregator", 2023, arXiv:2302.05865'
    rank: int | None = key(None, "directions of the subspace; unset: half of the contributors")
    iterations: int = key(5, "times that the subspace is found anew")

    def __post_init__(self) -> None:
        check_iterations(self, self.iterations)
        if self.rank is not None and not (isinstance(self.rank, int) and 1 <= self.rank <= MOST_PEERS):
            raise ConfigError(f"{self}: rank is a number of directions, want a whole one from 1 on, or none")

    def scales(self, sent: Sent) -> list[float]:
        """What each counts in the projected mean; zeros have no direction, and count nothing."""
        if len(sent) > MOST:
            return RFA().scales(sent)
        typical = statistics.median_low(sent.norm_K.tolist())
        length_K = np.maximum(sent.norm_K, typical * _SHORTEST)
        length_K = np.where(length_K > 0, length_K, 1.0)
        cosine_KK, pull_K = sent.products_KK / length_K[:, None] / length_K[None, :], np.ones(len(sent))
        rank = (len(sent) + 1) // 2 if self.rank is None else self.rank
        for _ in range(self.iterations):
            weighed_KK = cosine_KK * pull_K[:, None] * pull_K[None, :]
            vector_RK = largest_eigenvectors(weighed_KK, rank)
            share_K = _projected(vector_RK, sent.mean_shares() / pull_K) * pull_K
            inside_K = _squared(vector_RK, weighed_KK) / (pull_K * pull_K)
            pull_K = 1.0 / np.sqrt(np.sqrt(np.maximum(1.0 - inside_K, 0.0) + _INSIDE))
        return sent.scales_of(share_K * (typical / length_K))


def _projected(vector_RK: Floats, value_K: Floats) -> Floats:
    """sum_k v_k <v_k, value>."""
    found_K = np.zeros(len(value_K), dtype=np.float64)
    for vector_K in vector_RK:
        found_K = found_K + vector_K * total(vector_K * value_K)
    return found_K


def _squared(vector_RK: Floats, weighed_KK: Floats) -> Floats:
    """sum_k l_k v_ki^2, as v_ki times what the matrix makes of v_k."""
    found_K = np.zeros(len(weighed_KK), dtype=np.float64)
    for vector_K in vector_RK:
        found_K = found_K + vector_K * np.array([total(row_K * vector_K) for row_K in weighed_KK])
    return found_K
