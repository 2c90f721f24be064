"""Inner optimizers against their equations, in float64 on a quadratic, and twelve steps of their authors' own code."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from decentral.errors import ConfigError
from decentral.training.inner_optimizers import ADOPT, GPA, QHADOPT, Averaging, ScheduleFree

START = torch.tensor([1.5, -0.25, 2.0, -3.0], dtype=torch.float64)
CURVATURE = torch.tensor([0.5, 1.0, 2.0, 0.1], dtype=torch.float64)
RATE, DECAY, STEPS = 0.05, 0.1, 30


def stepped(optimizer: torch.optim.Optimizer, parameter: Tensor, steps: int = STEPS) -> Tensor:
    for _ in range(steps):
        parameter.grad = CURVATURE * parameter.detach()
        optimizer.step()
    return parameter.detach().clone()


def parameter() -> torch.nn.Parameter:
    return torch.nn.Parameter(START.clone())


def close(ours: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(ours, wanted, rtol=1e-12, atol=1e-12)


def qh_adopt(share: float, b1: float, b2: float) -> Tensor:
    """v of the gradients before this one; the first makes v and moves nothing."""
    x, u, v = START.clone(), torch.zeros_like(START), (CURVATURE * START).square()
    for t in range(1, STEPS):
        gradient = CURVATURE * x
        normal = (gradient / v.sqrt().clamp(min=1e-6)).clamp(-(t**0.25), t**0.25)
        u = b1 * u + (1 - b1) * normal
        x = x - RATE * ((1 - share) * normal + share * u) - RATE * DECAY * x
        v = b2 * v + (1 - b2) * gradient.square()
    return x


@pytest.mark.parametrize("share", [0.0, 0.7, 1.0])
def test_quasi_hyperbolic_adopt_is_its_equation(share: float):
    held = parameter()
    ours = stepped(QHADOPT([held], lr=RATE, betas=(0.95, 0.99), mixing=share, weight_decay=DECAY), held)
    close(ours, qh_adopt(share, 0.95, 0.99))


def test_adopts_first_gradient_moves_nothing_and_a_later_one_is_clipped_by_the_fourth_root_of_the_step():
    held = parameter()
    optimizer = ADOPT([held], lr=1.0, betas=(0.0, 0.5))
    assert torch.equal(stepped(optimizer, held, steps=1), START)
    before = held.detach().clone()
    held.grad = torch.full_like(held, 1e6)
    optimizer.step()
    close(before - held.detach(), torch.ones_like(START))  # t = 1
    optimizer.state[held]["step"], optimizer.state[held]["exp_avg_sq"] = 16, torch.ones_like(START)
    before = held.detach().clone()
    optimizer.step()
    close(before - held.detach(), torch.full_like(START, 2.0))


def adam(gradient: Tensor, m: Tensor, v: Tensor, t: int, b1: float, b2: float) -> tuple[Tensor, Tensor, Tensor]:
    m, v = b1 * m + (1 - b1) * gradient, b2 * v + (1 - b2) * gradient.square()
    return m / (1 - b1**t) / ((v / (1 - b2**t)).sqrt() + 1e-8), m, v


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_gpa_is_the_textbooks_three_sequences_with_decay_as_without(decay: float):
    """The authors' in-place code is another one with decay: it shrinks z under a y that was made of it before."""
    held = parameter()
    optimizer = GPA([held], lr=RATE, betas=(0.9, 0.99), mixing=0.7, averaging=0.95, weight_decay=decay)
    y_ours = stepped(optimizer, held)
    x = z = START
    m = v = torch.zeros_like(START)
    for t in range(1, STEPS + 1):
        y = 0.7 * x + 0.3 * z
        direction, m, v = adam(CURVATURE * y, m, v, t, 0.9, 0.99)
        z = (1 - RATE * decay) * z - RATE * direction
        x = 0.95 * x + 0.05 * z
    close(y_ours, 0.7 * x + 0.3 * z)
    close(optimizer.state[held]["z"], z)
    optimizer.eval()
    close(held.detach(), x)
    optimizer.train()
    close(held.detach(), y_ours)


