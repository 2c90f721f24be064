"""Variance-corrected gossip: what an average of two matrices gets back, and what it leaves alone."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from decentral.optimizers import RoundInfo, make_outer
from decentral.optimizers.aggregation.base import mean_and_variance
from decentral.optimizers.variance_corrected import VarianceCorrected

MATRIX, VECTOR = (40, 24), (37,)
INFO = RoundInfo(shapes=(MATRIX, VECTOR, (4, 3, 2, 2)))
NUMEL = 40 * 24 + 37 + 48


def drawn(seed: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed))


def met(method: VarianceCorrected, sent: Sequence[Tensor], info: RoundInfo = INFO) -> Tensor:
    """Where the first ends without having trained."""
    after, _ = method.outer_step(sent[0], {"change": 0 * sent[0], "proposed": torch.stack(list(sent))}, {}, info)
    return after


def matrix(flat: Tensor) -> Tensor:
    return flat[: 40 * 24].double()


def test_a_matrix_has_the_mean_variance_of_both_and_the_mean_of_their_average():
    """Closed form, with eps 1e-4 above and below, and unbiased variances."""
    sent = [drawn(0, 0.05), drawn(1, 0.03) + 0.01]
    w = (matrix(sent[0]) + matrix(sent[1])) / 2
    factor = math.sqrt(((matrix(sent[0]).var() + matrix(sent[1]).var()) / 2 + 1e-4) / (w.var() + 1e-4))
    wanted = w.mean() + (w - w.mean()) * factor
    after = matrix(met(VarianceCorrected(), sent))
    assert factor > 1.1
    torch.testing.assert_close(after, wanted, rtol=0, atol=1e-7)
    assert float(after.mean()) == pytest.approx(float(w.mean()), abs=1e-8)


def test_far_above_eps_the_variance_is_restored():
    sent = [drawn(0), drawn(1)]
    after = met(VarianceCorrected(), sent)
    wanted = (matrix(sent[0]).var() + matrix(sent[1]).var()) / 2
    assert float(matrix(after).var()) == pytest.approx(float(wanted), rel=1e-3)
    kernel = slice(40 * 24 + 37, None)
    wanted = (sent[0][kernel].var() + sent[1][kernel].var()) / 2
    assert float(after[kernel].var()) == pytest.approx(float(wanted), rel=1e-3)


def test_vectors_stay_at_the_plain_mean():
    sent = [drawn(0), drawn(1)]
    vector = slice(40 * 24, 40 * 24 + 37)
    torch.testing.assert_close(met(VarianceCorrected(), sent)[vector], ((sent[0] + sent[1]) / 2)[vector])


def test_equal_replicas_are_not_touched_to_the_last_bit():
    one = drawn(0)
    assert torch.equal(met(VarianceCorrected(), [one, one]), one)


def test_a_peer_alone_is_not_corrected():
    one = drawn(0)
    assert torch.equal(met(VarianceCorrected(), [one]), one)


def test_without_strength_it_is_ad_psgd_bit_for_bit():
    sent = [drawn(0), drawn(1)]
    assert torch.equal(met(VarianceCorrected(strength=0.0), sent), met(make_outer("ad_psgd", {}), sent))


def test_a_constant_matrix_stays_finite():
    sent = [torch.full((NUMEL,), 0.3), torch.full((NUMEL,), 0.5)]
    torch.testing.assert_close(met(VarianceCorrected(), sent), torch.full((NUMEL,), 0.4))


def test_averages_of_what_is_not_correlated_keep_their_spread_over_many_rounds():
    """Plain averages of sixteen such matrices lose three quarters of it and more."""
    found = {}
    for name in ("ad_psgd", "variance_corrected"):
        swarm, random = [drawn(seed) for seed in range(16)], torch.Generator().manual_seed(0)
        method = make_outer(name, {})
        for _ in range(6):
            order = torch.randperm(16, generator=random).tolist()
            for a, b in zip(order[::2], order[1::2], strict=True):
                pair = swarm[a], swarm[b]
                swarm[a], swarm[b] = met(method, pair), met(method, pair[::-1])
        found[name] = sum(float(matrix(one).std()) for one in swarm) / 16
    assert found["ad_psgd"] < 0.3
    assert found["variance_corrected"] == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize(("numel", "offset"), [(2, 0.0), (1000, 3.0), (5000, -1e3), (100_003, 0.1)])
def test_mean_and_variance_are_those_of_float64(numel: int, offset: float):
    value = torch.randn(numel, generator=torch.Generator().manual_seed(numel)) + offset
    mean, variance = mean_and_variance(value)
    assert mean == pytest.approx(float(value.double().mean()), rel=1e-6, abs=1e-7)
    assert variance == pytest.approx(float(value.double().var()), rel=1e-5)


def test_the_number_of_threads_changes_no_bit_of_mean_and_variance():
    value, threads, found = drawn(0), torch.get_num_threads(), set()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            found.add(mean_and_variance(value))
    finally:
        torch.set_num_threads(threads)
    assert len(found) == 1
