"""Moments of a model of which not every parameter has one."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from decentral.training.live_model import LiveModel
from decentral.training.live_side import Moments

SIZES = (4, 3)  # values of the two parameters


class Pair(nn.Module):
    """Two vectors, of which the second is trained in some steps only."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.ones(size)) for size in SIZES)

    def backward(self, *, both: bool) -> None:
        loss = self.first.sum() + (self.second.sum() if both else 0.0)
        loss.backward()


def beside(model: Pair, *optimizers: torch.optim.Optimizer) -> Moments:
    return Moments(LiveModel(model, 1, None), optimizers)


def read(moments: Moments, name: str = "exp_avg") -> tuple[Tensor, Tensor]:
    held_N = moments.read_moment(name, 0)
    assert held_N is not None
    first_N, second_N = held_N.split(list(SIZES))
    return first_N, second_N


def test_a_parameter_that_got_no_gradient_yet_has_zeros_and_hides_nobody_elses_moment():
    model = Pair()
    adam = torch.optim.AdamW(model.parameters())
    moments = beside(model, adam)
    assert moments.read_moment("exp_avg", 0) is None
    assert not moments.write_moment("exp_avg", 0, torch.ones(7))
    model.backward(both=False)
    adam.step()
    first_N, second_N = read(moments)
    assert torch.equal(first_N, adam.state[model.first]["exp_avg"])
    assert first_N.any()
    assert torch.equal(second_N, torch.zeros(3))


def test_these_zeros_are_what_adam_keeps_of_gradients_that_are_zero():
    found = []
    for both in (False, True):
        model = Pair()
        adam = torch.optim.AdamW(model.parameters())
        model.backward(both=False)
        if both:
            model.second.grad = torch.zeros_like(model.second)
        adam.step()
        found.append([*read(beside(model, adam)), *read(beside(model, adam), "exp_avg_sq")])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_a_mean_is_written_where_there_is_a_moment_and_makes_none():
    model = Pair()
    adam = torch.optim.AdamW(model.parameters())
    model.backward(both=False)
    adam.step()
    moments = beside(model, adam)
    assert moments.write_moment("exp_avg", 0, torch.full((7,), 0.5))
    assert torch.equal(adam.state[model.first]["exp_avg"], torch.full((4,), 0.5))
    assert not adam.state.get(model.second)
    model.backward(both=True)
    adam.step()  # which makes its state of nothing
    assert all(one.any() for one in read(moments))


def test_a_parameter_whose_optimizer_keeps_no_such_moment_has_zeros():
    model = Pair()
    adam, sgd = torch.optim.AdamW([model.first]), torch.optim.SGD([model.second], momentum=0.9)
    model.backward(both=True)
    adam.step()
    sgd.step()
    moments = beside(model, adam, sgd)
    first_N, second_N = read(moments)
    assert first_N.any()
    assert not second_N.any()
    assert moments.write_moment("exp_avg", 0, torch.ones(7))
    assert set(sgd.state[model.second]) == {"momentum_buffer"}


def test_while_another_optimizer_has_not_made_its_first_step_there_is_nothing_to_share_or_to_adopt():
    model = Pair()
    first, second = torch.optim.AdamW([model.first]), torch.optim.AdamW([model.second])
    model.backward(both=True)
    first.step()
    moments = beside(model, first, second)
    assert moments.read_moment("exp_avg", 0) is None
    assert not moments.write_moment("exp_avg", 0, torch.ones(7))
    second.step()
    assert all(one.any() for one in read(moments))
