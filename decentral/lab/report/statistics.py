"""Paired differences, their intervals, and the words for them. Pure: numbers in, numbers out.

A difference is of two methods on one seed, so what a seed does to both is out of it. The interval is Student's, of
90 %: two methods are equivalent at 5 % where it lies within the margin, which is what two one-sided tests (TOST) say.

Source of TOST: Schuirmann, "A comparison of the two one-sided tests procedure and the power approach for assessing the
equivalence of average bioavailability", 1987, doi:10.1007/BF01068419.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

__all__ = ["CONFIDENCE", "Interval", "Verdict", "equivalence_p", "interval", "verdict"]

CONFIDENCE: Final = 0.9

Verdict = Literal["better", "worse", "tied", "undecided"]


@dataclass(frozen=True, slots=True)
class Interval:
    """Of a mean; from minus to plus infinity where one number tells nothing of how they spread."""

    mean: float
    low: float
    high: float

    def inside(self, margin: float) -> bool:
        """Whether all of it is smaller than the margin, either way."""
        return -margin < self.low and self.high < margin


def interval(values: Sequence[float], confidence: float = CONFIDENCE) -> Interval:
    """Student's interval of the mean of at least one value."""
    mean, error = _mean_and_error(values)
    if math.isinf(error):
        return Interval(mean, -math.inf, math.inf)
    from scipy import stats

    half = float(stats.t.ppf((1 + confidence) / 2, len(values) - 1)) * error
    return Interval(mean, mean - half, mean + half)


def equivalence_p(values: Sequence[float], margin: float) -> float:
    """TOST: how likely a mean so near to zero is where the true one is at the margin or beyond."""
    mean, error = _mean_and_error(values)
    if math.isinf(error):
        return 1.0
    if error == 0:
        return 0.0 if abs(mean) < margin else 1.0
    from scipy import stats

    return float(stats.t.sf((margin - abs(mean)) / error, len(values) - 1))


def verdict(of: Interval, margin: float) -> Verdict:
    """Of a difference in loss: below zero is better. What is smaller than the margin for sure is no difference."""
    if of.inside(margin):
        return "tied"
    if of.high < 0:
        return "better"
    return "worse" if of.low > 0 else "undecided"


def _mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """The mean, and its standard error: infinite of one value."""
    count = len(values)
    mean = math.fsum(values) / count
    if count < 2:
        return mean, math.inf
    return mean, math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (count - 1) / count)
