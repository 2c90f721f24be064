"""What a round reads and moves of an optimizer that trains at y and learns x: x, with z and y going along."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from decentral.state.checkpoint import flatten, unflatten
from decentral.training.inner import Averages
from decentral.training.inner_optimizers import GPA, ScheduleFree
from decentral.training.live_model import LiveModel

BOTH = pytest.mark.parametrize("make", [GPA, ScheduleFree])


class Trained:
    """A model with an optimizer some steps into it."""

    def __init__(self, make: type, steps: int = 5) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(7, 5)
        self.optimizer = make(self.model.parameters(), lr=0.05, weight_decay=0.1)
        self.live = LiveModel(self.model, 1, None, [self.optimizer])
        for _ in range(steps):
            self.step()

    def step(self) -> None:
        self.model(torch.ones(2, 7)).square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def held(self) -> Tensor:
        return torch.cat([parameter.detach().flatten() for parameter in self.model.parameters()])

    def z(self) -> Tensor:
        return torch.cat([self.optimizer.state[parameter]["z"].flatten() for parameter in self.model.parameters()])

    def x(self) -> Tensor:
        share = self.optimizer.param_groups[0]["mixing"]
        return (self.held().double() - (1 - share) * self.z().double()).div(share).float()


@BOTH
def test_what_is_read_is_the_average_and_training_goes_on_where_it_was(make: type):
    one = Trained(make)
    y, x, z = one.held(), one.x(), one.z()
    read = one.live.read(0)
    torch.testing.assert_close(read, x, rtol=1e-6, atol=1e-6)
    assert float((read - y).norm()) > 1e-3, "else nothing is shown"
    one.live.averages.resume()
    torch.testing.assert_close(one.held(), y, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(one.z(), z, rtol=1e-6, atol=1e-6)
    one.step()


@BOTH
def test_what_a_commit_moves_moves_all_three_sequences_by_as_much(make: type):
    one = Trained(make)
    y, x, z = one.held(), one.x(), one.z()
    move = torch.randn(len(x), generator=torch.Generator().manual_seed(1))
    one.live.write(0, one.live.read(0) + move)
    one.live.averages.resume()
    for before, after in ((y, one.held()), (x, one.x()), (z, one.z())):
        torch.testing.assert_close(after, before + move, rtol=1e-5, atol=1e-5)


@BOTH
def test_after_the_last_commit_the_parameters_are_what_was_written(make: type):
    one = Trained(make)
    anchor = torch.randn(40, generator=torch.Generator().manual_seed(1))
    one.live.write(0, anchor)
    one.live.averages.resume(to_train=False)
    assert torch.equal(one.held(), anchor)
    assert not one.live.averages.shown
    one.optimizer.train()
    one.step()


@BOTH
def test_a_checkpoint_taken_while_the_average_is_shown_goes_on_bit_for_bit(make: type):
    one, other = Trained(make), Trained(make, steps=0)
    kept = one.live.read(0)
    tensors, document = flatten(one.optimizer.state_dict(), "training")
    other.live.write(0, kept)
    other.optimizer.load_state_dict(unflatten(document, tensors))
    for each in (one, other):
        each.live.averages.resume()
        each.step()
    assert torch.equal(one.held(), other.held())
    assert torch.equal(one.z(), other.z())


@BOTH
def test_a_loop_that_evaluates_at_the_average_finds_it_there_after_a_boundary(make: type):
    one = Trained(make)
    one.optimizer.eval()
    x = one.held()
    assert torch.equal(one.live.read(0), x)
    one.live.averages.resume()
    assert torch.equal(one.held(), x)


def test_before_the_first_step_and_with_other_optimizers_nothing_is_swapped():
    one = Trained(GPA, steps=0)
    before = one.held()
    assert torch.equal(one.live.read(0), before)
    one.live.averages.resume()
    assert torch.equal(one.held(), before)
    averages = Averages([torch.optim.AdamW(one.model.parameters())])
    averages.show()
    averages.resume()
    assert torch.equal(one.held(), before)
