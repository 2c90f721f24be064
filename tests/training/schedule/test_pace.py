"""How many inner steps a peer makes before it contributes, and what becomes of fewer."""

from __future__ import annotations

import pytest
import torch

from decentral.errors import ConfigError
from decentral.manifest import check_methods, preset_manifest
from decentral.manifest.terms import Inner
from decentral.optimizers.diloco import DiLoCo
from decentral.training.live_model import LiveModel
from decentral.training.schedule import SLOWEST, Pace, SyncSchedule, make_schedule


def paced(seconds: float, kind: str | None = "speed", clock: float | None = None, least: int = 1) -> Pace:
    """Of 32 steps, on a machine whose steps take so long."""
    pace = Pace(Inner(pace=kind, seconds=clock), 32, least)  # type: ignore[arg-type]
    for n in range(40):
        pace.stepped(seconds if n % 8 else 50 * seconds)  # an evaluation now and then
    return pace


def test_a_peer_at_half_the_speed_of_the_others_makes_half_the_steps():
    assert paced(0.2).steps([3.2, 3.2]) == 16
    assert paced(0.2).steps([3.2]) == 16
    assert paced(0.1).steps([6.4, 6.4]) == 32, "and one of twice their speed all of them"


@pytest.mark.parametrize("kind", [None, "equal"])
def test_without_a_pace_all_make_all_steps(kind):
    assert paced(0.2, kind).steps([0.1, 0.1]) == 32


def test_nobody_is_hurried_by_what_equal_machines_differ_by_nor_before_the_others_are_known():
    assert paced(0.1).steps([2.95, 2.95]) == 32
    assert paced(0.1).steps([2.5, 2.5]) == 25
    assert paced(0.1).steps([]) == 32
    assert Pace(Inner(pace="speed"), 32, 1).steps([0.1]) == 32, "its own speed is not known yet"


def test_one_slow_step_at_the_beginning_is_not_taken_for_the_machine():
    """The first was compiled, or waited for company; its seconds made a fast peer contribute after 2 steps of 32."""
    pace = Pace(Inner(pace="speed"), 32, 1)
    for seconds in (60.0, 0.1):
        pace.stepped(seconds)
        assert pace.steps([3.2, 3.2]) == 32
    pace.stepped(0.1)
    assert pace.steps([3.2, 3.2]) == 32
    assert pace.steps([1.6, 1.6]) == 16, "by now it is known"


def test_half_of_the_peers_make_all_steps_and_one_that_lies_hurries_nobody():
    """The lower median over all, this one included."""
    assert paced(0.1).steps([0.0, 3.2]) == 32
    assert paced(0.1).steps([0.0, 3.2, 3.2, 3.2]) == 32
    assert paced(0.2).steps([3.2, 3.2, 6.4]) == 16


def test_a_peer_makes_no_fewer_than_a_sixteenth_and_more_than_go_on_while_a_round_is_in_flight():
    assert paced(0.1).steps([0.0]) == 32 // SLOWEST
    assert paced(0.1, least=5).steps([0.0]) == 5
    assert Pace(Inner(pace="speed"), 1, 4).steps([1.0]) == 1


def test_by_the_clock_a_peer_makes_what_fits_into_the_seconds():
    assert [paced(step, "clock", 1.6).steps([]) for step in (0.01, 0.05, 0.1, 0.2, 5.0)] == [32, 32, 16, 8, 2]


def test_a_schedule_is_due_after_the_paced_steps():
    schedule = SyncSchedule(4, 0, DiLoCo(), bytes(32))
    for due in (False, True):
        schedule.stepped()
        assert schedule.due == due
        schedule.paced = 2
    assert schedule.due
    schedule.paced = 0
    assert not schedule.due


@pytest.mark.parametrize(("steps", "times"), [(8, 1.0), (4, 2.0), (2, 4.0), (1, 8.0)])
def test_a_short_contribution_is_lengthened_to_all_steps_and_says_how_many_it_made(steps: int, times: float):
    """Weighed by its tokens every inner step of the run counts alike: H sum(change_i) / sum(steps_i)."""
    manifest = preset_manifest("diloco", inner={"steps": 8, "pace": "speed"})
    schedule, model = make_schedule(manifest, bytes(32)), LiveModel(torch.nn.Linear(3, 2), 1, None)
    anchor_N, schedule.paced = model.read(0) + 0.5, steps
    for _ in range(steps):
        schedule.stepped()
    made = schedule.take(model, 0, anchor_N, bytes(32), 10, outer_step=0)
    assert made is not None
    torch.testing.assert_close(made.gradient_N, torch.full((8,), 0.5 * times), rtol=1e-6, atol=1e-6)
    assert (made.steps, made.tokens) == (steps, 10 * steps)
    assert torch.equal(made.local_N, model.read(0)), "what is merged later is measured from what was trained"


