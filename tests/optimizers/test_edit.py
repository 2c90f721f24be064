"""EDiT and A-EDiT: what counts, what counts nothing, what is remembered of the usual, and when A-EDiT is due."""

from __future__ import annotations

import math
import random
import struct
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load, save
from torch import Tensor

from decentral.optimizers import Contributor, RoundInfo
from decentral.optimizers.aggregation.base import norm
from decentral.optimizers.edit import AEDiT, EDiT
from decentral.optimizers.steps import exp
from tests.kit.learners import Learners, replica_of
from tests.kit.replicas import NUMEL
from tests.kit.stepping import step_of


def gaussian(seed: int) -> torch.Tensor:
    return torch.randn(50, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("steps", "seconds", "due"),
    [(1, 59.0, False), (1, 60.0, False), (4, 60.0, False), (5, 60.0, True), (5, 59.9, False), (99, 59.0, False),
     (100, 0.0, True), (1000, 0.0, True)],
)  # fmt: skip
def test_it_is_due_after_the_time_or_the_steps_and_never_with_fewer_than_the_least(steps, seconds, due):
    assert AEDiT(seconds=60.0, least=5).timing.is_due(steps, seconds, 100) == due


# ---- weights and detector ----

OPEN = {"relative_temperature": math.inf, "clip": math.inf}


def randn(seed: int, numel: int = NUMEL) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def said(*norms: float) -> list[Contributor]:
    return [Contributor(bytes([n]) * 32, summary=struct.pack("<d", value)) for n, value in enumerate(norms)]


def learnt(method: EDiT, rounds: int, peers: int = 2) -> tuple[Tensor, dict[str, Tensor]]:
    """A state that has seen ``rounds * peers`` ordinary norms."""
    anchor = randn(0, 1001)
    state = method.init(anchor)
    for number in range(rounds):
        anchor, state = step_of(method, anchor, [randn(10 * number + n, 1001) for n in range(peers)], state)
    return anchor, state


def owned(stated: Sequence[float], parts: Sequence[float]) -> list[Contributor]:
    """As the owner of a part of a reduce knows them: what each states, and the norm of its slice."""
    return [replace(one, part=part) for one, part in zip(said(*stated), parts, strict=True)]


def test_an_owner_counts_who_states_its_norm_as_it_is_by_that_norm_bit_for_bit():
    method, given = EDiT(relative_temperature=2.0), [1.0, 4.0, 1.0]
    state = method.init(randn(0))
    for parts in ([1.5, 0.5, 1.0], [2.0, 0.4, 0.9], [1.0, 0.6, 0.6], [3.0, 1.0, 2.0], [0.0, 0.0, 0.0]):
        assert method.weights(owned([3.0, 1.0, 2.0], parts), given, state) == method.weights(
            said(3.0, 1.0, 2.0), given, state
        )


@pytest.mark.parametrize("stated", [0.0, 1e-300, 0.5])
def test_an_owner_takes_who_understates_its_norm_for_what_it_sends(stated):
    method = EDiT(warmup=20)
    state = method.init(randn(0))
    for count in (2, 3, 5):  # of two, too: a part is no longer than the whole
        liar, *others = method.weights(
            owned([stated, *[10.0] * (count - 1)], [500.0, *[5.0] * (count - 1)]), [1.0] * count, state
        )
        assert others == [1.0] * (count - 1)
        assert liar < 1e-20
    _, usual = learnt(EDiT(relative_temperature=math.inf, warmup=20), 20)
    typical = norm(randn(7, 1001))
    told = owned([stated, typical, typical], [500 * typical, 0.5 * typical, 0.5 * typical])
    assert EDiT(relative_temperature=math.inf, warmup=20).weights(told, [1.0] * 3, usual) == [0.0, 1.0, 1.0]


@pytest.mark.parametrize("stated", [math.nan, math.inf, -1.0, 1e300])
def test_a_stated_norm_that_cannot_be_counts_nothing_and_takes_nothing_from_others(stated):
    method = EDiT()
    told = owned([stated, 10.0, 10.0, 10.0, 10.0], [5.0] * 5)
    assert method.weights(told, [1.0] * 5, method.init(randn(0))) == [0.0, 1.0, 1.0, 1.0, 1.0]


