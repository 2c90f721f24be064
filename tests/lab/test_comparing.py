"""Intervals and verdicts against scipy's, and against numbers made by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from decentral.lab.comparing import Interval, equivalence_p, interval, verdict

DIFFERENCES = [0.011, 0.004, 0.009, -0.002, 0.006]


def test_an_interval_is_that_of_a_paired_t_test() -> None:
    base = np.array([2.0, 2.5, 1.5, 2.2, 2.4])
    theirs = stats.ttest_rel(base + DIFFERENCES, base).confidence_interval(0.9)
    mine = interval(DIFFERENCES)
    assert mine.mean == pytest.approx(np.mean(DIFFERENCES))
    assert (mine.low, mine.high) == pytest.approx((theirs.low, theirs.high))


def test_the_half_width_is_as_tables_have_it() -> None:
    """1, 2, 3: mean 2, standard deviation 1, t of 2 degrees of freedom at 95 % 2.919986."""
    assert interval([1.0, 2.0, 3.0]).high - 2 == pytest.approx(2.919986 / math.sqrt(3), rel=1e-6)


def test_equivalence_is_the_worse_of_two_one_sided_tests() -> None:
    for margin in (0.005, 0.012, 0.05):
        above = stats.ttest_1samp(DIFFERENCES, -margin, alternative="greater").pvalue
        below = stats.ttest_1samp(DIFFERENCES, margin, alternative="less").pvalue
        assert equivalence_p(DIFFERENCES, margin) == pytest.approx(max(above, below))


@pytest.mark.parametrize("margin", [0.004, 0.0096, 0.0105, 0.02])
def test_tied_is_what_equivalence_at_five_per_cent_says(margin: float) -> None:
    assert (verdict(interval(DIFFERENCES), margin) == "tied") == (equivalence_p(DIFFERENCES, margin) < 0.05)


@pytest.mark.parametrize(
    ("low", "high", "word"),
    [
        (-0.03, -0.01, "better"),
        (0.01, 0.03, "worse"),
        (-0.004, 0.003, "tied"),
        (0.001, 0.004, "tied"),  # surely worse, and surely by less than matters
        (-0.03, 0.003, "undecided"),
        (0.001, 0.006, "worse"),
        (-math.inf, math.inf, "undecided"),
    ],
)
def test_a_verdict_is_one_of_four_words(low: float, high: float, word: str) -> None:
    assert verdict(Interval((low + high) / 2 if math.isfinite(low) else 0.0, low, high), 0.005) == word


def test_one_seed_tells_nothing_and_equal_differences_tell_all() -> None:
    assert interval([0.1]) == Interval(0.1, -math.inf, math.inf)
    assert equivalence_p([0.1], 0.5) == 1.0
    assert interval([0.25, 0.25, 0.25]) == Interval(0.25, 0.25, 0.25)
    assert (equivalence_p([0.25, 0.25], 0.5), equivalence_p([0.25, 0.25], 0.25)) == (0.0, 1.0)
