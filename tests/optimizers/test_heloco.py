"""HeLoCo's correction of each change towards the momentum, against its equations in float64."""

import pytest
import torch
from torch import Tensor

from decentral.errors import ConfigError
from decentral.optimizers import Contributor, RoundInfo
from decentral.optimizers.aggregation.gram import cosine, direction
from decentral.optimizers.heloco import HeLoCo
from tests.kit.stepping import step_of

NEAR = {"rtol": 1e-4, "atol": 1e-5}


def gaussian(seed: int, numel: int = 200) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def at_cosine(c: float, momentum_N: Tensor, length: float = 2.0) -> Tensor:
    """A vector at that cosine with the momentum."""
    toward_N = momentum_N.double() / momentum_N.double().norm()
    across_N = gaussian(99).double()
    across_N -= (across_N @ toward_N) * toward_N
    across_N /= across_N.norm()
    return (length * (c * toward_N + (1 - c * c) ** 0.5 * across_N)).float()


def corrected(change_N: Tensor, momentum_N: Tensor, method: HeLoCo) -> Tensor:
    """The paper's three cases in float64."""
    d, m = change_N.double(), momentum_N.double()
    u, v = d / d.norm(), m / m.norm()
    c, confidence = float(u @ v), float(d.norm() / (d.norm() + method.trust * m.norm()))
    if c >= method.keep:
        return change_N
    if c < 0:
        return (d - min(method.shrink * -c * confidence, method.most) * c * d.norm() * v).float()
    share = min(method.turn * (1 - c) * confidence, 1.0)
    turned = (1 - share) * u + share * v
    return (d.norm() * turned / turned.norm()).float()


@pytest.mark.parametrize("hyper", [{}, {"turn": 0.3, "shrink": 3.0, "most": 0.4, "trust": 0.1}, {"trust": 7.0}])
@pytest.mark.parametrize("c", [-1.0, -0.7, -0.01, 0.01, 0.3, 0.49, 0.51, 1.0])
def test_a_change_is_corrected_by_the_papers_three_cases(c: float, hyper: dict[str, float]):
    method, momentum_N = HeLoCo(lr=1.0, momentum=0.0, **hyper), gaussian(0)  # type: ignore[arg-type]
    change_N = at_cosine(c, momentum_N)
    after, _ = step_of(method, torch.zeros(200), [change_N], {"momentum": momentum_N})
    torch.testing.assert_close(-after, corrected(change_N, momentum_N, method), **NEAR)
    if c > 0.5:
        assert torch.equal(-after, change_N)


def test_a_turned_change_keeps_its_length_and_a_shrunk_one_loses_only_what_points_against():
    method, momentum_N = HeLoCo(lr=1.0, momentum=0.0, turn=1.0), gaussian(0)
    turned, _ = step_of(method, torch.zeros(200), [at_cosine(0.2, momentum_N)], {"momentum": momentum_N})
    torch.testing.assert_close(float(turned.norm()), 2.0, rtol=1e-5, atol=0)
    assert cosine(direction(-turned)[0], direction(momentum_N)[0]) > 0.3
    whole = HeLoCo(lr=1.0, momentum=0.0, shrink=1e6)
    opposed, _ = step_of(whole, torch.zeros(200), [at_cosine(-0.5, momentum_N)], {"momentum": momentum_N})
    assert abs(float((opposed / opposed.norm()) @ (momentum_N / momentum_N.norm()))) < 1e-5


def test_an_empty_buffer_passes_every_change_through_and_a_zero_change_stays_zero():
    method, change_N = HeLoCo(lr=1.0, momentum=0.0), gaussian(1)
    after, _ = step_of(method, torch.zeros(200), [change_N], method.init(change_N))
    assert torch.equal(-after, change_N)
    still, _ = step_of(method, torch.zeros(200), [torch.zeros(200)], {"momentum": gaussian(0)})
    assert not still.any()


def test_the_momentum_is_a_moving_average_and_the_step_is_nesterovs_on_it():
    """A constant change ends at lr (1 + mu) times it per step, and not at lr / (1 - mu) times it."""
    method, change_N = HeLoCo(lr=0.5, momentum=0.8), gaussian(1)
    anchor, state = torch.zeros(200), method.init(change_N)
    for number in range(60):
        before = anchor
        anchor, state = step_of(method, anchor, [change_N, change_N], state, number)
    torch.testing.assert_close(state["momentum"], change_N, **NEAR)
    torch.testing.assert_close(before - anchor, 0.5 * 1.8 * change_N, **NEAR)


