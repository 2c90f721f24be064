"""FedOpt: the paper's three variants, its sign and its beginning, and what a huge change does to its squares."""

import numpy as np
import pytest
import torch

from decentral.optimizers.fedopt import FedOpt
from decentral.optimizers.steps import root
from tests.kit.stepping import step

VARIANTS = ["adam", "yogi", "adagrad"]
every_variant = pytest.mark.parametrize("variant", VARIANTS)


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
