"""SlowMo: torch's heavy ball, and where it is stable."""

import pytest
import torch

from decentral.errors import ConfigError
from decentral.optimizers.local_sgd import LocalSGD
from decentral.optimizers.slowmo import SlowMo
from tests.kit.stepping import step


def gaussian(seed: int) -> torch.Tensor:
    return torch.randn(50, generator=torch.Generator().manual_seed(seed)).double()


def test_it_is_heavy_ball_sgd_of_torch():
    x, outer = gaussian(0), SlowMo(lr=0.9, momentum=0.5)
    parameter = torch.nn.Parameter(x.clone())
    ball, state = torch.optim.SGD([parameter], lr=0.9, momentum=0.5), outer.init(x)
    for seed in range(1, 20):
        parameter.grad = gaussian(seed)
        ball.step()
        x, state = step(outer, x, gaussian(seed), state)
        torch.testing.assert_close(x, parameter.detach())


def test_the_papers_form_with_a_constant_inner_rate_is_this_one():
    """u <- beta*u + (x - mean)/rate ; x <- x - lr*rate*u."""
    rate, outer = 0.003, SlowMo(lr=0.8, momentum=0.6)
    x = wanted = gaussian(0)
    u, state = torch.zeros_like(x), outer.init(x)
    for seed in range(1, 20):
        u = 0.6 * u + gaussian(seed) / rate
        wanted = wanted - 0.8 * rate * u
        x, state = step(outer, x, gaussian(seed), state)
        torch.testing.assert_close(x, wanted)


def test_the_first_step_moves_lr_times_g_and_a_constant_g_ends_at_lr_by_one_minus_beta():
    x, g, outer = gaussian(0), gaussian(1), SlowMo(lr=1.0, momentum=0.6)
    first, state = step(outer, x, g, outer.init(x))
    torch.testing.assert_close(first, x - g)
    for _ in range(100):
        before = first
        first, state = step(outer, first, g, state)
    torch.testing.assert_close(first, before - g / 0.4)


@pytest.mark.parametrize(("share", "converges"), [(0.99, True), (1.01, False)])
def test_it_converges_up_to_twice_one_plus_beta(share: float, converges: bool):
    outer = SlowMo(lr=share * 2 * 1.6, momentum=0.6)
    x = start = torch.ones(1, dtype=torch.float64)
    state = outer.init(x)
    for _ in range(3000):
        x, state = step(outer, x, x, state)
    assert (float(x.abs()) < float(start)) == converges


def test_without_momentum_it_is_local_sgd_bit_for_bit():
    x, g, outer = gaussian(0).float(), gaussian(1).float(), SlowMo(lr=0.7, momentum=0.0)
    assert torch.equal(step(outer, x, g, outer.init(x))[0], step(LocalSGD(lr=0.7), x, g, {})[0])


@pytest.mark.parametrize("momentum", [1.0, -0.1, float("nan")])
def test_a_momentum_outside_its_range_is_refused(momentum: float):
    with pytest.raises(ConfigError, match=r"momentum must be in \[0, 1\)"):
        SlowMo(momentum=momentum)
