"""The geometric median: the point with the least sum of distances, by Weiszfeld's iteration.

v <- sum(b_i x_i) / sum(b_i) ;  b_i = w_i / max(floor * d, |v - x_i|), d the lower median of the |x_i|

Half of the weights must be honest, and no f is asked for. From the mean, a lie of a million times the usual length
shrinks by (n - f) / f in an iteration: 100 are enough where 4 of 9 lie, and none is made once nothing moves any more.

What differs from the paper. It makes 3 iterations with a floor of 1e-6, a length, where here it is a share of the
typical norm, the same for any model and learning rate. A well-known library makes 3 from zero with a floor of 0.1.

Source: Pillutla, Kakade, Harchaoui, "Robust Aggregation for Federated Learning", 2019, arXiv:1912.13445.
"""

import statistics
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from decentral.errors import ConfigError
from decentral.optimizers.aggregation.rule import Aggregation, check_iterations
from decentral.optimizers.aggregation.sent import Sent, total
from decentral.optimizers.aggregation.starts import check_start, start_of
from decentral.optimizers.base import key

__all__ = ["RFA"]


@dataclass(frozen=True, slots=True)
class RFA(Aggregation):
    """The geometric median of the contributions."""

    name: ClassVar[str] = "rfa"
    equation: ClassVar[str] = "v <- sum b_i x_i / sum b_i, b_i = w_i / max(floor d, |v - x_i|)"
    source: ClassVar[str] = 'Pillutla, Kakade, Harchaoui, "Robust Aggregation", 2019, arXiv:1912.13445'
    iterations: int = key(100, "moves of the centre at most")
    floor: float = key(1e-6, "distances below this share of the median norm count as it")
    start: str = key("mean", "where the centre begins: zero, mean")

    def __post_init__(self) -> None:
        if not 0 < self.floor <= 1:
            raise ConfigError(f"{self}: floor is a share of a norm, want it in (0, 1]; 1e-6 is usual")
        check_iterations(self, self.iterations)
        check_start(self, self.start, ("zero", "mean"))

    def scales(self, sent: Sent) -> list[float]:
        """By the shares of each in the centre."""
        share_K = start_of(sent, self.start)
        least = self.floor * (statistics.median_low(sent.norm_K.tolist()) or 1.0)
        for _ in range(self.iterations):
            pull_K = sent.weight_K / np.maximum(sent.distances_from(share_K), least)
            before_K, share_K = share_K, pull_K / total(pull_K)
            if np.array_equal(before_K, share_K):
                break
        return sent.scales_of(share_K)
