from __future__ import annotations

import math

import pytest
import torch

from decentral.optimizers.aggregation.gram import WIDTH, cosines, sketch


def randn(numel: int, seed: int) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("rho", [-1.0, 0.0, 0.5, 0.9, 0.99, 1.0])
def test_the_angle_of_two_sketches_is_that_of_the_contributions(rho):
    one, other = randn(300_001, 0), randn(300_001, 1)
    other = rho * one + math.sqrt(1 - rho * rho) * other
    found = cosines([sketch(one), sketch(other)])[0, 1].item()
    assert found == pytest.approx(rho, abs=0.13 * (1 - rho * rho) + 1e-6)  # four times the standard error


def test_sparse_contributions_are_compared_where_both_have_values():
    one = randn(200_000, 0) * (torch.arange(200_000) % 64 == 0)
    other = one + randn(200_000, 1) * (torch.arange(200_000) % 64 == 1)
    found = cosines([sketch(one), sketch(other)])[0, 1].item()
    assert found == pytest.approx(math.sqrt(0.5), abs=0.13)


def test_a_matrix_whose_rows_are_parallel_does_not_look_like_every_other_one():
    """Rows as wide as the sketch, all along one direction: without the turn their cosine would be 1."""
    direction = randn(WIDTH, 0)
    one, other = (torch.outer(randn(400, seed), direction).flatten() for seed in (1, 2))
    assert abs(cosines([sketch(one), sketch(other)])[0, 1].item()) < 0.3


def test_a_contribution_of_zeros_is_like_nobodys():
    found = cosines([sketch(torch.zeros(5000)), sketch(randn(5000, 0))])
    assert found[0, 1] == 0.0
    assert sketch(torch.zeros(0)).shape == (WIDTH,)
