"""FedBuff: what is late counts less in the sum, and as much as the rest in the divisor."""

import math

import pytest
import torch

from decentral.errors import ConfigError
from decentral.optimizers.aggregation.base import aged_share, mean_share
from decentral.optimizers.fedbuff import FedBuff
from tests.kit.stepping import step, step_of

TIGHT = {"rtol": 1e-6, "atol": 1e-7}


def gaussian(seed: int) -> torch.Tensor:
    return torch.randn(101, generator=torch.Generator().manual_seed(seed))


def test_on_a_quadratic_it_contracts_by_one_minus_lr_each_commit():
    """Local training that ends at the optimum sends the whole distance: x_n = (1 - lr)^n x_0, in float64."""
    method, anchor = FedBuff(lr=0.25), gaussian(0).double()
    start, state = anchor.clone(), method.init(anchor)
    for number in range(20):
        anchor, state = step(method, anchor, anchor.clone(), state, peers=3, number=number)
    torch.testing.assert_close(anchor, start * 0.75**20, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("ages", [(0, 0, 0), (3, 0, 0), (3, 8, 15), (1, 2, 3)])
def test_the_divisor_is_the_number_of_contributions_and_not_the_sum_of_their_shares(ages: tuple[int, ...]):
    changes = [gaussian(seed) for seed in range(3)]
    after, _ = step_of(FedBuff(lr=1.0), torch.zeros(101), changes, {}, ages=ages)
    wanted = sum(change / math.sqrt(1 + age) for change, age in zip(changes, ages, strict=True)) / 3
    torch.testing.assert_close(after, -wanted, **TIGHT)


def test_one_that_is_late_makes_a_short_step_also_alone():
    """Weights that were only relative would move the anchor in full."""
    after, _ = step_of(FedBuff(lr=1.0), torch.zeros(101), [gaussian(1)], {}, ages=[3])
    torch.testing.assert_close(after, -gaussian(1) / 2, **TIGHT)


def test_without_a_discount_late_ones_count_in_full():
    after, _ = step_of(FedBuff(lr=1.0, discount=0), torch.zeros(101), [gaussian(1), gaussian(2)], {}, ages=[9, 0])
    torch.testing.assert_close(after, -(gaussian(1) + gaussian(2)) / 2, **TIGHT)


def test_shares_are_powers_of_the_root_and_a_divisor_without_them_is_what_was_given():
    assert [aged_share(3, times) for times in range(4)] == [1.0, 0.5, 0.25, 0.125]
    assert aged_share(0, 5) == 1.0
    assert mean_share([1.0, 0.5], [1.0, 0.5]) == 0.75
    assert mean_share([4.0, 0.5, 0.0], [1.0, 0.25, 0.0]) == 0.75
    assert mean_share([3.0, 7.0], [1.0, 1.0]) == 1.0


def test_a_round_waits_for_the_buffer_and_takes_what_is_late():
    method = FedBuff(wait_for=10, grace=0.0, staleness=4)
    assert (method.quorum.peers, method.quorum.grace, method.quorum.staleness) == (10, 0.0, 4)


@pytest.mark.parametrize(
    ("hyper", "message"),
    [
        ({"lr": 0.0}, "lr must be above 0"),
        ({"discount": -1}, "discount must be in"),
        ({"discount": 9}, "discount must be in"),
        ({"wait_for": 0}, "wait_for must be at least 1"),
        ({"staleness": -1}, "staleness at least 0"),
        ({"grace": float("nan")}, "grace must be in"),
    ],
)
def test_numbers_that_cannot_be_meant_are_refused(hyper: dict[str, float], message: str):
    with pytest.raises(ConfigError, match=message):
        FedBuff(**hyper)  # type: ignore[arg-type]
