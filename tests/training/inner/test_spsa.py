"""SPSA: two losses a step, exact parameters before and after, and loops that it does not fit."""

from __future__ import annotations

import math
import secrets
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from decentral.errors import ConfigError
from decentral.manifest.terms import Inner
from decentral.optimizers.base import Derivative
from decentral.optimizers.just_one_byte import Direction, byte_of, level_of
from decentral.training.inner import InnerSteps, build_inner
from decentral.training.inner_optimizers import SPSA, step_forward
from decentral.training.live_model import LiveModel
from decentral.training.live_side import Moments

RATE, SEED = 0.01, 11


def linear() -> nn.Linear:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Linear(6, 4)


INPUTS = torch.linspace(-1, 1, 18).view(3, 6)


def loss_of(model: nn.Module) -> Tensor:
    return model(INPUTS.to(next(model.parameters()))).square().mean()  # type: ignore[no-any-return]


def spsa(model: nn.Module, rate: float = RATE) -> SPSA:
    return SPSA(model.named_parameters(), lr=rate, seed=SEED)


def test_a_step_is_the_equation_in_float64():
    model = linear().double()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = spsa(model)
    optimizer.step(lambda: loss_of(model))
    direction = Direction(SEED, 0)
    signs = {name: direction.of(name, p.numel()).view(p.shape).double() for name, p in before.items()}

    def at(shift: float) -> Tensor:
        return torch.func.functional_call(
            model, {name: p + shift * signs[name] for name, p in before.items()}, INPUTS.double()
        )

    def loss(shift: float) -> float:
        return float(at(shift).square().mean())

    along = (loss(1e-3) - loss(-1e-3)) / 2e-3
    byte = byte_of(along)
    assert optimizer.derivatives == (Derivative(SEED, 0, byte),)
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.detach(), before[name] - RATE * level_of(byte) * signs[name], rtol=0, atol=1e-12)


def test_at_a_rate_of_zero_the_parameters_keep_their_bits():
    model = linear()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = spsa(model, rate=0.0)
    for _ in range(5):
        optimizer.step(lambda: loss_of(model))
    assert all(torch.equal(p, kept) for p, kept in zip(model.parameters(), before, strict=True))
    assert all(p.grad is None for p in model.parameters())


