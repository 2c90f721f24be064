"""Local SGD: plain averaging, and what it is the same as."""

import pytest
import torch

from decentral.errors import ConfigError
from decentral.optimizers.diloco import DiLoCo
from decentral.optimizers.local_sgd import LocalSGD
from tests.kit.stepping import step, step_of


def gaussian(seed: int) -> torch.Tensor:
    return torch.randn(50, generator=torch.Generator().manual_seed(seed)).double()


@pytest.mark.parametrize("lr", [1.0, 0.5])
def test_on_a_quadratic_a_round_leaves_one_minus_lr_times_what_it_solves(lr: float):
    share, start = torch.linspace(0, 1, 50, dtype=torch.float64), gaussian(0)
    x = start
    for _ in range(20):
        x, state = step(LocalSGD(lr=lr), x, share * x, {})
        assert state == {}
    torch.testing.assert_close(x, start * (1 - lr * share) ** 20)


def test_the_anchor_is_the_mean_of_what_peers_trained_to():
    anchor, trained = gaussian(0).float(), [gaussian(seed).float() for seed in range(1, 5)]
    after, _ = step_of(LocalSGD(), anchor, [anchor - one for one in trained], {})
    torch.testing.assert_close(after, torch.stack(trained).mean(0))


def test_one_peer_at_a_rate_below_1_is_lookahead():
    slow, fast = gaussian(0), gaussian(1)
    torch.testing.assert_close(step(LocalSGD(lr=0.5), slow, slow - fast, {})[0], slow + 0.5 * (fast - slow))


def test_it_is_diloco_without_momentum_bit_for_bit():
    anchor, change, diloco = gaussian(0).float(), gaussian(1).float(), DiLoCo(lr=0.7, momentum=0.0)
    assert torch.equal(
        step(LocalSGD(lr=0.7), anchor, change, {})[0], step(diloco, anchor, change, diloco.init(anchor))[0]
    )


@pytest.mark.parametrize("lr", [0.0, -1.0, float("inf"), float("nan")])
def test_a_rate_that_is_none_is_refused(lr: float):
    with pytest.raises(ConfigError, match="lr must be above 0 and finite"):
        LocalSGD(lr=lr)
