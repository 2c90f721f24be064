"""A step that is one round late, and one for which nobody waits: what they are the same as, and what delay costs."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from decentral.errors import ConfigError
from decentral.manifest import check_methods, preset_manifest
from decentral.optimizers import OuterMethod
from decentral.optimizers.diloco import DiLoCo
from decentral.optimizers.slowmo import CO2, Delayed, SlowMo
from tests.kit.stepping import step


def gaussian(seed: int) -> Tensor:
    return torch.randn(50, generator=torch.Generator().manual_seed(seed))


def walk(outer: OuterMethod, changes: list[Tensor]) -> list[Tensor]:
    anchors = [gaussian(99)]
    state = outer.init(anchors[0])
    for number, change in enumerate(changes):
        after, state = step(outer, anchors[-1], change, state, number=number)
        anchors.append(after)
    return anchors


def test_round_0_moves_nothing_and_each_later_one_what_diloco_moved_before():
    changes = [gaussian(seed) for seed in range(8)]
    slow, fast = walk(Delayed(0.4, 0.6), changes), walk(DiLoCo(0.4, 0.6), changes)
    assert torch.equal(slow[1], slow[0])
    assert all(torch.equal(one, other) for one, other in zip(slow[1:], fast, strict=False))


@pytest.mark.parametrize(
    ("method", "plain"),
    [(Delayed(0.4, 0.6, late=0), DiLoCo(0.4, 0.6)), (CO2(0.5, 0.4, bound=1e9), SlowMo(0.5, 0.4))],
    ids=["delayed", "co2"],
)
def test_without_what_it_adds_it_is_the_plain_method_bit_for_bit(method: OuterMethod, plain: OuterMethod):
    changes = [gaussian(seed) for seed in range(8)]
    pairs = zip(walk(method, changes), walk(plain, changes), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def test_a_key_of_before_is_refused_and_told_whose_it_is():
    with pytest.raises(
        ConfigError, match=r"unknown key outer\.late; it is one of delayed, and co2 has momentum, penalty"
    ):
        check_methods(preset_manifest("co2", outer={"late": 1}))


def test_a_change_is_divided_by_the_penalty():
    changes = [gaussian(seed) for seed in range(6)]
    whole = walk(CO2(bound=1e9), changes)
    halved = walk(CO2(bound=1e9, penalty=2.0), changes)
    for one, other in zip(pairwise(whole), pairwise(halved), strict=True):
        torch.testing.assert_close((one[1] - one[0]) / 2, other[1] - other[0], rtol=1e-4, atol=1e-6)


def test_no_coordinate_moves_further_than_lr_times_the_bound():
    changes = [100 * gaussian(seed) for seed in range(6)]
    moves = [(after - before).abs().max() for before, after in pairwise(walk(CO2(lr=0.5, bound=0.01), changes))]
    assert float(max(moves)) <= 0.5 * 0.01 * 1.001
    assert float(moves[-1]) == pytest.approx(0.5 * 0.01, rel=1e-3)


def radius(lr: float, momentum: float, solved: float) -> float:
    """The largest factor by which (x, m, g') grows per round, where a round solves ``solved`` of the distance."""
    pending = np.array([0.0, 0.0, 1.0])
    m = np.array([0.0, momentum, 0.0]) + pending
    move = lr * (pending + momentum * m)
    return float(max(abs(np.linalg.eigvals(np.stack([[1.0, 0.0, 0.0] - move, m, [solved, 0.0, 0.0]])))))


def grows(outer: Delayed, solved: float) -> bool:
    """Whether a coordinate of which a round solves so much ends further away than it began."""
    x = torch.ones(1, dtype=torch.float64)
    state, last = outer.init(x), []
    for number in range(3000):
        x, state = step(outer, x, solved * x, state, number=number)
        last = [*last[-99:], float(x.abs())]
        if last[-1] > 1e6:
            break
    return max(last) > 1.0


def grows_while_training_goes_on(outer: CO2, solved: float) -> bool:
    """The same where each commit comes at the end of the next round, and what was learnt meanwhile is carried on."""
    anchor = live = torch.ones(1, dtype=torch.float64)
    state, last = outer.init(anchor), []
    live = live - solved * live
    for number in range(3000):
        sent, change = live, anchor - live
        live = live - solved * live
        anchor, state = step(outer, anchor, change, state, number=number)
        live = outer.merge(live, sent, anchor)
        last = [*last[-99:], float(anchor.abs())]
        if last[-1] > 1e6:
            break
    return max(last) > 1.0


@pytest.mark.parametrize("momentum", [0.0, 0.4, 0.6, 0.8])
def test_co2_converges_with_the_latest_commits_where_its_text_says_so(momentum: float):
    for share in (0.98, 1.02):
        outer = CO2(lr=share * 2 * (1 - momentum**2), momentum=momentum, bound=1e300)
        assert grows_while_training_goes_on(outer, 1.0) == (share > 1)
        assert not grows_while_training_goes_on(outer, 0.5), "less solved in a round bears more"


@pytest.mark.parametrize(
    ("lr", "momentum", "diverges"),
    [(0.99, 0.0, False), (1.01, 0.0, True), (0.7, 0.9, True), (0.26, 0.9, True), (0.25, 0.9, False),
     (0.35, 0.8, True), (0.34, 0.8, False), (0.5, 0.6, True), (0.48, 0.6, False)],
)  # fmt: skip
def test_delayed_nesterov_diverges_where_its_text_says_so(lr: float, momentum: float, diverges: bool):
    assert (radius(lr, momentum, 1.0) > 1) == diverges
    assert grows(Delayed(lr=lr, momentum=momentum), 1.0) == diverges


def test_delayeds_preset_converges_whatever_a_round_solves():
    keys = preset_manifest("delayed").outer.hyper
    assert max(radius(keys["lr"], keys["momentum"], share) for share in np.linspace(0.001, 1.0, 500)) < 1


def test_co2s_preset_converges_whatever_a_round_solves_and_however_late_commits_come():
    keys = preset_manifest("co2").outer.hyper
    outer = CO2(lr=keys["lr"], momentum=keys["momentum"], bound=1e300)
    assert not any(grows_while_training_goes_on(outer, share) for share in (0.01, 0.1, 0.3, 0.5, 0.8, 1.0))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Delayed(late=2), "late must be 0 or 1"),
        (lambda: CO2(penalty=0.5), "penalty divides what is stale"),
        (lambda: CO2(bound=0.0), "bound, of a coordinate of the momentum, must be above 0"),
        (lambda: CO2(bound=float("nan")), "must be above 0"),
        (lambda: Delayed(lr=0.0), "lr must be above 0"),
    ],
)
def test_what_cannot_be_is_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()