def test_of_stated_norms_none_is_learnt_beyond_four_times_the_median():
    method, anchor = EDiT(), torch.zeros(4)
    told = said(1.0, 1.0, 1.0, 1.0, 1e6)
    info = RoundInfo(0, tuple(told), (1.0,) * 5)
    _, state = method.outer_step(anchor, {"change": torch.zeros(4)}, method.init(anchor), info)
    four = RoundInfo(0, tuple(said(1.0, 1.0, 1.0, 1.0, 4.0)), (1.0,) * 5)
    _, wanted = method.outer_step(anchor, {"change": torch.zeros(4)}, method.init(anchor), four)
    assert torch.equal(state["usual"], wanted["usual"])
    measured = [replace(one, norm=value) for one, value in zip(told, (1.0, 1.0, 1.0, 1.0, 1e6), strict=True)]
    _, seen = method.outer_step(
        anchor, {"change": torch.zeros(4)}, method.init(anchor), RoundInfo(0, tuple(measured), (1.0,) * 5)
    )
    assert float(seen["usual"][1]) > 1e4, "of what all measured nothing is taken away"


def test_equal_norms_give_the_plain_mean():
    method, change = EDiT(lr=1.0, momentum=0.0, clip=math.inf), randn(1)
    turned = [change, -change, change * randn(2).sign()]  # other directions, and the same magnitudes
    anchor = randn(0)
    assert method.weights(said(*map(norm, turned)), [1.0] * 3, method.init(anchor)) == [1.0] * 3
    after, _ = step_of(method, anchor, turned, method.init(anchor))
    torch.testing.assert_close(after, anchor - torch.stack(turned).mean(0))


def test_weights_are_a_softmax_over_norms_in_units_of_their_median_times_what_is_given():
    method = EDiT(relative_temperature=0.5)
    weights = method.weights(said(3.0, 1.0, 2.0), [1.0, 4.0, 1.0], method.init(randn(0)))
    assert weights == pytest.approx([math.exp(-2.0), 4.0, math.exp(-1.0)], rel=1e-11)
    of_two = method.weights(said(1.0, 3.0), [1.0, 1.0], method.init(randn(0)))
    assert of_two == pytest.approx([1.0, math.exp(-4.0)], rel=1e-11), "in units of the shorter"


@pytest.mark.parametrize("times", [2.0**-40, 1e-3, 0.3, 1.0, 7.0, 1e6, 2.0**40])
def test_contributions_that_are_all_so_many_times_as_long_count_as_before(times: float):
    method, given, usual = EDiT(), [1.0, 2.0, 0.5, 1.0], EDiT().init(randn(0))
    norms = [0.37, 0.04, 0.47, 0.12]
    weights = method.weights(said(*(times * value for value in norms)), given, usual)
    assert weights == pytest.approx(method.weights(said(*norms), given, usual), rel=1e-9)
    measured = [Contributor(bytes([n]) * 32, norm=times * value) for n, value in enumerate(norms)]
    assert method.weights(measured, given, usual) == weights


def test_a_hundred_times_as_many_parameters_with_changes_of_the_same_kind_leave_the_weights():
    """One of four took over at 10.7 million parameters, where all of them counted at 0.64."""
    method, spreads = EDiT(), (0.010, 0.011, 0.009, 0.010)  # standard deviations of the peers' changes
    shares = []
    for numel in (2_000, 200_000):
        told = said(*(norm(spread * randn(n, numel)) for n, spread in enumerate(spreads)))
        weights = method.weights(told, [1.0] * 4, method.init(torch.zeros(1)))
        shares.append([weight / sum(weights) for weight in weights])
    assert shares[0] == pytest.approx(shares[1], abs=0.02)
    assert max(shares[1]) < 0.3


def test_where_most_changed_nothing_all_count_alike():
    method = EDiT()
    assert method.weights(said(0.0, 0.0, 1.0), [1.0, 2.0, 1.0], method.init(randn(0))) == [1.0, 2.0, 1.0]


def test_one_contributor_at_a_thousand_times_the_usual_counts_nothing_once_there_is_a_usual():
    method = EDiT(relative_temperature=math.inf, warmup=100)
    _, early = learnt(method, 49)
    _, late = learnt(method, 50)
    usual = norm(randn(7, 1001))
    assert method.weights(said(usual, 1000 * usual), [1.0, 1.0], early) == [1.0, 1.0]
    assert method.weights(said(usual, 1000 * usual), [1.0, 1.0], late) == [1.0, 0.0]


