"""Lower bounds of an exchange, by cases that can be done in the head, and never above what a plain schedule takes."""

from __future__ import annotations

import random

import pytest

from decentral.benchmarks.exchange import gather_bound, pair_bound, reduce_bound


@pytest.mark.parametrize(
    ("ups", "downs", "gather", "reduce"),
    [
        pytest.param([2.0] * 4, [2.0] * 4, 15.0, 7.5, id="equal links"),
        pytest.param([2.0] * 4, [100.0] * 4, 15.0, 7.5, id="downloads are no limit"),
        pytest.param([100.0] * 4, [2.0] * 4, 15.0, 7.5, id="uploads are no limit"),
        pytest.param([10.0] * 3 + [1.0], [10.0] * 4, 10.0, 10.0, id="a slow one sends its body once"),
        pytest.param([10.0] * 4, [10.0] * 3 + [1.0], 30.0, 10.0, id="a slow one takes three bodies, or one mean"),
    ],
)
def test_bounds_of_a_body_of_ten(ups, downs, gather, reduce):
    assert gather_bound(10.0, ups, downs) == pytest.approx(gather)
    assert reduce_bound(10.0, ups, downs) == pytest.approx(reduce)


def test_a_pair_takes_what_its_slowest_line_needs_for_one_body():
    assert pair_bound(10.0, [10.0] * 3 + [1.0], [10.0] * 4) == pytest.approx(10.0)
    assert pair_bound(10.0, [10.0] * 64, [5.0] * 64) == pytest.approx(2.0)


def test_pushing_every_body_to_everybody_is_never_faster():
    for seed in range(20):
        draw = random.Random(seed)
        ups, downs = ([draw.uniform(1, 10) for _ in range(6)] for _ in range(2))
        plain = max(max(5 / up for up in ups), max(5 / down for down in downs))
        assert gather_bound(1.0, ups, downs) <= plain + 1e-12, seed