def test_a_closure_that_fails_leaves_the_parameters_as_they_were():
    model = linear()
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(ZeroDivisionError):
        spsa(model).step(lambda: 1 / 0)
    assert all(torch.equal(p, kept) for p, kept in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_a_loss_that_is_no_number_is_found_in_the_parameters_and_told_as_no_derivative(loss: float):
    """It was told as a derivative of zero and moved nothing, so that nobody learnt of it."""
    model = linear()
    optimizer = spsa(model)
    optimizer.step(lambda: loss_of(model))
    before = [p.detach().clone() for p in model.parameters()]
    assert not math.isfinite(optimizer.step(lambda: loss))
    assert optimizer.derivatives == ()
    assert all(bool(p.isnan().all()) for p in model.parameters())
    with torch.no_grad():  # as `on_nan` puts the anchor back
        for p, kept in zip(model.parameters(), before, strict=True):
            p.copy_(kept)
    optimizer.step(lambda: loss_of(model))
    assert optimizer.derivatives[0].number == 1, "of the directions that are told none is left out"


def test_it_learns_and_says_the_mean_of_its_losses():
    model = linear()
    first, optimizer = float(loss_of(model).detach()), spsa(model)
    told = [float(step_forward(optimizer, lambda: loss_of(model))) for _ in range(300)]
    assert abs(told[0] - first) < 1e-3
    assert float(loss_of(model).detach()) < 0.2 * first


def test_what_was_saved_and_loaded_goes_on_along_the_next_direction():
    model, twin = linear(), linear()
    one = spsa(model)
    one.step(lambda: loss_of(model))
    twin.load_state_dict(model.state_dict())
    other = SPSA(twin.named_parameters(), lr=RATE, seed=99)
    other.load_state_dict(one.state_dict())
    for held, optimizer in ((model, one), (twin, other)):
        optimizer.step(lambda held=held: loss_of(held))
    assert one.derivatives == other.derivatives
    assert one.derivatives[0].number == 1
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


def test_two_that_were_given_no_seed_go_different_ways():
    seeds = {SPSA(linear().named_parameters()).param_groups[0]["seed"] for _ in range(5)}
    assert len(seeds) == 5


def test_a_step_without_a_closure_is_refused_in_one_line():
    with pytest.raises(ConfigError, match=r"^SPSA.step: .* give it a closure that returns the loss"):
        spsa(linear()).step()


def test_parameters_without_names_and_those_of_half_a_float_are_refused():
    with pytest.raises(ConfigError, match=r"give it model.named_parameters\(\)"):
        SPSA(linear().parameters())  # type: ignore[arg-type]  # as an optimizer is usually made
    with pytest.raises(ConfigError, match=r"weight is torch.bfloat16, .* keep the parameters in float32"):
        spsa(linear().bfloat16())


def test_a_manifest_builds_it_and_neither_clips_nor_decays_with_it():
    (optimizer,) = build_inner(Inner(optimizer="spsa", weight_decay=0.0, learning_rate=0.5), linear())
    assert (type(optimizer), optimizer.param_groups[0]["lr"]) == (SPSA, 0.5)
    for own in ({"weight_decay": 0.1}, {"weight_decay": 0.0, "clip": 1.0}):
        with pytest.raises(ValueError, match="spsa goes forward only"):
            Inner(optimizer="spsa", **own)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="momentum is a key of muon, sgd, and spsa has none of its own"):
        Inner(optimizer="spsa", weight_decay=0.0, momentum=0.9)


def test_a_method_sees_its_derivatives_and_is_refused_gradients():
    model = linear()
    optimizer = spsa(model)
    shown = Moments(LiveModel(model, 1, None), [optimizer])
    assert shown.derivatives == []
    optimizer.step(lambda: loss_of(model))
    assert shown.derivatives == list(optimizer.derivatives)
    with pytest.raises(ConfigError, match="SPSA makes no gradients, and the run's outer method goes by them"):
        shown.read_gradient(0)


def test_names_that_are_not_the_models_are_refused():
    model = linear()
    wrapped = SPSA([(f"module.{name}", p) for name, p in model.named_parameters()])
    with pytest.raises(ConfigError, match="by the names that the model has, weight first"):
        _ = Moments(LiveModel(model, 1, None), [wrapped]).derivatives


def test_its_names_are_read_once_and_not_in_every_step():
    model = linear()
    optimizer = spsa(model)
    shown = Moments(LiveModel(model, 1, None), [optimizer])
    assert shown.derivatives == []
    optimizer.param_groups[0]["param_names"] = None  # whoever read them again would fail
    assert shown.derivatives == []


def test_its_closure_is_taken_where_a_methods_hook_acts_before_steps():
    model, begun = linear(), []
    optimizer = spsa(model)
    steps = InnerSteps([optimizer], lambda: None, lambda: begun.append(1))
    with steps.hooked(dict(model.named_parameters())):
        optimizer.step(lambda: loss_of(model))
    assert begun == [1]


def test_the_page_shows_a_loop_that_runs(monkeypatch):
    monkeypatch.setattr(secrets, "randbits", lambda bits: 1)  # along some directions the loss stands still
    page = (Path(__file__).parents[3] / "docs/inner-optimizers.md").read_text(encoding="utf-8")
    (example,) = (block for block in page.split("```python\n")[1:] if "SPSA(" in block)
    model = linear()

    class Task(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self) -> object:
            return type("Output", (), {"loss": loss_of(self.inner)})()

    before = model.weight.detach().clone()
    exec(example.split("```")[0], {"SPSA": SPSA, "model": Task(), "batch": {}})
    assert not torch.equal(model.weight, before)