def test_an_outlier_neither_moves_the_anchor_nor_enters_what_is_usual():
    method = EDiT(**OPEN, warmup=20)
    anchor, state = learnt(method, 20)
    fit = [randn(1, 1001), randn(2, 1001)]
    without, kept = step_of(method, anchor, fit, state)
    with_it, kept_too = step_of(method, anchor, [*fit, 1000 * randn(3, 1001)], state)
    assert torch.equal(with_it, without)
    assert all(torch.equal(kept[name], kept_too[name]) for name in kept)


def test_a_norm_far_below_the_usual_is_no_outlier():
    method = EDiT(relative_temperature=math.inf, warmup=20)
    _, state = learnt(method, 20)
    assert method.weights(said(1e-3, 30.0), [1.0, 1.0], state) == [1.0, 1.0]


def test_when_all_are_outliers_nothing_moves_and_every_live_copy_goes_back_to_the_anchor():
    run = Learners(EDiT(warmup=6), 3, randn(0))
    for number in range(4):
        run.learn({n: 0.01 * randn(10 * number + n) for n in range(3)})
        run.meet((0, 1, 2))
    before = dict(run.peers[0].replica.shared_tensors())
    assert before["outer/0/momentum"].any()
    run.learn({n: 1000 * randn(n) for n in range(3)})
    run.meet((0, 1, 2))
    for peer in run.peers:
        after = peer.replica.shared_tensors()
        assert all(torch.equal(after[name], before[name]) for name in before if name != "outer/0/frozen")
        assert torch.equal(peer.live_N, before["anchor/0"])


def test_the_detector_survives_saving_and_loading():
    method = EDiT(relative_temperature=math.inf, warmup=20)
    run = Learners(method, 2, randn(0))
    for number in range(12):
        run.learn({n: 0.01 * randn(10 * number + n) for n in range(2)})
        run.meet((0, 1))
    loaded = replica_of(method, torch.zeros(NUMEL))
    loaded.load(load(save(dict(run.peers[0].replica.shared_tensors()))))
    usual = 0.01 * norm(randn(1))
    for state, wanted in [(loaded.states[0], [1.0, 0.0]), (method.init(randn(0)), [1.0, 1.0])]:
        assert method.weights(said(usual, 1000 * usual), [1.0, 1.0], state) == wanted


def test_the_usual_follows_a_moving_mean_and_variance():
    """The equations of the module, in float64, over norms that are all counted."""
    norms = [1.0, 1.5, 0.7, 2.0, 1.1]
    method, anchor = EDiT(**{**OPEN, "warmup": 3}), torch.zeros(8)
    state, mean, squares, deviation = method.init(anchor), norms[0], 0.0, 0.0
    for number, value in enumerate(norms):
        info = RoundInfo(number, tuple(said(value)), (1.0,), ((8,),))
        _, state = method.outer_step(anchor, {"change": torch.ones(8)}, state, info)
        if number:
            off = value - mean
            if number >= method.warmup:  # before, the variance means nothing yet
                deviation += 0.02 * (off * off / squares - deviation)
            mean += 0.02 * off
            squares = 0.98 * (squares + 0.02 * off * (value - mean))
    assert state["usual"].tolist() == pytest.approx([5.0, mean, squares, deviation], rel=1e-5)


@pytest.mark.parametrize("norms", [[1.0, 1e18], [3e-22, 6e-22, 1e18], [1e18, 0.0, 1e18]], ids=str)
def test_what_is_usual_stays_finite_whatever_norms_are_said(norms: list[float]):
    method, anchor = EDiT(**OPEN), torch.zeros(8)
    state = method.init(anchor)
    for number, value in enumerate(norms * 3):
        info = RoundInfo(number, tuple(said(value)), tuple(method.weights(said(value), [1.0], state)), ((8,),))
        _, state = method.outer_step(anchor, {"change": torch.ones(8)}, state, info)
        assert bool(torch.isfinite(state["usual"]).all()), value


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0, 1e19, 1.7e308])
def test_a_norm_that_cannot_be_counts_nothing_from_the_first_round_on(value: float):
    method = EDiT(**OPEN)
    assert method.weights(said(1.0, value), [1.0, 1.0], method.init(randn(0))) == [1.0, 0.0]


def frozen_rounds(run: Learners, rounds: int, times: float) -> list[bool]:
    """Whether each of so many rounds moved the anchor, all norms ``times`` what they were."""
    moved = []
    for number in range(rounds):
        before = run.peers[0].anchor_N
        run.learn({n: times * randn(1000 + 10 * number + n) for n in range(3)})
        run.meet((0, 1, 2))
        moved.append(not torch.equal(run.peers[0].anchor_N, before))
    return moved


