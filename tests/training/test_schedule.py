"""How many inner steps a peer makes before it contributes, and what becomes of fewer."""

from __future__ import annotations

import json

import pytest
import torch

from decentral.errors import ConfigError
from decentral.manifest import check_methods, preset_manifest
from decentral.manifest.terms import Inner
from decentral.optimizers.diloco import DiLoCo
from decentral.optimizers.shared_moments import DESLoc
from decentral.optimizers.streaming import StreamingDiLoCo
from decentral.replica.contribution import Contribution
from decentral.rounds.local_state import CommittedUpdate
from decentral.training.live_model import LiveModel
from decentral.training.progress import pseudo_gradient
from decentral.training.schedule import (
    SLOWEST,
    Pace,
    SyncSchedule,
    make_schedule,
    memory_of,
    note_replayed,
    recall_unadopted,
    resume,
    tensors_of,
)
from decentral.wire.messages import FrameRef, Record


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
    schedule.withdraw()
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
        schedule.withdraw()


def test_what_is_sent_longer_says_what_was_learnt():
    model = LiveModel(torch.nn.Linear(3, 2), 1, None)
    for lengthens, times in ((False, 1.0), (True, 4.0)):
        schedule = SyncSchedule(8, 0, DiLoCo(), bytes(32), lengthens=lengthens, paced=2)
        schedule.stepped()
        schedule.stepped()
        made = schedule.take(model, 0, model.read(0) + 1.0, bytes(32), 1, outer_step=0)
        assert made is not None
        torch.testing.assert_close(made.gradient_N, torch.full((8,), times), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(made.live_progress_N, torch.ones(8), rtol=1e-5, atol=1e-5)


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


PEER = b"p" * 32


def record(*, frames: bool = True, round_: int = 1) -> Record:
    refs = (FrameRef(PEER, bytes(32), 0, 1, 1),) if frames else ()
    zero = bytes(32)
    return Record(zero, 0, round_, 0, 0, 0, zero, zero, (PEER,), refs, (), (), (PEER,), False)


@pytest.fixture
def model() -> LiveModel:
    torch.manual_seed(0)  # else what was drawn by tests before decides how long an update is, and whether it counts
    module = torch.nn.Linear(3, 2)
    return LiveModel(module, 1, None)


def schedule(overlap: int = 0, alpha: float | None = None) -> SyncSchedule:
    method = DiLoCo() if alpha is None else StreamingDiLoCo(alpha=alpha)
    return SyncSchedule(interval=4, overlap=overlap, method=method, seen=bytes(32))


def contribution(local: torch.Tensor) -> Contribution:
    return Contribution(0, bytes(32), local, torch.zeros_like(local), 4, 4, trained=4)


def send(pace: SyncSchedule, model: LiveModel) -> Contribution:
    made = pace.take(model, 0, torch.zeros(8), bytes(32), 1, outer_step=0)
    assert made is not None
    return made


def step(pace: SyncSchedule, times: int) -> None:
    for _ in range(times):
        pace.stepped()


def test_a_fragment_is_due_every_interval_and_not_while_one_is_in_flight(model):
    pace = schedule()
    step(pace, 3)
    assert not pace.due
    step(pace, 1)
    assert pace.due
    send(pace, model)
    step(pace, 10)
    assert not pace.due


def test_a_named_contribution_without_overlap_leaves_exactly_the_anchor(model):
    pace = schedule()
    step(pace, 4)
    local = model.read(0)
    send(pace, model)
    after = torch.arange(8.0)
    pace.merge(CommittedUpdate(record(), b"1" * 32, 0, torch.zeros(8), after, contribution(local)), model)
    assert torch.equal(model.read(0), after)
    assert pace.since == 0
    assert pace.seen == b"1" * 32


def test_steps_made_while_the_round_was_in_flight_are_carried(model):
    pace = schedule(overlap=2)
    local = model.read(0)
    step(pace, 4)
    send(pace, model)
    step(pace, 2)
    model.write(0, local + 1.0)
    pace.merge(CommittedUpdate(record(), b"1" * 32, 0, torch.zeros(8), torch.arange(8.0), contribution(local)), model)
    torch.testing.assert_close(model.read(0), torch.arange(8.0) + 1.0)
    assert pace.since == 2


def test_our_own_commit_waits_for_the_overlap_and_others_do_not(model):
    pace = schedule(overlap=3)
    step(pace, 4)
    send(pace, model)
    ours = CommittedUpdate(record(), b"1" * 32, 0, torch.zeros(8), torch.ones(8), contribution(model.read(0)))
    step(pace, 2)
    assert not pace.may_merge(ours)
    assert pace.may_merge(CommittedUpdate(record(), b"2" * 32, 0, torch.zeros(8), torch.ones(8), None))
    step(pace, 1)
    assert pace.may_merge(ours)


def test_a_commit_that_passes_us_by_keeps_our_progress_and_leaves_it_due(model):
    pace = schedule()
    step(pace, 4)
    before, live = torch.zeros(8), model.read(0)
    send(pace, model)
    pace.merge(CommittedUpdate(record(), b"1" * 32, 0, before, torch.ones(8), None), model)
    torch.testing.assert_close(model.read(0) - torch.ones(8), live - before)
    assert pace.since == 4
    assert pace.due


def test_streaming_mixes_local_and_anchor_by_alpha(model):
    pace = schedule(overlap=1, alpha=0.25)
    step(pace, 4)
    local = model.read(0)
    send(pace, model)
    step(pace, 1)
    pace.merge(CommittedUpdate(record(), b"1" * 32, 0, torch.zeros(8), torch.ones(8), contribution(local)), model)
    torch.testing.assert_close(model.read(0), 0.25 * local + 0.75)


def test_a_record_that_only_changes_the_membership_moves_no_parameter(model):
    pace = schedule()
    live = model.read(0)
    assert not pace.merge(CommittedUpdate(record(frames=False), b"3" * 32, 0, None, None, None), model)
    assert torch.equal(model.read(0), live)
    assert pace.seen == b"3" * 32


def test_rounds_that_were_given_up_are_due_again_as_steps_and_as_progress(model):
    pace = schedule()
    step(pace, 1)
    before, live, owed = torch.zeros(8), model.read(0), torch.full((8,), 5.0)
    assert pace.merge(CommittedUpdate(None, b"4" * 32, 0, before + owed, torch.ones(8), None, reclaimed_steps=8), model)
    torch.testing.assert_close(model.read(0), torch.ones(8) + live - owed)
    assert pace.since == 9
    assert pace.due


def test_the_deadline_makes_a_slow_peer_contribute_what_it_has_but_never_twice_and_never_nothing(model):
    pace = schedule()
    soon = (pace.seen, 1.0)
    assert not pace.due_early(soon, 2.0), "not one inner step yet"
    step(pace, 1)
    assert not pace.due
    assert not pace.due_early(None, 2.0)
    assert not pace.due_early((b"n" * 32, 1.0), 2.0), "a round that is not merged here yet"
    assert not pace.due_early(soon, 0.5), "there is time for another step"
    assert pace.due_early(soon, 2.0)
    send(pace, model)
    assert not pace.due_early(soon, 2.0)


def test_fewer_steps_are_accounted_for_by_the_commit_that_names_them(model):
    pace = schedule()
    step(pace, 2)
    local = model.read(0)
    send(pace, model)
    pace.merge(CommittedUpdate(record(), b"1" * 32, 0, torch.zeros(8), torch.ones(8), contribution(local)), model)
    assert pace.since == 0
    assert not pace.due


class Halves:
    """A model in bfloat16, as one flat fragment."""

    def __init__(self, wanted: torch.Tensor) -> None:
        self.live = wanted.to(torch.bfloat16)

    def read(self, fragment: int) -> torch.Tensor:
        return self.live.float()

    def write(self, fragment: int, flat_N: torch.Tensor) -> None:
        self.live = flat_N.to(torch.bfloat16)

    def keeps(self, fragment: int) -> bool:
        return False

    def in_place(self, fragment: int) -> None:
        return None


def test_the_rounding_of_a_model_in_bfloat16_is_no_progress():
    anchor = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    pace, model = schedule(), Halves(anchor)
    pace.put(model, 0, anchor)
    step(pace, 4)
    assert not torch.equal(model.read(0), anchor)
    made = pace.take(model, 0, anchor, bytes(32), 1, outer_step=0)
    assert made is not None
    assert not made.gradient_N.any()


@pytest.mark.parametrize("named", [True, False])
def test_progress_in_bfloat16_is_what_was_learnt_whether_a_commit_takes_it_or_passes_it_by(named: bool):
    generator = torch.Generator().manual_seed(0)
    anchor, after = (torch.randn(1000, generator=generator) for _ in range(2))
    pace, model = schedule(), Halves(anchor)
    pace.put(model, 0, anchor)
    learnt = torch.full((1000,), 0.5)
    model.write(0, model.read(0) - learnt)
    step(pace, 4)
    moved = pseudo_gradient(pace.progress[0], anchor, model.read(0))
    made = pace.take(model, 0, anchor, bytes(32), 1, outer_step=0) if named else None
    pace.merge(CommittedUpdate(record(), b"1" * 32, 0, anchor, after, made), model)
    left = pseudo_gradient(pace.progress[0], after, model.read(0))
    torch.testing.assert_close(left, torch.zeros(1000) if named else moved, rtol=0, atol=1e-6)


def test_a_restart_goes_on_with_the_count_and_the_rounding(model):
    anchor, halves = torch.randn(8, generator=torch.Generator().manual_seed(0)), Halves(torch.zeros(8))
    pace = schedule()
    pace.put(halves, 0, anchor)
    step(pace, 3)
    moved = pseudo_gradient(pace.progress[0], anchor, halves.read(0))
    again = schedule()
    resume(again, halves, {"anchor/0": anchor, **tensors_of(pace)}, memory_of(pace), [anchor + 1.0], outer_steps=1)
    torch.testing.assert_close(
        pseudo_gradient(again.progress[0], anchor + 1.0, halves.read(0)), moved, rtol=0, atol=1e-6
    )
    assert (again.since, again.progress[0].steps, again.progress[0].missed) == (3, 3, 1)


def test_tokens_are_counted_for_the_steps_behind_a_fragment_and_steps_since_the_last_contribution(model):
    pace = SyncSchedule(interval=4, overlap=0, method=DiLoCo(), seen=bytes(32), num_fragments=2)
    zeros = torch.zeros(8)
    for turn in range(4):
        step(pace, 4)
        made = pace.take(model, 0, zeros, bytes(32), 10, outer_step=0)
        assert made is not None
        assert (made.steps, made.tokens) == (4, 40 if turn == 0 else 80), "8 steps lie between two rounds of a fragment"
        pace.merge(CommittedUpdate(record(), b"1" * 32, 0, zeros, zeros, made), model)
        step(pace, 4)
        pace.since = 0  # the other fragment's turn, taken alike


def test_a_peer_that_was_held_back_for_a_round_sends_no_more_than_one_although_no_round_passed_it_by(model):
    pace, zeros = schedule(), torch.zeros(8)
    step(pace, 12)
    moved = pseudo_gradient(pace.progress[0], zeros, model.read(0))
    made = pace.take(model, 0, zeros, bytes(32), 10, outer_step=0)
    assert made is not None
    torch.testing.assert_close(made.gradient_N, moved / 3)
    assert made.tokens == 40
    pace.merge(CommittedUpdate(record(), b"1" * 32, 0, zeros, zeros, made), model)
    (away,) = pace.absences
    torch.testing.assert_close(away.dropped_N, moved - made.gradient_N)
    assert (away.steps, away.counted) == (12, 4)
    assert torch.equal(model.read(0), zeros), "what is not sent is given up, not carried"


@pytest.mark.parametrize("took", [True, False])
def test_what_an_adopted_branch_took_without_counting_is_told_like_that_of_a_commit(model, took):
    """Another branch left it where it was, and nothing is told."""
    pace, zeros = schedule(), torch.zeros(8)
    step(pace, 12)
    moved = pseudo_gradient(pace.progress[0], zeros, model.read(0))
    made = send(pace, model)
    before, steps = (zeros - moved, -12) if took else (zeros, 0)
    adopted = CommittedUpdate(None, b"1" * 32, 0, before, zeros, None, reclaimed_steps=steps, took=took)
    pace.merge(adopted, model)
    assert [(away.steps, away.counted) for away in pace.absences] == ([(12, 4)] if took else [])
    for away in pace.absences:
        torch.testing.assert_close(away.dropped_N, moved - made.gradient_N)
    torch.testing.assert_close(model.read(0), zeros if took else -moved)


def test_steps_of_a_fast_peer_while_its_contribution_is_in_flight_count_in_full(model):
    pace, zeros = schedule(overlap=1), torch.zeros(8)
    for _ in range(3):
        step(pace, 4)
        made = send(pace, model)
        step(pace, 20)  # the others are slow
        pace.merge(CommittedUpdate(record(), b"1" * 32, 0, zeros, zeros, made), model)
        assert pace.due
        assert pace.progress[0].steps == 20
        made = send(pace, model)
        assert made.trained == 20
        pace.merge(CommittedUpdate(record(), b"1" * 32, 0, zeros, zeros, made), model)
    assert not pace.absences


def test_an_outlying_norm_after_an_absence_is_dropped_where_the_usual_one_is_known(model):
    pace, zeros = schedule(), torch.zeros(8)
    step(pace, 4)
    usual = send(pace, model)
    pace.merge(CommittedUpdate(record(), b"1" * 32, 0, zeros, zeros, usual), model)
    step(pace, 4)
    pace.merge(CommittedUpdate(record(), b"2" * 32, 0, zeros, zeros, None), model)
    model.write(0, torch.full((8,), 100.0))
    assert pace.take(model, 0, zeros, bytes(32), 1, outer_step=0) is None
    assert pace.sent_at is None
    pace.restart(model, [zeros], pace.away_too_long(0))
    assert torch.equal(model.read(0), zeros)
    assert [away.counted for away in pace.absences] == [0]


def test_a_peer_that_trained_on_through_one_long_round_brings_nothing_rather_than_a_thin_share(model):
    pace, zeros = schedule(), torch.zeros(8)
    step(pace, 4 * 4)
    pace.merge(CommittedUpdate(record(), b"1" * 32, 0, zeros, zeros, None), model)
    assert pace.take(model, 0, zeros, bytes(32), 1, outer_step=0) is None


def test_a_peer_that_was_held_back_is_shortened_to_its_usual_norm_where_that_is_known(model):
    pace, zeros = schedule(), torch.zeros(8)
    step(pace, 4)
    usual = float(send(pace, model).gradient_N.norm())
    pace.merge(CommittedUpdate(record(), b"1" * 32, 0, zeros, zeros, contribution(model.read(0))), model)
    model.write(0, torch.full((8,), 50.0))
    step(pace, 400)
    made = pace.take(model, 0, zeros, bytes(32), 1, outer_step=0)
    assert made is not None
    assert float(made.gradient_N.norm()) == pytest.approx(usual, rel=1e-5)


def missed_round(pace: SyncSchedule, model: LiveModel) -> None:
    """One contribution in time, then a round that passes by."""
    zeros = torch.zeros(8)
    step(pace, 4)
    pace.merge(CommittedUpdate(record(), b"1" * 32, 0, zeros, zeros, send(pace, model)), model)
    model.write(0, torch.ones(8))
    step(pace, 4)
    pace.merge(CommittedUpdate(record(), b"2" * 32, 0, zeros, zeros, None), model)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_taken_whole_after_an_absence_so_that_whoever_checks_it_names_it(model, bad: float):
    pace = schedule()
    missed_round(pace, model)
    model.write(0, torch.full((8,), bad))
    made = pace.take(model, 0, torch.zeros(8), bytes(32), 1, outer_step=0)
    assert made is not None
    assert not bool(torch.isfinite(made.gradient_N).all())


def test_what_was_measured_and_is_sent_as_it_was_need_not_be_looked_at_again(model):
    pace, slow = schedule(), schedule()
    step(pace, 4)
    assert send(pace, model).is_finite
    slow.lengthens, slow.paced = True, 2  # of a slow peer more is sent than was measured, and may overflow
    step(slow, 2)
    assert not send(slow, model).is_finite


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_not_taken_for_finite(model, bad: float):
    pace = schedule()
    step(pace, 4)
    model.write(0, torch.full((8,), bad))
    assert not send(pace, model).is_finite


def test_rounds_in_which_nothing_moved_tell_no_usual_norm(model):
    pace, zeros = schedule(), torch.zeros(8)
    for _ in range(3):
        model.write(0, zeros)
        step(pace, 4)
        pace.merge(CommittedUpdate(record(), b"1" * 32, 0, zeros, zeros, send(pace, model)), model)
    step(pace, 12)
    made = pace.take(model, 0, zeros, bytes(32), 1, outer_step=0)
    assert made is not None
    assert pace.progress[0].usual_norm is None


def test_a_blend_keeps_nothing_of_what_an_absence_gave_up(model):
    pace, zeros, after = schedule(alpha=0.5), torch.zeros(8), torch.full((8,), 0.25)
    missed_round(pace, model)
    made = send(pace, model)
    assert pace.progress[0].missed == 1
    pace.merge(CommittedUpdate(record(), b"3" * 32, 0, zeros, after, made), model)
    assert pace.absences
    torch.testing.assert_close(model.read(0), 0.5 * (zeros - made.gradient_N) + 0.5 * after)


def test_what_the_inner_optimizer_lacks_is_known_after_a_restart():
    """It has no place for moments before its first step; a checkpoint may be written until then."""
    method = DESLoc(first_moment=2, second_moment=3)
    pace = SyncSchedule(1, 0, method, b"0" * 32, num_fragments=2)
    note_replayed(pace, range(2, 5))  # fragment 0 in its steps 1 and 2, fragment 1 in its step 1
    assert pace.unadopted == {0: ["change", "exp_avg", "exp_avg_sq"], 1: ["change", "exp_avg"]}
    again = SyncSchedule(1, 0, method, b"0" * 32, num_fragments=2)
    recall_unadopted(again, json.loads(json.dumps(memory_of(pace))))
    assert again.unadopted == pace.unadopted
    plain = SyncSchedule(1, 0, DiLoCo(), b"0" * 32)
    note_replayed(plain, range(5))
    assert not plain.unadopted
