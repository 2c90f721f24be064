"""A-EDiT: EDiT's step, and when it is due."""

import pytest
import torch

from decentral.errors import ConfigError
from decentral.optimizers.edit import AEDiT, EDiT
from tests.optimizers.stepping import step_of


def gaussian(seed: int) -> torch.Tensor:
    return torch.randn(50, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("steps", "seconds", "due"),
    [(1, 59.0, False), (1, 60.0, False), (4, 60.0, False), (5, 60.0, True), (5, 59.9, False), (99, 59.0, False),
     (100, 0.0, True), (1000, 0.0, True)],
)  # fmt: skip
def test_it_is_due_after_the_time_or_the_steps_and_never_with_fewer_than_the_least(steps, seconds, due):
    assert AEDiT(seconds=60.0, least=5).is_due(steps, seconds, 100) == due


def test_its_outer_step_is_edits_bit_for_bit():
    one, two = AEDiT(warmup=2), EDiT(warmup=2)
    x = y = gaussian(0)
    first, second = one.init(x), two.init(y)
    for number in range(8):
        changes = [(1 + 50 * (n == 2 and number == 6)) * gaussian(10 * number + n) for n in range(3)]
        x, first = step_of(one, x, changes, first, number)
        y, second = step_of(two, y, changes, second, number)
        assert torch.equal(x, y)
        assert all(torch.equal(first[name], second[name]) for name in second)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"seconds": 0.0}, "seconds of training must be above 0"),
        ({"seconds": float("nan")}, "seconds of training must be above 0"),
        ({"seconds": 1e9}, "a day at most"),
        ({"least": 0}, "least, of the inner steps of a contribution, must be at least 1"),
        ({"warmup": 1}, "warmup at least 2"),
    ],
)
def test_what_cannot_be_is_refused(keys, message):
    with pytest.raises(ConfigError, match=message):
        AEDiT(**keys)
