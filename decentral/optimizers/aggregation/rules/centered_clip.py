"""A centre that every contribution pulls, none harder than tau.

v <- v + sum(w_i (x_i - v) min(1, tau / |x_i - v|)) / sum(w_i), ``iterations`` times

With a large tau one iteration is the mean, with a small one v stays at its start. Unset, tau is in each iteration the
lower median of the distances, so that it needs no tuning with the model or the learning rate.

What differs from the paper. It starts from the last round's v and holds it as state; here v starts anew in each round,
from zero (no change) or from the medoid, the contribution with the least sum of distances to the others; from the mean
eight moves would not bring it back where a lie is far.

Source: Karimireddy, He, Jaggi, "Learning from History for Byzantine Robust Optimization", 2021, arXiv:2012.10333.
"""

import math
import statistics
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from decentral.errors import ConfigError
from decentral.optimizers.aggregation.rule import Aggregation, check_iterations
from decentral.optimizers.aggregation.sent import Sent, total
from decentral.optimizers.aggregation.starts import check_start, start_of
from decentral.optimizers.base import key

__all__ = ["CenteredClip"]


@dataclass(frozen=True, slots=True)
class CenteredClip(Aggregation):
    """The same pull at most from everybody."""

    name: ClassVar[str] = "centered_clip"
    equation: ClassVar[str] = "v <- v + mean((x_i - v) min(1, tau / |x_i - v|))"
    source: ClassVar[str] = 'Karimireddy, He, Jaggi, "Learning from History", 2021, arXiv:2012.10333'
    tau: float | None = key(None, "the longest pull; unset: the median distance")
    iterations: int = key(8, "moves of the centre")
    start: str = key("medoid", "where the centre begins: zero, medoid")

    def __post_init__(self) -> None:
        if self.tau is not None and not 0 < self.tau < math.inf:
            raise ConfigError(f"{self}: tau is a length, want it above 0 and finite, or unset")
        check_iterations(self, self.iterations)
        check_start(self, self.start, ("zero", "medoid"))

    def scales(self, sent: Sent) -> list[float]:
        """By the shares of each in the centre."""
        share_K, weight_K = start_of(sent, self.start), sent.mean_shares()
        for _ in range(self.iterations):
            distance_K = sent.distances_from(share_K)
            tau = self.tau or statistics.median_low(distance_K.tolist())
            near_K = distance_K <= tau
            pull_K = weight_K * np.where(near_K, 1.0, tau / np.where(near_K, 1.0, distance_K))
            share_K = share_K * (1.0 - total(pull_K)) + pull_K
        return sent.scales_of(share_K)
