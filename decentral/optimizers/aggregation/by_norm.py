"""The plain mean, and rules that look at how long contributions, or their distances from a centre, are."""

import math
import statistics
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from decentral.errors import ConfigError
from decentral.optimizers.aggregation.base import (
    Aggregation,
    Needs,
    Sent,
    check_f,
    check_iterations,
    check_start,
    start_of,
    total,
    typical_scales,
)
from decentral.optimizers.aggregation.registry import rule_after
from decentral.optimizers.base import key

__all__ = ["ARC", "CenteredClip", "Mean", "NormClip"]

# ---- the plain mean ----
#
# Best where nobody is wrong; one contributor can move it anywhere.


@dataclass(frozen=True, slots=True)
class Mean(Aggregation):
    """Every contribution as it is."""

    name: ClassVar[str] = "mean"
    equation: ClassVar[str] = "g = sum w_i x_i / sum w_i"
    source: ClassVar[str] = 'McMahan et al., "Federated Averaging", 2016, arXiv:1602.05629'

    @property
    def needs(self) -> Needs:
        """Nothing."""
        return "nothing"

    @property
    def least(self) -> int:
        """Any number."""
        return 1

    def scales(self, sent: Sent) -> list[float]:
        """All 1."""
        return [1.0] * len(sent)


# ---- shortened to the typical norm ----
#
# ``outer.norm_clip = "median"`` is the older spelling of this rule.
#
# g = sum(w_i x_i min(1, median |x| / |x_i|)) / sum(w_i)
#
# The median is the lower one, of all contributors, those without a weight included. A wrong direction at the usual
# length is not found: f of n still turn f/n of the result.
#
# Source: Templar's SparseLoCo runs, "Covenant-72B", 2026; Lidin et al., "Incentivizing Permissionless Distributed
# Learning of LLMs", 2025, arXiv:2505.21684. There it is per parameter, here per fragment.


@dataclass(frozen=True, slots=True)
class NormClip(Aggregation):
    """No contribution is longer than the typical one."""

    name: ClassVar[str] = "norm_clip"
    equation: ClassVar[str] = "g = sum w_i x_i min(1, median|x| / |x_i|) / sum w_i"
    source: ClassVar[str] = 'Lidin et al., "Incentivizing Permissionless Distributed Learning", 2025, arXiv:2505.21684'

    @property
    def needs(self) -> Needs:
        """Norms: an owner of a reduce has those of its part."""
        return "norms"

    def weigh(self, sent: Sent) -> list[float]:
        """By the norms of all."""
        return typical_scales(sent)

    def scales(self, sent: Sent) -> list[float]:
        """By the norms of all."""
        return typical_scales(sent)


# ---- adaptive robust clipping ----
#
# The longest contributions are shortened to the longest of the rest, then another rule decides.
#
# k = floor(2 (f/n) (n - f)) ;  C = the (k+1)-th largest norm ;  y_i = x_i min(1, C / |x_i|) ;  g = then(y)
#
# With ``then = "mean"`` only norms are needed, so that it works in a reduce. Needs n >= 2f + 1.
#
# Source: Allouah et al., "The Vital Role of Gradient Clipping in Byzantine-Resilient Distributed Learning", 2024,
# arXiv:2405.14432.


@dataclass(frozen=True, slots=True)
class ARC(Aggregation):
    """Shorten, then ask another rule."""

    name: ClassVar[str] = "arc"
    equation: ClassVar[str] = "y_i = x_i min(1, C / |x_i|), C the (k+1)-th largest norm, k = 2f(n-f)/n ; g = then(y)"
    source: ClassVar[str] = 'Allouah et al., "The Vital Role of Gradient Clipping", 2024, arXiv:2405.14432'
    f: int = key(1, "contributors that may send anything")
    then: str = key("rfa", "the rule for what was shortened: mean, nnm, or rfa(iterations=8)")

    def __post_init__(self) -> None:
        check_f(self, self.f)
        rule_after(self.then, self.f)

    @property
    def needs(self) -> Needs:
        """As the rule that follows, and norms."""
        after = rule_after(self.then, self.f).needs
        return "norms" if after == "nothing" else after

    @property
    def least(self) -> int:
        """So that some norm is honest."""
        return 2 * self.f + 1

    def scales(self, sent: Sent) -> list[float]:
        """Return the part that is left of each, times the scale that the other rule gives it then."""
        longest = np.sort(sent.norm_K)[::-1]
        limit = float(longest[2 * self.f * (len(sent) - self.f) // len(sent)])
        short_K = sent.norm_K <= limit
        left_K = np.where(short_K, 1.0, limit / np.where(short_K, 1.0, sent.norm_K))
        after = rule_after(self.then, self.f).weigh(sent.scale(left_K))
        return [float(left) * scale for left, scale in zip(left_K, after, strict=True)]


# ---- centred clipping ----
#
# A centre that every contribution pulls, none harder than tau.
#
# v <- v + sum(w_i (x_i - v) min(1, tau / |x_i - v|)) / sum(w_i), ``iterations`` times
#
# With a large tau one iteration is the mean, with a small one v stays at its start. Unset, tau is in each iteration
# the lower median of the distances, so that it needs no tuning with the model or the learning rate.
#
# What differs from the paper. It starts from the last round's v and holds it as state; here v starts anew in each
# round, from zero (no change) or from the medoid, the contribution with the least sum of distances to the others; from
# the mean eight moves would not bring it back where a lie is far.
#
# Source: Karimireddy, He, Jaggi, "Learning from History for Byzantine Robust Optimization", 2021, arXiv:2012.10333.


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