def test_a_run_whose_norms_have_grown_for_good_goes_on_after_so_many_rounds():
    run = Learners(EDiT(warmup=6, relearn_after=3), 3, randn(0))
    assert frozen_rounds(run, 4, 0.01) == [True] * 4
    assert frozen_rounds(run, 6, 10.0) == [False] * 3 + [True] * 3
    assert frozen_rounds(run, 2, 10000.0) == [False] * 2, "what is usual was learnt anew"


def test_rounds_of_outliers_count_only_in_a_row():
    run = Learners(EDiT(warmup=6, relearn_after=3), 3, randn(0))
    frozen_rounds(run, 4, 0.01)
    for _ in range(3):
        assert frozen_rounds(run, 2, 10.0) == [False] * 2
        assert frozen_rounds(run, 1, 0.01) == [True]


def test_in_a_gather_a_norm_counts_as_it_was_measured_and_not_as_it_was_said():
    """A peer with a thousandfold learning rate that stated a small norm counted more than all others."""
    honest, lied = (Learners(EDiT(relative_temperature=5.0, warmup=6), 3, randn(0)) for _ in range(2))
    for number in range(5):
        wild = 1000.0 if number == 4 else 1.0
        for run in (honest, lied):
            run.learn({n: 0.01 * randn(10 * number + n) * (wild if n == 2 else 1.0) for n in range(3)})
        honest.meet((0, 1, 2))
        lied.meet((0, 1, 2), {2: struct.pack("<d", 1e-9)})
        assert torch.equal(honest.peers[0].anchor_N, lied.peers[0].anchor_N)
        assert torch.equal(honest.peers[0].replica.states[0]["usual"], lied.peers[0].replica.states[0]["usual"])


@pytest.mark.parametrize("norm_of_all", [1e19, 3e37])
def test_a_norm_that_was_measured_beyond_all_bounds_counts_nothing(norm_of_all: float):
    told = [Contributor(bytes(32), norm=1.0), Contributor(bytes([1]) * 32, norm=norm_of_all)]
    assert EDiT(**OPEN).weights(told, [1.0, 1.0], EDiT().init(randn(0))) == [1.0, 0.0]


def test_two_first_norms_that_are_nearly_equal_do_not_make_everything_usual():
    method, anchor = EDiT(warmup=6), torch.zeros(4)
    state = method.init(anchor)
    for _ in range(3):
        contributors = said(4.0, 4.01, 2.0)
        info = RoundInfo(0, tuple(contributors), tuple(method.weights(contributors, [1.0] * 3, state)))
        _, state = method.outer_step(anchor, {"change": torch.ones(4)}, state, info)
    weights = method.weights(said(4.0, 4.01, 40.0), [1.0] * 3, state)
    assert min(weights[:2]) > 0
    assert weights[2] == 0.0


# ---- e to a power whose bits depend on no C library ----

GOLDEN = {
    -1e-09: "0x1.fffffff769000p-1",
    -0.1: "0x1.cf46d99d52abfp-1",
    -0.5: "0x1.368b2fc6f9527p-1",
    -1.0: "0x1.78b56362cf004p-2",
    -3.141592653589793: "0x1.620227b598f27p-5",
    -10.0: "0x1.7cd79b5647ca5p-15",
    -123.456: "0x1.da9fb9e4ee46ep-179",
    -350.0: "0x1.0a44a100cace2p-505",
    -699.99: "0x1.17bb3c2b1aa08p-1010",
}


def test_it_is_as_near_to_the_exponential_as_it_says():
    draw = random.Random(0)
    powers = [-700.0 * draw.random() for _ in range(5000)] + [-(2.0**-n) for n in range(60)]
    assert max(abs(exp(power) / math.exp(power) - 1) for power in powers) < 1e-12


def test_it_ends_in_zero_and_never_leaves_zero_to_one():
    assert [exp(power) for power in (0.0, -0.0, -700.1, -1e308, -math.inf)] == [1.0, 1.0, 0.0, 0.0, 0.0]
    assert 0.0 < exp(-700.0) < 1e-303
    assert exp(-5e-324) == 1.0


@pytest.mark.parametrize("power", GOLDEN)
def test_its_bits_are_these_on_every_machine(power: float):
    assert exp(power).hex() == GOLDEN[power]
