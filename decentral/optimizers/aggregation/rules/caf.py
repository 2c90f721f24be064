"""A filter by covariance: whoever stands out along the direction of most spread counts less, until 2f are gone.

c_i = 1 ;  while sum c > n - 2f:  m = sum c_i x_i / sum c ;  u = the main direction of sum c_i (x_i-m)(x_i-m)^T
  keep the m with the least spread along u ;  t_i = <x_i - m, u>^2 ;  c_i <- c_i (1 - t_i / max t)
g = that m

No bound on honest spread must be known. Needs n >= 2f + 1. Every lap takes one contribution to zero at least, so there
are n laps at most. The run's weights multiply c, and heads are counted.

What differs from the library that its authors wrote. The largest t is of those who still count: theirs may be of one
that is gone, and then a second, nearer attacker loses a millionth in a lap, and the loop does not end. They make one
power iteration from a random vector; here it starts at the contribution that is furthest from m, and makes 100.

Source: Allouah, Guerraoui, Stephan, "Towards Trustworthy Federated Learning with Untrusted Participants", 2025,
arXiv:2505.01874.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from decentral.optimizers.aggregation.rule import Aggregation, check_f
from decentral.optimizers.aggregation.sent import Floats, Sent, total
from decentral.optimizers.base import key

__all__ = ["CAF"]

ITERATIONS = 100
ENOUGH = 1e-12  # change of the spread in one iteration, of itself, after which no more are made


@dataclass(frozen=True, slots=True)
class CAF(Aggregation):
    """The mean at which what is left is least spread."""

    name: ClassVar[str] = "caf"
    equation: ClassVar[str] = "c_i <- c_i (1 - t_i / max t), t_i along the main direction, until sum c <= n - 2f"
    source: ClassVar[str] = 'Allouah, Guerraoui, Stephan, "Untrusted Participants", 2025, arXiv:2505.01874'
    f: int = key(1, "contributors that may send anything")

    def __post_init__(self) -> None:
        check_f(self, self.f)

    @property
    def least(self) -> int:
        """So that some are left."""
        return 2 * self.f + 1

    def scales(self, sent: Sent) -> list[float]:
        """By the shares of each in the best mean."""
        count_K, best, least = np.ones(len(sent)), sent.mean_shares(), math.inf
        while total(count_K) > len(sent) - 2 * self.f:
            share_K = count_K * sent.weight_K / total(count_K * sent.weight_K)
            spread, along_K = _main_direction(_centred(sent.products_KK, share_K), share_K)
            if spread < least:
                least, best = spread, share_K
            stands_out_K = np.where(count_K > 0, along_K * along_K, 0.0)
            furthest = float(stands_out_K.max())
            if furthest == 0.0:
                break
            count_K = count_K * np.maximum(1.0 - stands_out_K / furthest, 0.0)
        return sent.scales_of(best)


def _centred(gram_KK: Floats, share_K: Floats) -> Floats:
    """Inner products of x_i - m."""
    product_K = np.array([total(row_K * share_K) for row_K in gram_KK])
    centred_KK: Floats = (gram_KK - product_K[:, None] - product_K[None, :]) + total(share_K * product_K)
    return centred_KK


def _main_direction(gram_KK: Floats, share_K: Floats) -> tuple[float, Floats]:
    """The spread along the direction u of most spread, and <x_i - m, u> (K,), by power iteration on sum p_i z_i z_i^T.

    u = sum a_i z_i is known by its products with all z.
    """
    first = int(np.argmax(np.where(share_K > 0, np.diagonal(gram_KK), -1.0)))
    length = math.sqrt(max(float(gram_KK[first, first]), 0.0))
    if length == 0.0:
        return 0.0, np.zeros(len(share_K))
    along_K, spread = gram_KK[first] / length, 0.0
    for _ in range(ITERATIONS):
        pull_K = share_K * along_K
        next_K = np.array([total(row_K * pull_K) for row_K in gram_KK])
        length = math.sqrt(max(total(pull_K * next_K), 0.0))
        if length == 0.0:
            return 0.0, np.zeros(len(share_K))
        along_K, before, spread = next_K / length, spread, length
        if abs(spread - before) <= ENOUGH * spread:
            break
    return spread, along_K
