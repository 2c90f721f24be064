"""Methods that ask how late, how long and which way each contribution is: FedBuff, CGAD, HeLoCo, Decoupled DiLoCo.

The equation of each is held in tests/laws/test_equations.py, with ages, tokens and steps; here is what no random
changes show: the cases at the edges, in exact values.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from decentral.optimizers import Contributor, OuterMethod, RoundInfo
from decentral.optimizers.aggregation.base import aged_share, mean_share
from decentral.optimizers.aggregation.gram import cosine, direction, ranges
from decentral.optimizers.cgad import CGAD
from decentral.optimizers.decoupled import DecoupledDiLoCo, radial_directional
from decentral.optimizers.fedbuff import FedBuff
from decentral.optimizers.heloco import HeLoCo
from decentral.optimizers.steps import cos, power
from decentral.simulate.equations import Averaged, heloco
from decentral.wire.messages import FrameRef
from tests.kit.stepping import step, step_of
from tests.kit.tables import method_of

NUMEL = 200
NEAR = {"rtol": 1e-4, "atol": 1e-5}


def gaussian(seed: int, numel: int = NUMEL) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("spelling", "quorum"),
    [
        ("fedbuff wait_for=10 grace=0 staleness=4", (10, 0.0, 4)),
        ("heloco wait_for=3 grace=2.5 staleness=4", (3, 2.5, 4)),
        ("decoupled wait_for=1 grace=2.5 staleness=4", (1, 2.5, 4)),
        ("delayed_nesterov wait_for=3 grace=2.5 staleness=4", (3, 2.5, 4)),
        ("cgad wait_for=3 grace=2.5 cutoff=5", (3, 2.5, 4)),  # one that nobody would count is not accepted
        ("cgad cutoff=1", (2, 1.0, 0)),
    ],
)
def test_a_round_waits_for_some_and_a_grace_period_and_takes_what_is_late(spelling: str, quorum: tuple[float, ...]):
    asked = method_of(spelling).timing
    assert (asked.quorum, asked.grace, asked.staleness) == quorum


@pytest.mark.parametrize("method", [CGAD(), HeLoCo(), DecoupledDiLoCo(), FedBuff()], ids=lambda method: method.name)
def test_values_near_the_largest_leave_anchor_and_state_finite(method: OuterMethod):
    """A peer may send anything finite; an outer step that raises would end the run of all."""
    huge = torch.full((NUMEL,), 3e38)
    state = method.init(huge)
    state |= {"momentum": gaussian(0).abs()} if "momentum" in state else {}
    after, kept = step_of(method, torch.zeros(NUMEL), [-huge, gaussian(1)], state)
    assert all(bool(torch.isfinite(one).all()) for one in (after, *kept.values()))


# ---- fedbuff ----


def test_one_that_is_late_makes_a_short_step_also_alone():
    """Weights that were only relative would move the anchor in full."""
    after, _ = step_of(FedBuff(lr=1.0), torch.zeros(NUMEL), [gaussian(1)], {}, ages=[3])
    torch.testing.assert_close(after, -gaussian(1) / 2, rtol=1e-6, atol=1e-7)


def test_shares_are_powers_of_the_root_and_a_divisor_without_them_is_what_was_given():
    assert [aged_share(3, times) for times in range(4)] == [1.0, 0.5, 0.25, 0.125]
    assert aged_share(0, 5) == 1.0
    assert mean_share([1.0, 0.5], [1.0, 0.5]) == 0.75
    assert mean_share([4.0, 0.5, 0.0], [1.0, 0.25, 0.0]) == 0.75
    assert mean_share([3.0, 7.0], [1.0, 1.0]) == 1.0


# ---- cgad ----


def test_alone_what_is_at_the_cutoff_moves_nothing_and_leaves_the_state():
    method, anchor = CGAD(cutoff=3), torch.zeros(NUMEL)
    state = method.init(anchor)
    alone, kept = step_of(method, anchor, [gaussian(1)], state, ages=[3])
    assert torch.equal(alone, anchor)
    assert all(torch.equal(kept[name], state[name]) for name in state)


def test_on_a_quadratic_its_first_step_moves_each_value_by_the_rate_and_it_ends_within_one_of_the_optimum():
    method, anchor = CGAD(lr=0.01), gaussian(0).double()
    state = method.init(anchor)
    first, _ = step(method, anchor, anchor, state)
    torch.testing.assert_close(anchor - first, 0.01 * anchor.sign(), rtol=1e-4, atol=1e-6)
    for number in range(1200):
        anchor, state = step(method, anchor, anchor, state, number=number)
    assert float(anchor.abs().max()) < method.lr


def test_its_root_is_rounded_right_to_the_last_bit():
    """Peers whose vector libraries round a float32 root differently would hold different anchors."""
    change, method = gaussian(0, 100_000), CGAD(lr=1.0, beta1=0.0, eps=1e-38)
    moved, state = step(method, torch.zeros_like(change), change, method.init(change))
    squares = state["exp_avg_sq"] / (1.0 - power(method.beta2, 1))
    wanted = -(change / (torch.from_numpy(np.sqrt(squares.numpy())) + method.eps))
    assert torch.equal(moved, wanted)


def test_the_cosine_and_the_powers_are_as_near_as_they_say():
    assert max(abs(cos(n * math.pi / 1000) - math.cos(n * math.pi / 1000)) for n in range(1001)) < 1e-12
    assert [power(0.5, n) for n in range(5)] == [1.0, 0.5, 0.25, 0.125, 0.0625]
    assert power(0.0, 0) == 1.0
    assert abs(power(0.999, 100_000) / 0.999**100_000 - 1) < 1e-9


def test_the_bits_of_the_cosine_are_these_on_every_machine():
    assert [cos(angle).hex() for angle in (0.1, 1.0, 1.5, 3.0)] == [
        "0x1.fd712f9a817c1p-1",
        "0x1.14a280fb5068bp-1",
        "0x1.21bd54fc5f9a7p-4",
        "-0x1.fae04be85e5d3p-1",
    ]


# ---- heloco ----


def at_cosine(c: float, momentum_N: Tensor, length: float = 2.0) -> Tensor:
    """A vector at that cosine with the momentum."""
    toward_N = momentum_N.double() / momentum_N.double().norm()
    across_N = gaussian(99).double()
    across_N -= (across_N @ toward_N) * toward_N
    across_N /= across_N.norm()
    return (length * (c * toward_N + (1 - c * c) ** 0.5 * across_N)).float()


def corrected(change_N: Tensor, momentum_N: Tensor, method: HeLoCo) -> Tensor:
    """The reference's second step less its first, which makes half of the momentum."""
    keys = dataclasses.asdict(method) | {"lr": 1.0, "momentum": 0.5}
    refs = (FrameRef(bytes(32), bytes(32), 0, 1, 1),)
    run = [Averaged(row_N, refs, row_N[None], [0]) for row_N in (2 * momentum_N.double(), change_N.double())]
    turned_N = (heloco(run[:1], keys) - heloco(run, keys) - 0.25 * momentum_N.double()) / 1.25
    return turned_N.float()


