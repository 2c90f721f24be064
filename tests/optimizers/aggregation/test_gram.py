"""Inner products: one order of additions, whether contributions are sparse, dense or one of each."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from decentral.optimizers.aggregation.base import norm
from decentral.optimizers.aggregation.gram import Dense, Sparse, cosines, gram, inner, sketch
from decentral.tensors.ops import WIDTH


def randn(numel: int, seed: int) -> np.ndarray:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)).numpy()


def sparse(value_N: np.ndarray) -> Sparse:
    (place_S,) = np.nonzero(value_N)
    return Sparse(place_S.astype(np.int64), value_N[place_S])


def spelled_out(one_N: np.ndarray, other_N: np.ndarray) -> float:
    """Addition by addition: 1024 lanes, then halves."""
    lanes = [0.0] * 1024
    for place, (one, other) in enumerate(zip(one_N.tolist(), other_N.tolist(), strict=True)):
        lanes[place % 1024] += one * other
    while len(lanes) > 1:
        half = len(lanes) // 2
        lanes = [a + b for a, b in zip(lanes[:half], lanes[half:], strict=True)]
    return lanes[0]


@pytest.mark.parametrize("numel", [0, 1, 7, 1023, 1024, 1025, 5000])
def test_sparse_and_dense_have_the_bits_of_the_additions_in_the_order_of_places(numel: int):
    one_N, other_N = randn(numel, 1) * 1e3, randn(numel, 2)
    one_N[::3], other_N[::5] = 0.0, 0.0
    wanted = spelled_out(one_N, other_N)
    for one in (Dense(one_N), sparse(one_N)):
        for other in (Dense(other_N), sparse(other_N)):
            assert inner(one, other) == inner(other, one) == wanted


def test_an_inner_product_with_itself_is_the_square_of_the_norm():
    value_N = randn(3000, 3)
    assert np.sqrt(inner(Dense(value_N), Dense(value_N))) == norm(torch.from_numpy(value_N))


def test_the_largest_floats_have_finite_products():
    value_N = np.full(5000, 3e38, dtype=np.float32)
    assert inner(Dense(value_N), Dense(-value_N)) == pytest.approx(-5000 * 9e76)


def test_tensors_are_added_in_their_order_and_the_matrix_is_symmetric():
    tensors = [[Dense(randn(numel, 10 * k + numel)) for k in range(4)] for numel in (3, 1500, 70)]
    found_KK = gram(tensors, 4)
    assert np.array_equal(found_KK, found_KK.T)
    for i in range(4):
        for j in range(i + 1):
            wanted = 0.0
            for values in tensors:
                wanted += inner(values[i], values[j])
            assert found_KK[i, j] == wanted


def randn_of_sketches(numel: int, seed: int) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("rho", [-1.0, 0.0, 0.5, 0.9, 0.99, 1.0])
def test_the_angle_of_two_sketches_is_that_of_the_contributions(rho):
    one, other = randn_of_sketches(300_001, 0), randn_of_sketches(300_001, 1)
    other = rho * one + math.sqrt(1 - rho * rho) * other
    found = cosines([sketch(one), sketch(other)])[0, 1].item()
    assert found == pytest.approx(rho, abs=0.13 * (1 - rho * rho) + 1e-6)  # four times the standard error


def test_sparse_contributions_are_compared_where_both_have_values():
    one = randn_of_sketches(200_000, 0) * (torch.arange(200_000) % 64 == 0)
    other = one + randn_of_sketches(200_000, 1) * (torch.arange(200_000) % 64 == 1)
    found = cosines([sketch(one), sketch(other)])[0, 1].item()
    assert found == pytest.approx(math.sqrt(0.5), abs=0.13)


def test_a_matrix_whose_rows_are_parallel_does_not_look_like_every_other_one():
    """Rows as wide as the sketch, all along one direction: without the turn their cosine would be 1."""
    direction = randn_of_sketches(WIDTH, 0)
    one, other = (torch.outer(randn_of_sketches(400, seed), direction).flatten() for seed in (1, 2))
    assert abs(cosines([sketch(one), sketch(other)])[0, 1].item()) < 0.3


def test_a_contribution_of_zeros_is_like_nobodys():
    found = cosines([sketch(torch.zeros(5000)), sketch(randn_of_sketches(5000, 0))])
    assert found[0, 1] == 0.0
    assert sketch(torch.zeros(0)).shape == (WIDTH,)
