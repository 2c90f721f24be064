"""Delayed Nesterov against plain Nesterov, where they must agree, and against its closed form."""

import pytest
import torch
from torch import Tensor

from decentral.errors import ConfigError
from decentral.optimizers.delayed_nesterov import DelayedNesterov
from decentral.optimizers.diloco import DiLoCo
from decentral.optimizers.steps import nesterov
from tests.kit.stepping import step

TIGHT = {"rtol": 1e-12, "atol": 1e-12}


def gaussian(seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(101, generator=torch.Generator().manual_seed(seed)).to(dtype)


def commits(method: DelayedNesterov, changes: list[Tensor], momentum: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    anchor = torch.zeros_like(momentum)
    state = method.init(anchor) | {"momentum": momentum}
    for number, change in enumerate(changes):
        anchor, state = step(method, anchor, change, state, number=number)
    return anchor, state


@pytest.mark.parametrize("delay", [1, 2, 4, 7])
def test_as_many_equal_commits_as_the_delay_move_the_anchor_by_one_nesterov_step(delay: int):
    change, momentum = gaussian(1), gaussian(2)
    moved, state = commits(DelayedNesterov(lr=0.7, momentum=0.9, delay=delay), [change] * delay, momentum)
    wanted, buffer = nesterov(torch.zeros_like(change), change, momentum, 0.7, 0.9)
    torch.testing.assert_close(moved, wanted, **TIGHT)
    torch.testing.assert_close(state["momentum"], buffer, **TIGHT)
    assert not state["waiting"].any()


def test_different_commits_enter_the_momentum_by_their_mean():
    changes, momentum = [gaussian(seed) for seed in range(3)], gaussian(9)
    moved, state = commits(DelayedNesterov(lr=1, momentum=0.5, delay=3), changes, momentum)
    mean = torch.stack(changes).mean(0)
    torch.testing.assert_close(state["momentum"], 0.5 * momentum + mean, **TIGHT)
    torch.testing.assert_close(moved, -(0.5 * state["momentum"] + mean), **TIGHT)


def test_with_a_delay_of_one_it_is_diloco_bit_for_bit():
    delayed, diloco = DelayedNesterov(lr=0.7, momentum=0.9, delay=1), DiLoCo(lr=0.7, momentum=0.9)
    first = second = gaussian(0, torch.float32)
    one, two = delayed.init(first), diloco.init(second)
    for number in range(6):
        change = gaussian(number + 1, torch.float32)
        first, one = step(delayed, first, change, one, number=number)
        second, two = step(diloco, second, change, two, number=number)
        assert torch.equal(first, second)
        assert torch.equal(one["momentum"], two["momentum"])


@pytest.mark.parametrize("spread", [0.0, 0.1, 0.25])
def test_a_spread_gives_the_commits_between_a_share_of_the_momentum(spread: float):
    """The paper's equation, commit by commit: c before the last, 1 - c*N + c in it."""
    n, lr, mu, change, momentum = 4, 0.7, 0.9, gaussian(1), gaussian(2)
    moved, _ = commits(DelayedNesterov(lr=lr, momentum=mu, delay=n, spread=spread), [change] * n, momentum)
    buffer = mu * momentum + change
    between = (n - 1) * (spread * mu * momentum + change / n)
    last = (1 - spread * n + spread) * mu * buffer + change / n
    torch.testing.assert_close(moved, -lr * (between + last), **TIGHT)


def test_sequential_nesterov_on_as_many_commits_would_go_six_times_as_far():
    """The figures of the module's docstring."""
    change = gaussian(1)
    anchor, buffer = torch.zeros_like(change), torch.zeros_like(change)
    for _ in range(4):
        anchor, buffer = nesterov(anchor, change, buffer, 1.0, 0.9)
    delayed, _ = commits(DelayedNesterov(lr=1, momentum=0.9, delay=4), [change] * 4, torch.zeros_like(change))
    torch.testing.assert_close(anchor, -12.1441 * change, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(delayed, -1.9 * change, **TIGHT)


def test_a_round_waits_for_some_and_a_grace_period_and_takes_what_is_late():
    method = DelayedNesterov(wait_for=3, grace=2.5, staleness=4)
    assert (method.quorum.peers, method.quorum.grace, method.quorum.staleness) == (3, 2.5, 4)


@pytest.mark.parametrize(
    ("hyper", "message"),
    [
        ({"delay": 0}, "at least 1"),
        ({"wait_for": 0}, "at least 1"),
        ({"staleness": -1}, "at least 0"),
        ({"spread": 0.51}, r"spread must be in \[0, 1/delay\]"),
        ({"spread": float("nan")}, "spread"),
        ({"grace": -1.0}, "grace must be in"),
        ({"grace": float("nan")}, "grace must be in"),
        ({"momentum": 1.0}, "momentum must be in"),
        ({"lr": 0.0}, "lr must be above 0"),
    ],
)
def test_numbers_that_cannot_be_meant_are_refused(hyper: dict[str, float], message: str):
    with pytest.raises(ConfigError, match=message):
        DelayedNesterov(**hyper)