@pytest.mark.parametrize(
    "hyper", [{}, {"turn": 0.3, "shrink": 3.0, "most": 0.4, "trust": 0.1}, {"trust": 7.0}], ids=str
)
def test_a_change_is_corrected_by_the_papers_three_cases(hyper: dict[str, float]):
    method, momentum_N = HeLoCo(lr=1.0, momentum=0.0, **hyper), gaussian(0)  # type: ignore[arg-type]
    for c in (-1.0, -0.7, -0.01, 0.01, 0.3, 0.49, 0.51, 1.0):
        change_N = at_cosine(c, momentum_N)
        after, _ = step_of(method, torch.zeros(NUMEL), [change_N], {"momentum": momentum_N})
        torch.testing.assert_close(-after, corrected(change_N, momentum_N, method), **NEAR)
        assert torch.equal(-after, change_N) == (c > 0.5)


def test_a_turned_change_keeps_its_length_and_a_shrunk_one_loses_only_what_points_against():
    method, momentum_N = HeLoCo(lr=1.0, momentum=0.0, turn=1.0), gaussian(0)
    turned, _ = step_of(method, torch.zeros(NUMEL), [at_cosine(0.2, momentum_N)], {"momentum": momentum_N})
    torch.testing.assert_close(float(turned.norm()), 2.0, rtol=1e-5, atol=0)
    assert cosine(direction(-turned)[0], direction(momentum_N)[0]) > 0.3
    whole = HeLoCo(lr=1.0, momentum=0.0, shrink=1e6)
    opposed, _ = step_of(whole, torch.zeros(NUMEL), [at_cosine(-0.5, momentum_N)], {"momentum": momentum_N})
    assert abs(float((opposed / opposed.norm()) @ (momentum_N / momentum_N.norm()))) < 1e-5


