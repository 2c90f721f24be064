"""Inner products: one order of additions, whether contributions are sparse, dense or one of each."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from decentral.optimizers.aggregation.base import norm
from decentral.optimizers.aggregation.gram import Dense, Sparse, gram, inner


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
