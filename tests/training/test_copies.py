"""What a commit wrote survives the next step, also of an optimizer that keeps copies of the weights."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from decentral.errors import ConfigError
from decentral.training import copies
from decentral.training.inner import InnerSteps, make_hookable
from decentral.training.inner_optimizers import GPA, SPSA, ScheduleFree
from decentral.training.inner_states import Together
from decentral.training.live_model import LiveModel
from tests.kit.tables import long_but

BF16 = torch.bfloat16


def grads(optimizer: Any) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


class Masters(torch.optim.Optimizer):
    """Float32 copies by parameter, stepped by another optimizer and written over the parameters."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})
        self.copies = {p: p.detach().float().clone() for p in grads(self)}
        self.inner = torch.optim.AdamW(list(self.copies.values()), lr)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p, copy in self.copies.items():
            copy.grad = None if p.grad is None else p.grad.float()
        self.inner.step()
        for p, copy in self.copies.items():
            p.copy_(copy)


class Offloaded(torch.optim.Optimizer):
    """Lists of lists, as apex and offloading packages have them, in float64 for once."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})
        self.rows = [[p.detach().double().clone() for p in group["params"]] for group in self.param_groups]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group, row in zip(self.param_groups, self.rows, strict=True):
            for p, copy in zip(group["params"], row, strict=True):
                copy.sub_(p.grad.double(), alpha=group["lr"])
                p.copy_(copy)


class InState(torch.optim.Optimizer):
    """As transformer engine's: master_param in the state, from the first step on."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                master = state.setdefault("master_param", p.detach().float().clone())
                state.setdefault("exp_avg", torch.zeros_like(master)).lerp_(p.grad.float(), 0.1)
                master.sub_(state["exp_avg"], alpha=group["lr"])
                p.copy_(master)


class Lookahead(torch.optim.Optimizer):
    """Slow weights in its own state, which every third step takes the parameters back to, half of the way."""

    every = 3

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})
        self.base, self.made = torch.optim.SGD(self.param_groups, lr), 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in grads(self):
            self.state[p].setdefault("slow_param", p.detach().clone())
        self.base.step()
        self.made += 1
        if self.made % self.every == 0:
            for p in grads(self):
                p.copy_(self.state[p]["slow_param"].lerp_(p, 0.5))


class Wrapping(torch.optim.Optimizer):
    """Slow weights in the state of the optimizer inside, without Optimizer's own beginning, as timm's Lookahead."""

    def __init__(self, params: Any, lr: float) -> None:
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
        self._base_optimizer = torch.optim.SGD(params, lr)
        self.param_groups, self.defaults = self._base_optimizer.param_groups, self._base_optimizer.defaults
        self.state, self.made = defaultdict(dict), 0

    def state_dict(self) -> dict[str, Any]:
        return self._base_optimizer.state_dict()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self._base_optimizer.step()
        self.made += 1
        if self.made % 3 == 0:
            for p in grads(self):
                slow = self._base_optimizer.state[p].setdefault("lookahead_slow_buff", p.detach().clone())
                p.copy_(slow.lerp_(p, 0.5))


class Flat(torch.optim.Optimizer):
    """One flat float32 buffer of all parameters, as DeepSpeed's: nobody can see whose its values are."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})
        self.whole = torch.cat([p.detach().float().flatten() for p in grads(self)])

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.whole.sub_(torch.cat([p.grad.float().flatten() for p in grads(self)]), alpha=self.param_groups[0]["lr"])
        self.write()

    @torch.no_grad()
    def write(self) -> None:
        for p, piece in zip(grads(self), self.whole.split([p.numel() for p in grads(self)]), strict=True):
            p.copy_(piece.view_as(p))


class Reloading(Flat):
    """The same with Megatron's way to tell it."""

    @torch.no_grad()
    def reload_model_params(self) -> None:
        self.whole.copy_(torch.cat([p.detach().float().flatten() for p in grads(self)]))


