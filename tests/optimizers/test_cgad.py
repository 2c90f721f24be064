"""CGAD: Adam on changes that shrink with their age, checked against torch's Adam."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from decentral.errors import ConfigError
from decentral.optimizers.cgad import CGAD
from decentral.optimizers.steps import cos, power
from tests.kit.stepping import step, step_of


def gaussian(seed: int) -> Tensor:
    return torch.randn(101, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def share(method: CGAD, age: int) -> float:
    return (1 + math.cos(math.pi * min(age / method.cutoff, 1))) / 2 * math.exp(-method.decay * age)


def adam(changes: list[Tensor], method: CGAD) -> Tensor:
    """Where torch's optimizer goes from zero with these as gradients."""
    parameter = torch.zeros(101, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([parameter], method.lr, (method.beta1, method.beta2), method.eps)
    for change in changes:
        parameter.grad = change.clone()
        optimizer.step()
    return parameter.detach()


def steps(method: CGAD, changes: list[Tensor], age: int = 0) -> tuple[Tensor, dict[str, Tensor]]:
    anchor = torch.zeros(101, dtype=torch.float64)
    state = method.init(anchor)
    for number, change in enumerate(changes):
        anchor, state = step_of(method, anchor, [change], state, number, ages=[age])
    return anchor, state


@pytest.mark.parametrize("hyper", [{}, {"beta1": 0.5, "beta2": 0.999, "eps": 1e-3, "lr": 0.7}, {"beta1": 0.0}])
def test_with_no_age_it_is_adam(hyper: dict[str, float]):
    method, changes = CGAD(**hyper), [gaussian(seed) for seed in range(12)]  # type: ignore[arg-type]
    anchor = torch.zeros(101, dtype=torch.float64)
    state = method.init(anchor)
    for number, change in enumerate(changes):
        anchor, state = step(method, anchor, change, state, peers=3, number=number)
    torch.testing.assert_close(anchor, adam(changes, method), rtol=1e-10, atol=1e-12)


def test_on_a_quadratic_its_first_step_moves_each_value_by_the_rate_and_it_ends_within_one_of_the_optimum():
    method, anchor = CGAD(lr=0.01), gaussian(0)
    state = method.init(anchor)
    first, _ = step(method, anchor, anchor, state)
    torch.testing.assert_close(anchor - first, 0.01 * anchor.sign(), rtol=1e-6, atol=1e-8)
    for number in range(2000):
        anchor, state = step(method, anchor, anchor, state, number=number)
    assert float(anchor.abs().max()) < method.lr


@pytest.mark.parametrize("age", [1, 3, 7])
def test_an_old_change_enters_both_moments_scaled_by_gate_and_decay(age: int):
    """Also alone: in a mean whose divisor has the shares it would count in full."""
    method, changes = CGAD(eps=0.1), [gaussian(seed) for seed in range(4)]
    wanted = adam([change * share(method, age) for change in changes], method)
    moved, state = steps(method, changes, age)
    torch.testing.assert_close(moved, wanted, rtol=1e-6, atol=1e-8)
    assert int(state["steps"]) == 4


def test_the_mean_is_over_how_many_came():
    method, changes, ages = CGAD(eps=0.1), [gaussian(1), gaussian(2)], [0, 4]
    wanted = adam([(changes[0] + changes[1] * share(method, 4)) / 2], method)
    anchor = torch.zeros(101, dtype=torch.float64)
    after, _ = step_of(method, anchor, changes, method.init(anchor), ages=ages)
    torch.testing.assert_close(after, wanted, rtol=1e-6, atol=1e-8)


def test_what_is_at_the_cutoff_is_in_neither_sum_and_alone_moves_nothing():
    method, anchor = CGAD(eps=0.1, cutoff=3), torch.zeros(101, dtype=torch.float64)
    state = method.init(anchor)
    both, _ = step_of(method, anchor, [gaussian(1), gaussian(2)], state, ages=[0, 3])
    torch.testing.assert_close(both, adam([gaussian(1)], method), rtol=1e-6, atol=1e-8)
    alone, kept = step_of(method, anchor, [gaussian(1)], state, ages=[3])
    assert torch.equal(alone, anchor)
    assert all(torch.equal(kept[name], state[name]) for name in state)


def test_its_root_is_rounded_right_to_the_last_bit():
    """Peers whose vector libraries round a float32 root differently would hold different anchors."""
    change, method = (
        torch.randn(100_000, generator=torch.Generator().manual_seed(0)),
        CGAD(lr=1.0, beta1=0.0, eps=1e-38),
    )
    moved, state = step(method, torch.zeros_like(change), change, method.init(change))
    squares = state["exp_avg_sq"] / (1.0 - power(method.beta2, 1))
    wanted = -(change / (torch.from_numpy(np.sqrt(squares.numpy())) + method.eps))
    assert torch.equal(moved, wanted)


def test_one_that_nobody_would_count_is_not_accepted_by_a_round():
    assert (CGAD(cutoff=5).quorum.staleness, CGAD(cutoff=1).quorum.staleness) == (4, 0)


def test_a_huge_change_leaves_the_moments_finite():
    method, anchor = CGAD(), torch.zeros(3)
    after, state = step_of(method, anchor, [torch.tensor([1e30, -3e38, 0.0])], method.init(anchor))
    assert all(bool(torch.isfinite(one).all()) for one in (after, *state.values()))


def test_the_cosine_and_the_powers_are_as_near_as_they_say():
    assert max(abs(cos(n * math.pi / 1000) - math.cos(n * math.pi / 1000)) for n in range(1001)) < 1e-12
    assert [power(0.5, n) for n in range(5)] == [1.0, 0.5, 0.25, 0.125, 0.0625]
    assert power(0.0, 0) == 1.0
    assert abs(power(0.999, 100_000) / 0.999**100_000 - 1) < 1e-9


def test_the_bits_of_the_cosine_are_these_on_every_machine():
    assert [cos(angle).hex() for angle in (0.1, 1.0, 1.5, 3.0)] == [
        "0x1.fd712f9a817c1p-1",
        "0x1.14a280fb5068bp-1",
        "0x1.21bd54fc5f9a7p-4",
        "-0x1.fae04be85e5d3p-1",
    ]


@pytest.mark.parametrize(
    ("hyper", "message"),
    [
        ({"lr": 0.0}, "lr must be above 0"),
        ({"beta1": 1.0}, "beta1 and beta2"),
        ({"beta2": -0.1}, "beta1 and beta2"),
        ({"eps": 0.0}, "eps must be above 0"),
        ({"decay": -1.0}, "decay at least 0"),
        ({"cutoff": 0}, "cutoff must be at least 1"),
        ({"wait_for": 0}, "wait_for must be at least 1"),
    ],
)
def test_numbers_that_cannot_be_meant_are_refused(hyper: dict[str, float], message: str):
    with pytest.raises(ConfigError, match=message):
        CGAD(**hyper)  # type: ignore[arg-type]