def test_lengthening_is_bounded_and_only_for_who_is_in_time():
    schedule, model = (
        SyncSchedule(64, 0, DiLoCo(), bytes(32), lengthens=True),
        LiveModel(torch.nn.Linear(3, 2), 1, None),
    )
    schedule.stepped()
    schedule.paced = 1
    made = schedule.take(model, 0, model.read(0) + 1.0, bytes(32), 1, outer_step=0)
    assert made is not None
    torch.testing.assert_close(made.gradient_N, torch.full((8,), float(SLOWEST)), rtol=1e-5, atol=1e-5)
    schedule.withdrawn()
    schedule.progress[0].missed = 1
    late = schedule.take(model, 0, model.read(0) + 1.0, bytes(32), 1, outer_step=0)
    assert late is not None
    torch.testing.assert_close(late.gradient_N, torch.ones(8), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("paced", "times"), [(0, 1.0), (4, 1.0), (2, 2.0)])
def test_in_the_first_cycle_of_fragments_only_a_slow_peer_is_lengthened_and_by_how_much_slower_it_is(paced, times):
    """The first fragment had H / 4 steps behind it, and was sent 4 times too long by every peer."""
    terms = preset_manifest("streaming", inner={"steps": 16, "pace": "speed"}, outer={"fragments": 4, "overlap": 1})
    schedule, model = make_schedule(terms, bytes(32)), LiveModel(torch.nn.Linear(3, 2), 1, None)
    schedule.paced = paced
    for _ in range(paced or 4):
        schedule.stepped()
    made = schedule.take(model, 0, model.read(0) + 0.5, bytes(32), 1, outer_step=0)
    assert made is not None
    torch.testing.assert_close(made.gradient_N, torch.full((8,), 0.5 * times), rtol=1e-5, atol=1e-5)


def test_a_peer_that_made_more_than_its_pace_while_it_waited_is_lengthened_to_all_steps_and_no_further():
    schedule, model = SyncSchedule(8, 0, DiLoCo(), bytes(32), lengthens=True), LiveModel(torch.nn.Linear(3, 2), 1, None)
    for steps, times in ((4, 2.0), (6, 8 / 6), (12, 1.0)):
        while schedule.since < steps:
            schedule.stepped()
        schedule.paced = 4
        made = schedule.take(model, 0, model.read(0) + 1.0, bytes(32), 1, outer_step=0)
        assert made is not None
        torch.testing.assert_close(made.gradient_N, torch.full((8,), times), rtol=1e-5, atol=1e-5)
        schedule.withdrawn()


def test_what_is_sent_longer_says_what_was_learnt():
    model = LiveModel(torch.nn.Linear(3, 2), 1, None)
    for lengthens, times in ((False, 1.0), (True, 4.0)):
        schedule = SyncSchedule(8, 0, DiLoCo(), bytes(32), lengthens=lengthens, paced=2)
        schedule.stepped()
        schedule.stepped()
        made = schedule.take(model, 0, model.read(0) + 1.0, bytes(32), 1, outer_step=0)
        assert made is not None
        torch.testing.assert_close(made.gradient_N, torch.full((8,), times), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(made.measured_N, torch.ones(8), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("inner", [{"pace": "speed"}, {"pace": "clock", "seconds": 9.0}])
def test_a_method_that_says_by_itself_when_it_is_due_has_no_pace(inner):
    """A-EDiT's contributions were lengthened, up to 16 times, for the time having come before H steps."""
    with pytest.raises(ConfigError, match=r"inner.pace = .* does not fit outer.method a_edit: it decides by itself"):
        check_methods(preset_manifest("a_edit", inner=inner))
    check_methods(preset_manifest("a_edit", inner={"pace": "equal"}))
    check_methods(preset_manifest("edit", inner=inner))


def test_an_equal_pace_is_the_terms_of_before_and_another_one_is_another_run():
    before = preset_manifest("diloco")
    assert before.digest == before.changed(inner={"pace": None}).digest
    assert before.weighting == before.changed(inner={"pace": "clock", "seconds": 9.0}).weighting == "equal"
    assert before.changed(inner={"pace": "speed"}).weighting == "tokens"
    assert before.changed(inner={"pace": "speed"}, outer={"weighting": "equal"}).weighting == "equal"
    assert len({before.digest, *(before.changed(inner={"pace": pace}).digest for pace in ("equal", "speed"))}) == 3


@pytest.mark.parametrize(
    ("inner", "message"),
    [
        ({"pace": "clock"}, "go together"),
        ({"seconds": 3.0}, "go together"),
        ({"pace": "speed", "seconds": 3.0}, "go together"),
        ({"pace": "fast"}, "inner.pace"),
    ],
)
def test_a_pace_that_cannot_be_meant_is_refused(inner, message):
    with pytest.raises(ConfigError, match=message):
        preset_manifest("diloco", inner=inner)


def test_gossip_has_no_pace_for_a_peer_waits_for_one_partner():
    with pytest.raises(ConfigError, match=r'inner.pace = "speed" does not fit exchange.kind = "pair"'):
        check_methods(preset_manifest("noloco", inner={"pace": "speed"}))
    check_methods(preset_manifest("streaming", inner={"pace": "speed"}))