def test_gpa_without_averaging_is_adamw():
    held, other = parameter(), parameter()
    ours = stepped(GPA([held], lr=RATE, mixing=0.5, averaging=0.0, weight_decay=DECAY), held)
    theirs = torch.optim.AdamW([other], lr=RATE, weight_decay=DECAY)
    close(ours, stepped(theirs, other))


@pytest.mark.parametrize("make", [ScheduleFree, GPA])
def test_a_step_in_eval_mode_and_parameters_in_bfloat16_are_refused_with_the_way_out(make: type):
    held = parameter()
    optimizer = make([held], lr=RATE)
    optimizer.eval()
    held.grad = torch.ones_like(held)
    with pytest.raises(ConfigError, match=r"a step in eval mode.* call optimizer\.train\(\)"):
        optimizer.step()
    with pytest.raises(ConfigError, match=r"parameters in torch\.bfloat16.*float32"):
        make([torch.nn.Parameter(START.bfloat16())])


@pytest.mark.parametrize(
    ("make", "bad"),
    [
        (ADOPT, {"lr": -1.0}),
        (ADOPT, {"betas": (0.9, 1.0)}),
        (QHADOPT, {"mixing": 1.5}),
        (GPA, {"mixing": 0.0}),
        (GPA, {"averaging": 1.0}),
        (ScheduleFree, {"weight_decay": -0.1}),
    ],
)
def test_numbers_that_cannot_be_are_refused(make: type, bad: dict[str, object]):
    with pytest.raises(ConfigError, match=make.__name__):
        make([parameter()], **bad)


@pytest.mark.parametrize("make", [ADOPT, QHADOPT, ScheduleFree, GPA])
def test_saved_and_loaded_it_goes_on_bit_for_bit(make: type):
    held, other = parameter(), parameter()
    first, second = make([held], lr=RATE), make([other], lr=RATE)
    stepped(first, held, steps=5)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    with torch.no_grad():
        other.copy_(held)
    assert torch.equal(stepped(first, held, steps=5), stepped(second, other, steps=5))


# ---- the authors' own code, to 1e-6; where the numbers came from is beside them ----

GOLDEN = json.loads((Path(__file__).parents[1] / "golden/inner_optimizers.json").read_text(encoding="utf-8"))
PROBLEM = {name: torch.tensor(GOLDEN["problem"][name]) for name in ("start", "curvature", "target")}

MAKERS: dict[str, Callable[[list[Tensor]], torch.optim.Optimizer]] = {
    "schedule_free": lambda held: ScheduleFree(held, beta2=0.95, weight_decay=0.1),
    "gpa": lambda held: GPA(held, betas=(0.9, 0.95), averaging=0.9),
    "adopt": lambda held: ADOPT(held, betas=(0.9, 0.99), weight_decay=0.1),
}


def gradient_at(parameter: Tensor) -> Tensor:
    return PROBLEM["curvature"] * (parameter.detach() - PROBLEM["target"])


@pytest.mark.parametrize("name", sorted(GOLDEN["cases"]))
def test_it_steps_as_its_authors_code_does(name: str):
    case, problem = GOLDEN["cases"][name], GOLDEN["problem"]
    parameter = torch.nn.Parameter(PROBLEM["start"].clone())
    optimizer = MAKERS[name]([parameter])
    trained, learnt = [], []
    for number in range(len(case["trained"])):
        for group in optimizer.param_groups:
            group["lr"] = problem["rate"] * min(1.0, (number + 1) / problem["warmup"])
        parameter.grad = gradient_at(parameter)
        optimizer.step()
        trained.append(parameter.detach().clone())
        if isinstance(optimizer, Averaging):
            optimizer.eval()
            learnt.append(parameter.detach().clone())
            optimizer.train()
    torch.testing.assert_close(torch.stack(trained), torch.tensor(case["trained"]), rtol=1e-6, atol=1e-6)
    if learnt:
        torch.testing.assert_close(torch.stack(learnt), torch.tensor(case["learnt"]), rtol=1e-6, atol=1e-6)
