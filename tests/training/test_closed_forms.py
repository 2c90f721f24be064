"""Each inner optimizer against its equations, written out in float64 on a quadratic; and Muon's traps."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from decentral.errors import ConfigError
from decentral.training.inner_optimizers import ADOPT, GPA, QHADOPT, ScheduleFree

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


def test_adopt_is_its_equation():
    held = parameter()
    ours = stepped(ADOPT([held], lr=RATE, betas=(0.9, 0.99), weight_decay=DECAY), held)
    close(ours, qh_adopt(1.0, 0.9, 0.99))


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


def test_schedule_free_is_the_mean_of_its_iterates_with_first_ones_of_a_warm_up_counting_little():
    held = parameter()
    optimizer = ScheduleFree([held], lr=RATE, beta2=0.99, mixing=0.9, weight_decay=DECAY)
    x = z = START
    v, total = torch.zeros_like(START), 0.0
    for t in range(1, STEPS + 1):
        rate = optimizer.param_groups[0]["lr"] = RATE * min(1.0, t / 5)
        y = 0.9 * x + 0.1 * z
        gradient = CURVATURE * y
        v = 0.99 * v + 0.01 * gradient.square()
        z = z - rate * (gradient / ((v / (1 - 0.99**t)).sqrt() + 1e-8) + DECAY * y)
        total += rate**2
        x = x + rate**2 / total * (z - x)
        stepped(optimizer, held, steps=1)
    optimizer.eval()
    close(held.detach(), x)


def test_muons_buffer_is_a_moving_average_and_decay_takes_the_rate_as_it_is_given():
    """torch's own: the trap is for who compares with a buffer mu*m + g, or with a decay by the scaled rate."""
    gradients = [torch.randn(4, 6, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    held = torch.nn.Parameter(torch.ones(4, 6))
    muon = torch.optim.Muon(
        [held], lr=0.1, weight_decay=0.5, momentum=0.9, nesterov=False, adjust_lr_fn="match_rms_adamw"
    )
    buffer = torch.zeros(4, 6)
    for gradient in gradients:
        held.grad = gradient.clone()
        before = held.detach().clone()
        muon.step()
        buffer = 0.9 * buffer + 0.1 * gradient
        torch.testing.assert_close(muon.state[held]["momentum_buffer"], buffer)
        moved = before * (1 - 0.1 * 0.5) - held.detach()
        sizes = torch.linalg.svdvals(moved) / (0.1 * 0.2 * 6**0.5)
        assert bool((sizes > 0.6).all()), "five iterations leave singular values between about 0.7 and 1.2"
        assert bool((sizes < 1.3).all())
        u, _, vh = torch.linalg.svd(buffer, full_matrices=False)
        along = float((moved * (u @ vh)).sum() / (moved.norm() * (u @ vh).norm()))
        assert along > 0.95, "it is no rotation of the momentum, in bfloat16 or not"


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
