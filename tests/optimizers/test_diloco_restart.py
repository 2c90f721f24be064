"""DiLoCo whose momentum begins again: when, and what it is for."""

import pytest
import torch

from decentral.errors import ConfigError
from decentral.optimizers.diloco import DiLoCo
from tests.kit.stepping import step


def gaussian(seed: int) -> torch.Tensor:
    return torch.randn(50, generator=torch.Generator().manual_seed(seed))


def test_the_momentum_is_forgotten_in_every_rth_round_and_the_anchor_is_not():
    plain, restarting = DiLoCo(lr=0.7), DiLoCo(lr=0.7, restart=3)
    x = y = gaussian(99)
    one, two = plain.init(x), restarting.init(y)
    for number in range(9):
        if number % 3 == 0:
            x, one = y, plain.init(x)
        x, one = step(plain, x, gaussian(number), one, number=number)
        y, two = step(restarting, y, gaussian(number), two, number=number)
        assert torch.equal(x, y)
        assert torch.equal(one["momentum"], two["momentum"])


def left(restart: int, rounds: int, solved: float) -> float:
    """Of the distance to the optimum, the most in the last rounds, where a round solves so much of it."""
    outer, x = DiLoCo(lr=0.7, momentum=0.99, restart=restart), torch.ones(1, dtype=torch.float64)
    state, most = outer.init(x), 0.0
    for number in range(rounds):
        x, state = step(outer, x, solved * x, state, number=number)
        most = max(most, float(x.abs())) if number >= rounds - 40 else 0.0
    return most


@pytest.mark.parametrize("solved", [0.01, 0.02, 0.04])
def test_a_momentum_that_swings_past_the_optimum_comes_to_rest_with_restarts(solved: float):
    assert left(10, 200, solved) < 0.5 * left(0, 200, solved)


def test_a_period_below_nothing_is_refused():
    with pytest.raises(ConfigError, match="restart is outer steps from one to the next"):
        DiLoCo(restart=-1)
