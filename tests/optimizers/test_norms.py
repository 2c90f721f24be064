from __future__ import annotations

import math
import threading

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from decentral.errors import PayloadError
from decentral.optimizers import mean_pseudo_gradient
from decentral.optimizers.aggregation.base import clip_scales, norm, typical_norm
from decentral.replica.measures import Measure
from decentral.tensors.ops import float32


def randn(numel: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def spelled_out(value: torch.Tensor) -> float:
    """The order of additions, one by one: 1024 lanes, then halves."""
    lanes = [0.0] * 1024
    for place, one in enumerate(value.tolist()):
        lanes[place % 1024] += one * one
    while len(lanes) > 1:
        half = len(lanes) // 2
        lanes = [a + b for a, b in zip(lanes[:half], lanes[half:], strict=True)]
    return math.sqrt(lanes[0])


@pytest.mark.parametrize("numel", [1, 7, 1023, 1024, 1025, 5000])
def test_a_norm_has_the_bits_of_its_additions_in_the_order_of_the_values(numel):
    value = randn(numel) * 1e3
    assert norm(value) == spelled_out(value)
    assert norm(value) == pytest.approx(float(value.double().norm()), rel=1e-12)


def test_a_norm_is_the_same_with_any_number_of_threads():
    value, found = randn(3_000_000), []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 4):
            torch.set_num_threads(threads)
            found.append(norm(value))
    finally:
        torch.set_num_threads(before)
    others = [threading.Thread(target=lambda: found.append(norm(value))) for _ in range(3)]
    for thread in others:
        thread.start()
    for thread in others:
        thread.join()
    assert len(set(found)) == 1
    assert len(found) == 6


def test_the_norm_of_nothing_is_zero_and_of_the_largest_floats_finite():
    assert norm(torch.zeros(0)) == 0.0
    assert norm(torch.full((100_000,), 3e38)) == pytest.approx(3e38 * math.sqrt(100_000))


def test_two_contributors_are_never_clipped_and_three_by_the_one_in_the_middle():
    assert clip_scales([1.0, 1e6]) == [1.0, 1.0]
    assert clip_scales([1.0, 1e6, 2.0]) == [1.0, float32(2e-6), 1.0]
    assert clip_scales([4.0, 1.0, 2.0, 3.0]) == [0.5, 1.0, 1.0, float32(2 / 3)]
    assert typical_norm([4.0, 1.0, 2.0, 3.0]) == 2.0


def test_where_most_send_nothing_the_others_are_not_shortened_to_nothing():
    assert clip_scales([0.0, 0.0, 5.0]) == [1.0, 1.0, 1.0]


def test_a_peer_at_a_million_times_the_length_moves_the_mean_no_further_than_the_typical_one():
    sent = [randn(5000, seed) for seed in range(3)] + [1e6 * randn(5000, 3)]
    named = [(bytes([n]) * 32, one, 1.0) for n, one in enumerate(sent)]
    scales = clip_scales([norm(one) for one in sent])
    clipped, honest = mean_pseudo_gradient(named, scales), mean_pseudo_gradient(named[:3])
    assert norm(clipped - honest * 3 / 4) <= max(norm(one) for one in sent[:3]) / 4 * 1.0001
    assert norm(mean_pseudo_gradient(named)) > 1e5 * norm(honest)


def test_a_clipped_contribution_counts_in_full_in_the_divisor():
    named = [(bytes([n]) * 32, torch.full((4,), value), 1.0) for n, value in enumerate((1.0, 1.0, 4.0))]
    mean = mean_pseudo_gradient(named, clip_scales([norm(one) for _, one, _ in named]))
    assert torch.equal(mean, torch.ones(4))


def test_scales_of_one_change_no_bit():
    named = [(bytes([n]) * 32, randn(999, n), weight) for n, weight in enumerate((1.0, 3.0, 0.5))]
    assert torch.equal(mean_pseudo_gradient(named, [1.0] * 3), mean_pseudo_gradient(named))


def test_a_scale_is_rounded_once_to_float32():
    assert all(np.float32(scale) == scale for scale in clip_scales([1.0, 3.0, 7.0, 1.1]))


@given(st.lists(st.integers(0, 3000), max_size=6), st.integers(0, 2**32))
def test_a_contribution_that_comes_tensor_by_tensor_measures_the_same_bits(sizes, seed):
    value = torch.randn(sum(sizes), generator=torch.Generator().manual_seed(seed))
    whole, apart = Measure.of((value,), len(value)), Measure.of(value.split(sizes), len(value))
    assert whole.norm == apart.norm == spelled_out(value)
    assert torch.equal(whole.sketch_S, apart.sketch_S)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 1023, 1024, 4999])
def test_one_value_that_is_not_finite_is_found_where_a_contribution_is_measured(bad, place):
    value = torch.full((5000,), 3e38)
    assert math.isfinite(Measure.of((value,), 5000).norm)
    value[place] = bad
    with pytest.raises(PayloadError, match="NaN or Inf"):
        Measure.of((value,), 5000)