class Averaged(torch.optim.Optimizer):
    """An average beside the parameters, which it never writes over them."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})
        self.shadow = [p.detach().clone() for p in grads(self)]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p, average in zip(grads(self), self.shadow, strict=True):
            p.sub_(p.grad, alpha=self.param_groups[0]["lr"])
            average.lerp_(p, 0.1)


class Loop:
    """Two layers of one shape, of which the second begins at zero, and a batch of noise at each step."""

    def __init__(self, make: Callable[..., Any], lr: float, dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(5)
        self.model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)).to(dtype)
        nn.init.zeros_(self.model[1].weight)
        self.optimizer, self.made = make(self.model.parameters(), lr=lr), 0
        make_hookable(self.optimizer)
        self.live = LiveModel(self.model, 1, None, Together.of(self.optimizer, "optimizer").parts)
        self.drawn = torch.Generator().manual_seed(1)

    def step(self, scale: float = 1.0) -> None:
        inputs = torch.randn(32, 6, generator=self.drawn).to(next(self.model.parameters()).dtype)
        (scale * (self.model(inputs) - inputs.flip(1)).square().mean()).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def move(self, by: float) -> Tensor:
        """As a commit: every value by so much, half of them down."""
        before = self.live.read(0)
        self.live.write(0, before + by * torch.where(torch.arange(len(before)) % 2 == 0, 1.0, -1.0))
        return self.live.read(0)


SEEN = {
    "float32 copies": (Masters, BF16),
    "float64 rows": (Offloaded, BF16),
    "master_param in the state": (InState, BF16),
    "slow weights in the state": (Lookahead, torch.float32),
    "slow weights of an optimizer around another": (Wrapping, torch.float32),
    "reloads": (Reloading, BF16),
    "an average": (Averaged, torch.float32),
    "Adam": (torch.optim.Adam, torch.float32),
    "Adam in bfloat16": (torch.optim.AdamW, BF16),
}


@pytest.mark.parametrize("after", long_but([0, 1, 2], range(5)))
@pytest.mark.parametrize("kind", SEEN)
def test_what_is_written_is_there_after_steps_that_move_nothing(kind: str, after: int):
    """Whenever the write comes, also between two steps of slow weights."""
    make, dtype = SEEN[kind]
    loop = Loop(make, 0.05, dtype)
    with loop.live.undo_guard.watching():
        loop.move(0.25)  # as the entry into a run writes the anchor, before any step
        for _ in range(3 + after):
            loop.step()
        inside = getattr(loop.optimizer, "inner", loop.optimizer)
        for group in [*loop.optimizer.param_groups, *inside.param_groups]:
            group["lr"] = group["weight_decay"] = 0.0
        lead = 0.3 if kind.startswith("slow") else 0.0  # what slow weights take back of this loop's own steps
        put = loop.move(2.0)
        for _ in range(4):
            loop.step()
    torch.testing.assert_close(loop.live.read(0), put, rtol=0, atol=lead)


def test_a_flat_copy_that_nobody_can_see_is_refused_by_name():
    loop = Loop(Flat, 0.01)

    def train() -> None:
        for _ in range(6):
            for _ in range(4):
                loop.step()
            loop.move(0.5)

    with (
        loop.live.undo_guard.watching(),
        pytest.raises(ConfigError, match=r"Flat puts 0\.weight back.*copy of the weights"),
    ):
        train()


HONEST: dict[str, tuple[Callable[..., Any], float]] = {
    "SGD": (torch.optim.SGD, 0.05),
    "SGD with momentum": (lambda p, lr: torch.optim.SGD(p, lr, momentum=0.95), 0.02),
    "AdamW": (torch.optim.AdamW, 0.01),
    "AdamW with much decay": (lambda p, lr: torch.optim.AdamW(p, lr, weight_decay=5.0), 0.01),
    "Rprop": (torch.optim.Rprop, 0.01),
    "schedule-free": (ScheduleFree, 0.01),
    "GPA": (GPA, 0.01),
    "ASGD": (torch.optim.ASGD, 0.01),
}


@pytest.mark.parametrize("steps", long_but([1, 5], [1, 2, 5]))
@pytest.mark.parametrize("by", long_but([0.02, 3.0], [1e-6, 0.02, 3.0]))
@pytest.mark.parametrize("kind", HONEST)
def test_optimizers_that_step_the_parameters_are_never_taken_for_others(kind: str, by: float, steps: int):
    make, lr = HONEST[kind]
    loop = Loop(make, lr)
    with loop.live.undo_guard.watching():
        for _ in range(25):
            for _ in range(steps):
                loop.step()
            loop.move(by)
            loop.live.averages.resume()


def test_one_that_finds_its_way_back_in_one_step_is_cleared_by_a_step_without_a_gradient():
    """A quadratic of curvature 1 at a rate of 1: every step ends at the optimum, from wherever it begins."""
    model = nn.ParameterList([nn.Parameter(torch.ones(50))])
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    live, optimum = LiveModel(model, 1, None, [optimizer]), torch.linspace(-1, 1, 50)
    with live.undo_guard.watching():
        for number in range(20):
            for _ in range(3):
                noise = 1e-3 * torch.randn(50, generator=torch.Generator().manual_seed(number))
                (0.5 * (model[0] - optimum - noise).square().sum()).backward()
                optimizer.step()
                optimizer.zero_grad()
            live.write(0, live.read(0) + 2.0)
    assert live.undo_guard.over


def test_one_that_makes_its_gradients_inside_the_step_is_not_looked_at():
    loop = Loop(torch.optim.LBFGS, 1.0)
    inputs = torch.randn(64, 6, generator=loop.drawn)

    def closure() -> Tensor:
        loop.optimizer.zero_grad()
        loss = (loop.model(inputs) - inputs.flip(1)).square().mean()
        loss.backward()
        return loss

    with loop.live.undo_guard.watching():
        for _ in range(10):
            loop.optimizer.step(closure)
            loop.move(1.0)
    assert loop.live.undo_guard.over


def test_nothing_is_looked_at_any_more_once_commits_stayed():
    loop = Loop(torch.optim.SGD, 0.01)
    with loop.live.undo_guard.watching():
        assert loop.live.in_place(0) is None
        for _ in range(3):
            for _ in range(3):
                loop.step()
            loop.move(0.5)
        loop.step()
        assert loop.live.undo_guard.over
        assert loop.live.in_place(0) is not None


def test_an_optimizer_by_losses_alone_is_left_alone():
    model = nn.Linear(6, 6)
    optimizer = SPSA(model.named_parameters(), lr=1e-3)
    live = LiveModel(model, 1, None, [optimizer])
    with live.undo_guard.watching():
        for _ in range(3):
            optimizer.step(lambda: model(torch.ones(2, 6)).square().mean())
            live.write(0, live.read(0) + 1.0)
    assert live.undo_guard.over


@pytest.mark.parametrize("several", [False, True])
def test_to_look_for_copies_costs_by_parameters_where_each_has_a_group_or_an_optimizer_of_its_own(
    monkeypatch: pytest.MonkeyPatch, several: bool
) -> None:
    """Rates by layer, and steps in the backward pass: all lists beside all groups took seconds of each step."""
    compared = []
    monkeypatch.setattr(copies, "_fits", lambda row, kept, fits=copies._fits: compared.append(0) or fits(row, kept))
    model = nn.ParameterList([nn.Parameter(torch.ones(3)) for _ in range(100)])
    one_by_one = [{"params": [p]} for p in model]
    optimizers = [torch.optim.SGD([group], 0.1) for group in one_by_one] if several else [torch.optim.SGD(one_by_one)]
    live = LiveModel(model, 1, None, optimizers)
    with live.undo_guard.watching():
        for parameter in model:
            parameter.grad = torch.ones(3)
        for optimizer in optimizers:
            optimizer.step()
    assert len(compared) <= 2 * len(model)


@pytest.mark.parametrize("scheduled", [False, True])
def test_an_optimizer_around_another_is_the_one_that_steps(scheduled: bool):
    """Its hooks are called, though it never made itself an optimizer of torch's, and a scheduler came before."""
    model, called = nn.Linear(2, 2), []
    optimizer = Wrapping(model.parameters(), lr=0.1)
    if scheduled:
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    parts = Together.of(optimizer, "optimizer").parts
    assert parts == (optimizer,)
    make_hookable(optimizer)
    with InnerSteps(parts, lambda: called.append(1)).hook(dict(model.named_parameters())):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    assert called == [1]


class Bare:
    """As opacus' does, it calls no ``__init__`` of Optimizer."""

    def __init__(self, params: Any) -> None:
        self.param_groups = [{"params": list(params)}]

    def step(self, closure: Any = None) -> None:
        pass


def test_an_optimizer_that_never_made_itself_one_is_followed_and_what_is_none_is_told_so():
    class Derived(Bare, torch.optim.Optimizer):
        pass

    model, called = nn.Linear(2, 2), []
    optimizer = Derived(model.parameters())
    make_hookable(optimizer)
    with InnerSteps([optimizer], lambda: called.append(1)).hook(dict(model.named_parameters())):
        optimizer.step()
    assert called == [1]
    with pytest.raises(ConfigError, match=r"the Bare is no torch\.optim\.Optimizer"):
        make_hookable(Bare(model.parameters()))  # type: ignore[arg-type]
