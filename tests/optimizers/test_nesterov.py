"""Steps along the mean, with and without a momentum: values by hand, torch's and torchft's, and where they converge.

The equation of each method is held in tests/laws/test_equations.py.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from decentral.errors import ConfigError
from decentral.manifest import check_methods, preset_manifest
from decentral.optimizers import OuterMethod, make_outer
from decentral.optimizers.diloco import DiLoCo, outer_learning_rate
from decentral.optimizers.muloco import MuLoCo, outer_settings
from decentral.optimizers.pier import Pier
from decentral.optimizers.slowmo import CO2, Delayed, SlowMo
from decentral.optimizers.streaming import StreamingDiLoCo
from tests.kit.stepping import step, step_of
from tests.kit.tables import method_of


def gaussian(seed: int) -> Tensor:
    return torch.randn(50, generator=torch.Generator().manual_seed(seed))


def walk(outer: OuterMethod, changes: list[Tensor], peers: int = 1) -> list[Tensor]:
    """The anchors, one after another, of peers who all send the same change."""
    anchors = [torch.zeros_like(changes[0])]
    state = outer.init(anchors[0])
    for number, change in enumerate(changes):
        after, state = step(outer, anchors[-1], change, state, peers, number)
        anchors.append(after)
    return anchors


# ---- what is the same as what ----


@pytest.mark.parametrize(
    ("spelling", "other", "rounds"),
    [
        ("local_sgd lr=0.7", "diloco lr=0.7 momentum=0", 3),
        ("sparseloco lr=0.7", "local_sgd lr=0.7", 3),
        ("slowmo lr=0.7 momentum=0", "local_sgd lr=0.7", 3),
        ("demo_sgd lr=0.3 step=mean", "local_sgd lr=0.3", 3),
        ("streaming lr=0.4 momentum=0.9", "diloco lr=0.4 momentum=0.9", 6),
        ("pier lr=0.7 momentum=0.9 rise=0 floor=0.9", "diloco lr=0.7 momentum=0.9", 210),
        ("delayed_nesterov lr=0.7 momentum=0.9 delay=1", "diloco lr=0.7 momentum=0.9", 6),
        ("decoupled lr=0.7 momentum=0.9 mean=plain", "diloco lr=0.7 momentum=0.9", 6),
        ("edit lr=0.7 momentum=0.9 relative_temperature=inf clip=inf", "diloco lr=0.7 momentum=0.9", 6),
        ("a_edit warmup=2", "edit warmup=2", 8),
        ("delayed lr=0.4 momentum=0.6 late=0", "diloco lr=0.4 momentum=0.6", 6),
        ("co2 lr=0.5 momentum=0.4 bound=1e9", "slowmo lr=0.5 momentum=0.4", 6),
        ("partial_updates slices=1", "diloco lr=0.7", 6),
        ("masha parts=1", "local_sgd", 4),
        ("sparta whole=1 lr=0.7 momentum=0.9", "diloco lr=0.7 momentum=0.9", 6),
        ("sparta parts=1 whole=0", "local_sgd", 4),
    ],
)
def test_a_method_without_what_it_adds_is_the_plain_one_bit_for_bit(spelling: str, other: str, rounds: int):
    changes = [gaussian(seed) for seed in range(rounds)]
    pairs = zip(walk(method_of(spelling), changes, 2), walk(method_of(other), changes, 2), strict=True)
    assert all(torch.equal(one, two) for one, two in pairs)


def test_round_0_of_a_step_that_is_late_moves_nothing_and_each_later_one_what_diloco_moved_before():
    changes = [gaussian(seed) for seed in range(8)]
    slow, fast = walk(Delayed(0.4, 0.6), changes), walk(DiLoCo(0.4, 0.6), changes)
    assert torch.equal(slow[1], slow[0])
    assert all(torch.equal(one, other) for one, other in zip(slow[1:], fast, strict=False))


@pytest.mark.parametrize(("name", "is_nesterov"), [("diloco", True), ("slowmo", False)])
def test_powers_of_two_leave_no_rounding_so_torch_agrees_bit_for_bit(name: str, is_nesterov: bool):
    """With others it does not: torch's add(alpha=) may fuse product and sum, and ours must be equal everywhere."""
    changes = [torch.randint(-8, 8, (101,), generator=torch.Generator().manual_seed(s)).float() for s in range(6)]
    parameter = torch.nn.Parameter(torch.zeros(101))
    theirs = torch.optim.SGD([parameter], lr=0.5, momentum=0.5, nesterov=is_nesterov)
    for change, after in zip(changes, walk(make_outer(name, {"lr": 0.5, "momentum": 0.5}), changes)[1:], strict=True):
        parameter.grad = change.clone()
        theirs.step()
        assert torch.equal(after, parameter.detach())


VECTORS = load_file(Path(__file__).parents[1] / "golden/torchft_diloco.safetensors")
REPLICAS, ROUNDS = 2, 6