def test_an_empty_buffer_passes_every_change_through_and_a_zero_change_stays_zero():
    method, change_N = HeLoCo(lr=1.0, momentum=0.0), gaussian(1)
    after, _ = step_of(method, torch.zeros(NUMEL), [change_N], method.init(change_N))
    assert torch.equal(-after, change_N)
    still, _ = step_of(method, torch.zeros(NUMEL), [torch.zeros(NUMEL)], {"momentum": gaussian(0)})
    assert not still.any()


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
    state = {"momentum": torch.cat([momentum_N, momentum_N])}
    info = RoundInfo(0, (Contributor(bytes(32)),), (1.0,), ((10, 20), (200,)), ("a", "b"))
    after, _ = method.outer_step(torch.zeros(400), {"change": both_N[None]}, state, info)
    torch.testing.assert_close(-after[:200], corrected(against_N, momentum_N, method), **NEAR)
    assert torch.equal(-after[200:], along_N)


# ---- decoupled diloco ----


def rows(peers: int, numel: int = 300) -> Tensor:
    return torch.randn(peers, numel, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("peers", [1, 2, 4, 16])
def test_the_mean_directions_length_is_the_weighted_mean_length_whatever_the_number_of_peers(peers: int):
    """So that the outer learning rate need not follow it; the plain mean of 16 is a quarter as long."""
    rows_KN, weights = rows(peers) * 3.0, [1.0 + n for n in range(peers)]
    lengths = rows_KN.double().norm(dim=1)
    mean = sum(w * float(length) for w, length in zip(weights, lengths, strict=True)) / sum(weights)
    assert math.isclose(float(radial_directional(rows_KN, weights).double().norm()), mean, rel_tol=1e-5)
    if peers == 16:
        assert float(rows_KN.mean(0).norm()) < 0.3 * mean


def test_a_mean_direction_of_what_is_equal_zero_or_cancels():
    one_N = rows(1)[0]
    table = [
        ([one_N] * 5, [1.0] * 5, one_N),
        ([one_N, 0 * one_N], [1.0, 3.0], one_N / 4),  # it has no direction, and keeps its weight in the mean length
        ([one_N, one_N, 0 * one_N], [1.0, 1.0, 0.0], one_N),
        ([one_N, -3 * one_N], [1.0, 1.0], -one_N),  # there the weighted mean
        ([0 * one_N] * 3, [1.0, 2.0, 3.0], 0 * one_N),
    ]
    for given, weights, wanted_N in table:
        torch.testing.assert_close(radial_directional(torch.stack(given), weights), wanted_N, rtol=1e-6, atol=1e-7)


def test_each_tensor_has_a_direction_and_a_length_of_its_own_and_embeddings_are_plainly_averaged():
    names, shapes = ("model.embed_tokens.weight", "layer.weight", "layer.bias"), ((5, 4), (3, 4), (3,))
    told = tuple(Contributor(bytes([n]) * 32, tokens=100, steps=10) for n in range(3))
    method, rows_KN = DecoupledDiLoCo(lr=1.0, momentum=0.0), rows(3, numel=35)
    anchor, info = torch.zeros(35), RoundInfo(0, told, (1.0, 1.0, 1.0), shapes, names)
    after, _ = method.outer_step(anchor, {"change": rows_KN}, method.init(anchor), info)
    torch.testing.assert_close(-after[:20], rows_KN[:, :20].mean(0), rtol=1e-6, atol=1e-6)
    for place in (slice(20, 32), slice(32, 35)):
        wanted_N = radial_directional(rows_KN[:, place].contiguous(), [1.0] * 3)
        torch.testing.assert_close(-after[place], wanted_N, rtol=1e-5, atol=1e-6)
    assert [(name, place.start, place.stop) for name, place in ranges(info, 35)] == [
        ("model.embed_tokens.weight", 0, 20), ("layer.weight", 20, 32), ("layer.bias", 32, 35)
    ]  # fmt: skip


def test_weights_are_tokens_squared_over_steps_within_bounds():
    behind = [(100, 10), (50, 10), (200, 10)]
    told = [Contributor(bytes([n]) * 32, tokens, steps) for n, (tokens, steps) in enumerate(behind)]
    method = DecoupledDiLoCo()
    assert method.weights(told, [1.0] * 3, {}) == [1.0, 0.25, 4.0]
    assert method.weights(told, [1.0, 0.5, 2.0], {}) == [1.0, 0.25, 4.0], "tokens count once"
    liar = Contributor(bytes(32), tokens=2**63, steps=0)
    assert method.weights([*told[:2], liar], [1.0] * 3, {}) == [1.0, 0.25, 4.0]
    silent = [Contributor(bytes([n]) * 32) for n in range(2)]
    assert method.weights(silent, [1.0] * 2, {}) == [1.0, 1.0]
