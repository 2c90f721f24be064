import json

import pytest
import torch

from decentral.errors import ConfigError
from decentral.tasks.schedule import WarmUp, warm_up


def optimizer(lr=2.0):
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)


def test_the_rate_rises_linearly_and_then_stays():
    inner = optimizer()
    schedule = warm_up(inner, 4)
    rates = []
    for _ in range(7):
        rates.append(inner.param_groups[0]["lr"])
        inner.step()
        schedule.step()
    assert rates == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0, 2.0]


def test_without_warm_up_the_rate_is_constant():
    assert [WarmUp(0)(step) for step in (0, 1, 100)] == [1.0, 1.0, 1.0]


def test_a_schedule_resumes_from_plain_numbers():
    inner = optimizer()
    schedule = warm_up(inner, 10)
    for _ in range(3):
        inner.step()
        schedule.step()
    stored = json.loads(json.dumps(schedule.state_dict()))
    resumed = warm_up(optimizer(), 10)
    resumed.load_state_dict(stored)
    resumed.optimizer.step()
    resumed.step()
    inner.step()
    schedule.step()
    assert resumed.get_last_lr() == schedule.get_last_lr()


def test_a_negative_warm_up_is_refused():
    with pytest.raises(ConfigError, match="warmup = -1"):
        WarmUp(-1)
