"""Pier: how the outer momentum rises and falls, and what is the same as DiLoCo."""

import pytest
import torch

from decentral.errors import ConfigError
from decentral.optimizers.diloco import DiLoCo
from decentral.optimizers.pier import Pier
from tests.kit.stepping import step


def gaussian(seed: int) -> torch.Tensor:
    return torch.randn(50, generator=torch.Generator().manual_seed(seed)).double()


def test_the_momentum_rises_in_a_line_stays_falls_in_a_line_and_stays():
    outer = Pier(momentum=0.8, rise=4, decay_from=6, decay_over=4, floor=0.4)
    wanted = [0.2, 0.4, 0.6, 0.8, 0.8, 0.8, 0.8, 0.7, 0.6, 0.5, 0.4, 0.4]
    assert [outer.momentum_at(t) for t in range(12)] == pytest.approx(wanted)
    assert outer.momentum_at(10**9) == 0.4


def test_each_round_is_a_nesterov_step_with_the_momentum_of_its_number():
    outer = Pier(lr=0.5, momentum=0.9, rise=3, decay_from=5, decay_over=2, floor=0.1)
    x = wanted = gaussian(0)
    m, state = torch.zeros_like(x), outer.init(x)
    for t in range(10):
        g, mu = gaussian(t + 1), outer.momentum_at(t)
        m = mu * m + g
        wanted = wanted - 0.5 * (g + mu * m)
        x, state = step(outer, x, g, state, number=t)
        torch.testing.assert_close(x, wanted)


def test_without_rise_and_fall_it_is_diloco_bit_for_bit():
    pier, diloco = Pier(lr=0.7, momentum=0.9, rise=0, floor=0.9), DiLoCo(lr=0.7, momentum=0.9)
    x = y = gaussian(0).float()
    one, two = pier.init(x), diloco.init(y)
    for t in range(210):
        x, one = step(pier, x, gaussian(t).float(), one, number=t)
        y, two = step(diloco, y, gaussian(t).float(), two, number=t)
    assert torch.equal(x, y)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"floor": 0.95}, r"floor must be in \[0, momentum\]"),
        ({"floor": -0.1}, r"floor must be in \[0, momentum\]"),
        ({"rise": -1}, "rise and decay_over must be at least 0"),
        ({"rise": 200}, "decay_from no less than rise"),
        ({"momentum": 1.0}, "momentum must be in"),
    ],
)
def test_a_curve_that_cannot_be_is_refused(keys, message):
    with pytest.raises(ConfigError, match=message):
        Pier(**keys)
