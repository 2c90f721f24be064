"""FedOpt: the paper's three variants, its sign and its beginning, and what a huge change does to its squares."""

import math

import numpy as np
import pytest
import torch

from decentral.errors import ConfigError
from decentral.optimizers.fedopt import FedOpt
from decentral.optimizers.steps import root
from tests.kit.stepping import step

VARIANTS = ["adam", "yogi", "adagrad"]
every_variant = pytest.mark.parametrize("variant", VARIANTS)


def papers(variant: str, changes: list[float], lr: float, b1: float, b2: float, tau: float) -> float:
    """Algorithm 2 of the paper over one coordinate that begins at 0; its Delta is minus the change, and it adds."""
    x, m, v = 0.0, 0.0, tau**2
    for change in changes:
        delta = -change
        m = b1 * m + (1 - b1) * delta
        square = delta**2
        if variant == "adagrad":
            v = v + square
        elif variant == "adam":
            v = b2 * v + (1 - b2) * square
        else:
            v = v - (1 - b2) * square * math.copysign(1.0, v - square)
        x = x + lr * m / (math.sqrt(v) + tau)
    return x


@every_variant
def test_a_variant_is_the_papers(variant: str):
    outer = FedOpt(lr=0.1, variant=variant, beta1=0.8, beta2=0.95, tau=1e-2)
    given = torch.randn(30, 7, generator=torch.Generator().manual_seed(0)).double()
    x = torch.zeros(7, dtype=torch.float64)
    state = outer.init(x)
    for change in given:
        x, state = step(outer, x, change, state)
    wanted = [papers(variant, given[:, i].tolist(), 0.1, 0.8, 0.95, 1e-2) for i in range(7)]
    torch.testing.assert_close(x, torch.tensor(wanted, dtype=torch.float64))


@every_variant
def test_squares_begin_at_taus_and_the_first_step_has_no_bias_correction(variant: str):
    outer = FedOpt(lr=1.0, variant=variant, tau=0.5)
    state = outer.init(torch.zeros(3))
    assert torch.equal(state["square"], torch.full((3,), 0.25))
    after, _ = step(outer, torch.zeros(3), torch.full((3,), 1e-6), state)
    torch.testing.assert_close(after, torch.full((3,), -0.1 * 1e-6), rtol=1e-2, atol=0)


@every_variant
def test_changes_far_above_tau_move_every_coordinate_alike(variant: str):
    outer = FedOpt(lr=0.01, variant=variant)
    x = torch.zeros(2, dtype=torch.float64)
    state = outer.init(x)
    for _ in range(50):
        before, (x, state) = x, step(outer, x, torch.tensor([1.0, 1000.0], dtype=torch.float64), state)
    torch.testing.assert_close((before - x)[0], (before - x)[1], rtol=1e-2, atol=0)


@every_variant
def test_the_largest_change_leaves_a_finite_state_and_the_next_round_too(variant: str):
    outer = FedOpt(variant=variant)
    x = torch.zeros(3)
    state = outer.init(x)
    for change in (torch.full((3,), 3e38), torch.full((3,), -3e38), torch.zeros(3), torch.full((3,), 3e38)):
        x, state = step(outer, x, change, state)
        assert all(torch.isfinite(tensor).all() for tensor in (x, *state.values()))
        assert (state["square"] >= 0).all()


def test_yogis_squares_fall_by_steps_and_never_below_nothing():
    outer = FedOpt(variant="yogi", beta2=0.0, tau=1.0)
    x, state = torch.zeros(1), {"mean": torch.zeros(1), "square": torch.ones(1)}
    for change in (0.9, 0.5, 0.1, 3.0, 0.0):
        x, state = step(outer, x, torch.tensor([change]), state)
        assert float(state["square"]) >= 0


def test_a_root_is_rounded_right_to_the_last_bit():
    """numpy's float32 root is the processor's own instruction, which IEEE 754 defines."""
    squares = np.abs(np.random.default_rng(0).standard_normal(100_000)).astype(np.float32)
    squares *= np.logspace(-37, 37, squares.size, dtype=np.float64).astype(np.float32)
    assert torch.equal(root(torch.from_numpy(squares)), torch.from_numpy(np.sqrt(squares)))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"variant": "sgd"}, "variant must be one of adam, yogi, adagrad"),
        ({"beta1": 1.0}, r"beta1 must be in \[0, 1\)"),
        ({"beta2": 1.5}, r"beta2 in \[0, 1\]"),
        ({"tau": 0.0}, "tau must be in"),
        ({"tau": float("nan")}, "tau must be in"),
        ({"lr": 0.0}, "lr must be above 0"),
    ],
)
def test_what_cannot_be_is_refused(keys, message):
    with pytest.raises(ConfigError, match=message):
        FedOpt(**keys)