@pytest.mark.parametrize(("name", "hyper"), [("diloco", {}), ("streaming", {"alpha": 0.5})])
def test_rounds_end_where_torchft_ends_them(name: str, hyper: dict[str, float]):
    """The anchors and live parameters that its DiLoCo class makes of the same inner steps, to 1e-6.

    Of torchft 0.2.0, ``torchft.local_sgd.DiLoCo`` with torch's SGD(0.7, momentum 0.9, Nesterov) outside;
    ``tests/golden/made_by/torchft_diloco.py`` makes the vectors again.
    """
    method = make_outer(name, {"lr": 0.7, "momentum": 0.9, **hyper})
    fragments = sum(key.startswith(f"{name}/start/") for key in VECTORS)
    anchors = [VECTORS[f"{name}/start/{f}"] for f in range(fragments)]
    states = [method.init(anchor) for anchor in anchors]
    for number in range(ROUNDS * fragments):
        f, told = number % fragments, f"{name}/{number}"
        sent = [VECTORS[f"{told}/sent/{n}"] for n in range(REPLICAS)]
        changes = [method.contribute(anchors[f], one) for one in sent]
        anchors[f], states[f] = step_of(method, anchors[f], changes, states[f], number // fragments)
        for n in range(REPLICAS):
            live = method.merge(VECTORS[f"{told}/live/{n}"], sent[n], anchors[f])
            torch.testing.assert_close(live, VECTORS[f"{told}/merged/{n}"], rtol=0, atol=1e-6)


def test_streaming_with_no_overlap_and_alpha_0_leaves_the_anchor():
    anchor, live = gaussian(0), gaussian(1)
    assert torch.equal(StreamingDiLoCo(alpha=0.0).merge(live, live, anchor), anchor)


# ---- values by hand ----


@pytest.mark.parametrize(
    ("spelling", "first", "at_rest"),
    [
        ("diloco lr=0.7 momentum=0.9", 1.33, 7.0),
        ("slowmo lr=1 momentum=0.6", 1.0, 2.5),
        ("heloco lr=0.5 momentum=0.8", 0.5 * (1 + 0.8 * 0.2), 0.9),
        ("local_sgd lr=0.5", 0.5, 0.5),
    ],
)
def test_a_constant_change_moves_so_many_times_itself_at_first_and_at_rest(spelling: str, first: float, at_rest: float):
    change = gaussian(1).double()
    anchors = walk(method_of(spelling), [change] * 300)
    torch.testing.assert_close(-anchors[1], first * change, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(anchors[-2] - anchors[-1], at_rest * change, rtol=1e-5, atol=1e-5)


def test_sequential_nesterov_on_four_commits_would_go_six_times_as_far_as_delayed_nesterov():
    """The figures of its docstring."""
    change = gaussian(1).double()
    ends = [
        walk(method_of(one), [change] * 4)[-1] for one in ("diloco lr=1 momentum=0.9", "delayed_nesterov lr=1 delay=4")
    ]
    torch.testing.assert_close(ends[0], -12.1441 * change, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(ends[1], -1.9 * change, rtol=1e-12, atol=1e-12)


def test_dilocos_learning_rate_follows_the_number_of_peers():
    assert [outer_learning_rate(peers) for peers in (1, 2, 4, 5, 6, 8, 100)] == [0.4, 0.6, 0.6, 0.6, 0.8, 0.8, 0.8]
    with pytest.raises(ConfigError, match="at least 1 peer"):
        outer_learning_rate(0)


def test_mulocos_rate_and_momentum_are_those_of_the_nearest_of_1_8_and_16_peers_unless_they_are_set():
    one, eight, many = (0.7, 0.6), (0.9, 0.8), (1.0, 0.9)
    assert [outer_settings(peers) for peers in (1, 2, 3, 8, 11, 12, 99)] == [one, one, eight, eight, eight, many, many]
    with pytest.raises(ConfigError, match="at least 1 peer"):
        outer_settings(0)
    rows = [(MuLoCo(), 12, many), (MuLoCo(lr=0.5), 8, (0.5, 0.8)), (MuLoCo(momentum=0.5), 8, (0.9, 0.5))]
    for method, peers, settings in rows:
        changes = [gaussian(seed) for seed in range(3)]
        assert torch.equal(walk(method, changes, peers)[-1], walk(DiLoCo(*settings), changes, peers)[-1])


def test_mulocos_preset_has_muon_inside_and_error_feedback_that_forgets():
    manifest = preset_manifest("muloco")
    inner = manifest.inner
    assert (inner.named, inner.steps, inner.momentum, inner.beta1, inner.beta2) == ("muon", 30, 0.9, 0.9, 0.99)
    assert inner.clip == 1.0
    assert manifest.compressor.feedback == "ef(beta=0.9)"
    assert manifest.outer.hyper == {}
    assert "# momentum = 0.8" in manifest.to_toml(), "unset, and shown with an example that TOML can read"
    changed = preset_manifest("muloco", inner={"optimizer": "adamw", "momentum": None, "steps": 10})
    assert (changed.inner.named, changed.inner.steps) == ("adamw", 10)


def test_piers_momentum_rises_in_a_line_stays_falls_in_a_line_and_stays():
    outer = Pier(momentum=0.8, rise=4, decay_from=6, decay_over=4, floor=0.4)
    wanted = [0.2, 0.4, 0.6, 0.8, 0.8, 0.8, 0.8, 0.7, 0.6, 0.5, 0.4, 0.4]
    assert [outer.momentum_at(t) for t in range(12)] == pytest.approx(wanted)
    assert outer.momentum_at(10**9) == 0.4


def test_no_coordinate_of_co2_moves_further_than_lr_times_the_bound():
    changes = [100 * gaussian(seed) for seed in range(6)]
    moves = [(after - before).abs().max() for before, after in pairwise(walk(CO2(lr=0.5, bound=0.01), changes))]
    assert float(max(moves)) <= 0.5 * 0.01 * 1.001
    assert float(moves[-1]) == pytest.approx(0.5 * 0.01, rel=1e-3)


def test_a_key_of_before_is_refused_and_told_whose_it_is():
    with pytest.raises(
        ConfigError, match=r"unknown key outer\.late; it is one of delayed, and co2 has momentum, penalty"
    ):
        check_methods(preset_manifest("co2", outer={"late": 1}))


# ---- where a step converges ----
#
# One coordinate of which a round solves a share: the change is that share of the distance to the optimum.


def far_off(outer: OuterMethod, solved: float, rounds: int = 3000, last: int = 100) -> float:
    """Of the first distance, the most in the last rounds; it ends early where it grows beyond all bounds."""
    x = torch.ones(1, dtype=torch.float64)
    state, distances = outer.init(x), []
    for number in range(rounds):
        x, state = step(outer, x, solved * x, state, number=number)
        distances.append(float(x.abs()))
        if distances[-1] > 1e6:
            break
    return max(distances[-last:])


@pytest.mark.parametrize("solved", [0.01, 0.02, 0.04])
def test_a_momentum_that_swings_past_the_optimum_comes_to_rest_with_restarts(solved: float):
    left = [far_off(DiLoCo(lr=0.7, momentum=0.99, restart=restart), solved, 200, 40) for restart in (10, 0)]
    assert left[0] < 0.5 * left[1]


@pytest.mark.parametrize(("share", "converges"), [(0.99, True), (1.01, False)])
def test_slowmo_converges_up_to_twice_one_plus_beta(share: float, converges: bool):
    assert (far_off(SlowMo(lr=share * 2 * 1.6, momentum=0.6), 1.0) < 1) == converges


def radius(lr: float, momentum: float, solved: float) -> float:
    """The largest factor by which (x, m, g') of a delayed Nesterov step grows per round."""
    pending = np.array([0.0, 0.0, 1.0])
    m = np.array([0.0, momentum, 0.0]) + pending
    move = lr * (pending + momentum * m)
    return float(max(abs(np.linalg.eigvals(np.stack([[1.0, 0.0, 0.0] - move, m, [solved, 0.0, 0.0]])))))


@pytest.mark.parametrize(
    ("lr", "momentum", "diverges"),
    [(0.99, 0.0, False), (1.01, 0.0, True), (0.7, 0.9, True), (0.26, 0.9, True), (0.25, 0.9, False),
     (0.35, 0.8, True), (0.34, 0.8, False), (0.5, 0.6, True), (0.48, 0.6, False)],
)  # fmt: skip
def test_delayed_nesterov_diverges_where_its_text_says_so(lr: float, momentum: float, diverges: bool):
    assert (radius(lr, momentum, 1.0) > 1) == diverges
    assert (far_off(Delayed(lr=lr, momentum=momentum), 1.0) > 1) == diverges


def test_delayeds_preset_converges_whatever_a_round_solves():
    keys = preset_manifest("delayed").outer.hyper
    assert max(radius(keys["lr"], keys["momentum"], share) for share in np.linspace(0.001, 1.0, 500)) < 1


def grows_while_training_goes_on(outer: CO2, solved: float) -> bool:
    """Where each commit comes at the end of the next round, and what was learnt meanwhile is carried on."""
    anchor = live = torch.ones(1, dtype=torch.float64)
    state, last = outer.init(anchor), []
    live = live - solved * live
    for number in range(600):
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


def test_co2s_preset_converges_whatever_a_round_solves_and_however_late_commits_come():
    keys = preset_manifest("co2").outer.hyper
    outer = CO2(lr=keys["lr"], momentum=keys["momentum"], bound=1e300)
    assert not any(grows_while_training_goes_on(outer, share) for share in (0.01, 0.1, 0.3, 0.5, 0.8, 1.0))