def test_on_a_quadratic_it_follows_the_recursion_of_its_equations():
    """One direction, so nothing is corrected: x and m are two numbers times the start."""
    method, start_N = HeLoCo(lr=0.1, momentum=0.9), gaussian(0)
    anchor, state, x, m = start_N, method.init(start_N), 1.0, 0.0
    for number in range(8):
        anchor, state = step_of(method, anchor, [anchor], state, number)
        m = 0.9 * m + 0.1 * x
        x = x - 0.1 * (x + 0.9 * m)
        assert x > 0
        torch.testing.assert_close(anchor, start_N * x, **NEAR)


def test_a_cosine_of_vectors_that_share_no_coordinate_is_exactly_0_and_others_are_near():
    """At 0 the rule jumps from turning to shrinking, so rounding must not decide where there is nothing to round."""
    one, other = torch.zeros(3000), torch.zeros(3000)
    one[::2], other[1::2] = gaussian(1, 1500), gaussian(2, 1500)
    assert cosine(one, other) == 0.0
    mixed = one + 0.3 * other
    wanted = float(one.double() @ mixed.double() / (one.double().norm() * mixed.double().norm()))
    assert abs(cosine(one, mixed) - wanted) < 1e-12
    assert abs(cosine(1e30 * one, -1e-30 * one) + 1) < 1e-6


def test_each_tensor_is_corrected_by_itself():
    momentum_N = gaussian(0)
    against_N, along_N = at_cosine(-0.8, momentum_N), at_cosine(0.9, momentum_N)
    method, both_N = HeLoCo(lr=1.0, momentum=0.0), torch.cat([against_N, along_N])
    told = (Contributor(bytes(32)),)
    state = {"momentum": torch.cat([momentum_N, momentum_N])}
    info = RoundInfo(0, told, (1.0,), ((10, 20), (200,)), ("a", "b"))
    after, _ = method.outer_step(torch.zeros(400), {"change": both_N[None]}, state, info)
    torch.testing.assert_close(-after[:200], corrected(against_N, momentum_N, method), **NEAR)
    assert torch.equal(-after[200:], along_N)


def test_who_is_late_counts_less_and_the_divisor_is_how_many_came():
    method = HeLoCo(lr=1.0, momentum=0.0, turn=0.0, shrink=0.0)
    one, two = gaussian(1), gaussian(2)
    after, _ = step_of(method, torch.zeros(200), [one, two], {"momentum": gaussian(0)}, ages=[0, 3])
    torch.testing.assert_close(-after, (one + two / 2) / 2, **NEAR)


def test_values_near_the_largest_leave_the_step_finite():
    method = HeLoCo()
    huge = torch.full((200,), 3e38)
    after, state = step_of(method, torch.zeros(200), [-huge, gaussian(1)], {"momentum": gaussian(0).abs()})
    assert torch.isfinite(after).all()
    assert torch.isfinite(state["momentum"]).all()


def test_a_round_waits_for_some_and_takes_what_is_late():
    method = HeLoCo(wait_for=3, grace=2.5, staleness=4)
    assert (method.quorum.peers, method.quorum.grace, method.quorum.staleness) == (3, 2.5, 4)


@pytest.mark.parametrize(
    ("hyper", "message"),
    [
        ({"lr": 0.0}, "lr must be above 0"),
        ({"momentum": 1.0}, "momentum must be in"),
        ({"keep": 1.5}, "keep must be in"),
        ({"most": -0.1}, "most in"),
        ({"discount": 9}, "discount in"),
        ({"turn": -1.0}, "turn, shrink and trust"),
        ({"trust": float("inf")}, "turn, shrink and trust"),
        ({"wait_for": 0}, "wait_for must be at least 1"),
    ],
)
def test_numbers_that_cannot_be_meant_are_refused(hyper: dict[str, float], message: str):
    with pytest.raises(ConfigError, match=message):
        HeLoCo(**hyper)  # type: ignore[arg-type]
