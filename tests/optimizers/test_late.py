"""The two methods that apply a round's changes one round late: what that is the same as, and what it costs."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from decentral.errors import ConfigError
from decentral.manifest import preset_manifest
from decentral.optimizers import OuterMethod, make_outer
from decentral.optimizers.diloco import DiLoCo
from decentral.optimizers.slowmo import CO2, Delayed, SlowMo
from tests.optimizers.stepping import step

PROMPT = [  # a method that is late, the one that is not
    (Delayed(lr=0.4, momentum=0.6), DiLoCo(lr=0.4, momentum=0.6)),
    (CO2(lr=0.5, momentum=0.4, bound=1e9), SlowMo(lr=0.5, momentum=0.4)),
]
with_its_prompt = pytest.mark.parametrize(("late", "prompt"), PROMPT, ids=["delayed", "co2"])


def gaussian(seed: int) -> Tensor:
    return torch.randn(50, generator=torch.Generator().manual_seed(seed))


def walk(outer: OuterMethod, changes: list[Tensor]) -> list[Tensor]:
    anchors = [gaussian(99)]
    state = outer.init(anchors[0])
    for number, change in enumerate(changes):
        after, state = step(outer, anchors[-1], change, state, number=number)
        anchors.append(after)
    return anchors


@with_its_prompt
def test_round_0_moves_nothing_and_each_later_one_what_the_prompt_method_moved_before(late, prompt):
    changes = [gaussian(seed) for seed in range(8)]
    slow, fast = walk(late, changes), walk(prompt, changes)
    assert torch.equal(slow[1], slow[0])
    assert all(torch.equal(one, other) for one, other in zip(slow[1:], fast, strict=False))


@with_its_prompt
def test_not_late_it_is_the_prompt_method_bit_for_bit(late, prompt):
    keys = {"lr": late.lr, "momentum": late.momentum, "late": 0} | ({"bound": 1e9} if late.name == "co2" else {})
    changes = [gaussian(seed) for seed in range(8)]
    pairs = zip(walk(make_outer(late.name, keys), changes), walk(prompt, changes), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


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


def radius(lr: float, momentum: float, solved: float, nesterov: bool) -> float:
    """The largest factor by which (x, m, g') grows per round, where a round solves ``solved`` of the distance."""
    pending = np.array([0.0, 0.0, 1.0])
    m = np.array([0.0, momentum, 0.0]) + pending
    move = lr * (pending + momentum * m if nesterov else m)
    return float(max(abs(np.linalg.eigvals(np.stack([[1.0, 0.0, 0.0] - move, m, [solved, 0.0, 0.0]])))))


def grows(outer: Delayed | CO2, solved: float) -> bool:
    """Whether a coordinate of which a round solves so much ends further away than it began."""
    x = torch.ones(1, dtype=torch.float64)
    state, last = outer.init(x), []
    for number in range(3000):
        x, state = step(outer, x, solved * x, state, number=number)
        last = [*last[-99:], float(x.abs())]
        if last[-1] > 1e6:
            break
    return max(last) > 1.0


@pytest.mark.parametrize("momentum", [0.0, 0.4, 0.6, 0.9])
@pytest.mark.parametrize("solved", [0.1, 1.0])
def test_co2_converges_if_and_only_if_the_rate_is_below_one_minus_the_momentum(momentum: float, solved: float):
    for share in (0.98, 1.02):
        outer = CO2(lr=share * (1 - momentum) / solved, momentum=momentum, bound=1e300)
        assert (radius(outer.lr, momentum, solved, nesterov=False) > 1) == (share > 1)
        assert grows(outer, solved) == (share > 1)


@pytest.mark.parametrize(
    ("lr", "momentum", "diverges"),
    [(0.99, 0.0, False), (1.01, 0.0, True), (0.7, 0.9, True), (0.26, 0.9, True), (0.25, 0.9, False),
     (0.35, 0.8, True), (0.34, 0.8, False), (0.5, 0.6, True), (0.48, 0.6, False)],
)  # fmt: skip
def test_delayed_nesterov_diverges_where_its_text_says_so(lr: float, momentum: float, diverges: bool):
    assert (radius(lr, momentum, 1.0, nesterov=True) > 1) == diverges
    assert grows(Delayed(lr=lr, momentum=momentum), 1.0) == diverges


@pytest.mark.parametrize("name", ["delayed", "co2"])
def test_a_presets_terms_converge_whatever_a_round_solves(name: str):
    keys = preset_manifest(name).outer.hyper
    shares = np.linspace(0.001, 1.0, 500)
    assert max(radius(keys["lr"], keys["momentum"], share, name == "delayed") for share in shares) < 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Delayed(late=2), "late must be 0 or 1"),
        (lambda: CO2(late=-1), "late must be 0 or 1"),
        (lambda: CO2(penalty=0.5), "penalty divides what is stale"),
        (lambda: CO2(bound=0.0), "bound, of a coordinate of the momentum, must be above 0"),
        (lambda: CO2(bound=float("nan")), "must be above 0"),
        (lambda: Delayed(lr=0.0), "lr must be above 0"),
    ],
)
def test_what_cannot_be_is_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()
