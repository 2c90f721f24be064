"""How many inner steps a peer makes before it contributes, by steps or by time, and what becomes of fewer and more."""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor

from decentral.errors import ConfigError
from decentral.manifest import check_methods, preset_manifest
from decentral.manifest.terms import Inner
from decentral.optimizers.diloco import DiLoCo
from decentral.optimizers.edit import AEDiT
from decentral.optimizers.shared_moments import DESLoc
from decentral.optimizers.streaming import StreamingDiLoCo
from decentral.replica.contribution import Contribution
from decentral.rounds.local_state import CommittedUpdate
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
from tests.training.scenes import SEEN, ZEROS, Scene, record, same

# ---- the pace of a machine ----


def paced(seconds: float, kind: str | None = "speed", clock: float | None = None, least: int = 1) -> Pace:
    """Of 32 steps, on a machine whose steps take so long."""
    pace = Pace(Inner(pace=kind, seconds=clock), 32, least)  # type: ignore[arg-type]
    for n in range(40):
        pace.stepped(seconds if n % 8 else 50 * seconds)  # an evaluation now and then
    return pace


PACES = {
    "half the speed of the others, half the steps": (paced(0.2), [3.2, 3.2], 16),
    "of one other, too": (paced(0.2), [3.2], 16),
    "twice their speed, all of them": (paced(0.1), [6.4, 6.4], 32),
    "no pace": (paced(0.2, None), [0.1, 0.1], 32),
    "an equal one": (paced(0.2, "equal"), [0.1, 0.1], 32),
    "nobody is hurried by what equal machines differ by": (paced(0.1), [2.95, 2.95], 32),
    "but by more": (paced(0.1), [2.5, 2.5], 25),
    "nor before the others are known": (paced(0.1), [], 32),
    "nor before its own speed is": (Pace(Inner(pace="speed"), 32, 1), [0.1], 32),
    "one that lies hurries nobody": (paced(0.1), [0.0, 3.2], 32),
    "nor among many: the lower median over all, this one included": (paced(0.1), [0.0, 3.2, 3.2, 3.2], 32),
    "half of the peers make all steps": (paced(0.2), [3.2, 3.2, 6.4], 16),
    "no fewer than a sixteenth": (paced(0.1), [0.0], 32 // SLOWEST),
    "and more than go on while a round is in flight": (paced(0.1, least=5), [0.0], 5),
    "but never more than all": (Pace(Inner(pace="speed"), 1, 4), [1.0], 1),
}


@pytest.mark.parametrize("case", PACES)
def test_a_peer_makes_as_many_steps_as_the_lower_half_of_the_others_leave_it_time_for(case: str):
    pace, others, steps = PACES[case]
    assert pace.steps(others) == steps


def test_one_slow_step_at_the_beginning_is_not_taken_for_the_machine():
    """The first was compiled, or waited for company; its seconds made a fast peer contribute after 2 steps of 32."""
    pace = Pace(Inner(pace="speed"), 32, 1)
    for seconds in (60.0, 0.1):
        pace.stepped(seconds)
        assert pace.steps([3.2, 3.2]) == 32
    pace.stepped(0.1)
    assert pace.steps([3.2, 3.2]) == 32
    assert pace.steps([1.6, 1.6]) == 16, "by now it is known"


def test_by_the_clock_a_peer_makes_what_fits_into_the_seconds():
    assert [paced(step, "clock", 1.6).steps([]) for step in (0.01, 0.05, 0.1, 0.2, 5.0)] == [32, 32, 16, 8, 2]


def test_a_schedule_is_due_after_the_paced_steps():
    schedule = Scene().pace
    for due in (False, True):
        schedule.stepped()
        assert schedule.timing.due == due
        schedule.timing.paced = 2
    assert schedule.timing.due
    schedule.timing.paced = 0
    assert not schedule.timing.due


@pytest.mark.parametrize(("steps", "times"), [(8, 1.0), (4, 2.0), (2, 4.0), (1, 8.0)])
def test_a_short_contribution_is_lengthened_to_all_steps_and_says_how_many_it_made(steps: int, times: float):
    """Weighed by its tokens every inner step of the run counts alike: H sum(change_i) / sum(steps_i)."""
    one = Scene()
    one.pace = make_schedule(preset_manifest("diloco", inner={"steps": 8, "pace": "speed"}), SEEN)
    one.pace.timing.paced = steps
    one.train(steps)
    made = one.send(10, one.live_N + 0.5)
    same(made.gradient_N, torch.full((8,), 0.5 * times))
    same(made.live_progress_N, torch.full((8,), 0.5))  # what was learnt
    assert (made.steps, made.tokens) == (steps, 10 * steps)
    assert torch.equal(made.local_N, one.live_N), "what is merged later is measured from what was trained"


def test_lengthening_is_bounded_and_only_for_who_is_in_time_and_of_a_method_that_lengthens():
    one, plain = Scene(interval=64, lengthens=True), Scene(paced=1)
    one.train(1)
    one.pace.timing.paced = 1
    same(one.send(1, one.live_N + 1.0).gradient_N, torch.full((8,), float(SLOWEST)))
    one.pace.timing.withdraw()
    one.pace.progress[0].missed = 1
    same(one.send(1, one.live_N + 1.0).gradient_N, torch.ones(8))
    plain.train(1)
    same(plain.send(1, plain.live_N + 1.0).gradient_N, torch.ones(8))


@pytest.mark.parametrize(("paced", "times"), [(0, 1.0), (4, 1.0), (2, 2.0)])
def test_in_the_first_cycle_of_fragments_only_a_slow_peer_is_lengthened_and_by_how_much_slower_it_is(paced, times):
    """The first fragment had H / 4 steps behind it, and was sent 4 times too long by every peer."""
    terms = preset_manifest("streaming", inner={"steps": 16, "pace": "speed"}, outer={"fragments": 4, "overlap": 1})
    one = Scene()
    one.pace = make_schedule(terms, SEEN)
    one.pace.timing.paced = paced
    one.train(paced or 4)
    same(one.send(1, one.live_N + 0.5).gradient_N, torch.full((8,), 0.5 * times))


def test_a_peer_that_made_more_than_its_pace_while_it_waited_is_lengthened_to_all_steps_and_no_further():
    one = Scene(interval=8, lengthens=True)
    for steps, times in ((4, 2.0), (6, 8 / 6), (12, 1.0)):
        one.train(steps - one.pace.timing.since)
        one.pace.timing.paced = 4
        same(one.send(1, one.live_N + 1.0).gradient_N, torch.full((8,), times))
        one.pace.timing.withdraw()


# ---- terms of a pace ----


@pytest.mark.parametrize("inner", [{"pace": "speed"}, {"pace": "clock", "seconds": 9.0}])
def test_a_method_that_says_by_itself_when_it_is_due_has_no_pace(inner):
    """A-EDiT's contributions were lengthened, up to 16 times, for the time having come before H steps."""
    with pytest.raises(ConfigError, match=r"inner.pace = .* does not fit outer.method a_edit: it decides by itself"):
        check_methods(preset_manifest("a_edit", inner=inner))
    check_methods(preset_manifest("a_edit", inner={"pace": "equal"}))
    check_methods(preset_manifest("edit", inner=inner))


def test_gossip_has_no_pace_for_a_peer_waits_for_one_partner():
    with pytest.raises(ConfigError, match=r'inner.pace = "speed" does not fit exchange.kind = "pair"'):
        check_methods(preset_manifest("noloco", inner={"pace": "speed"}))
    check_methods(preset_manifest("streaming", inner={"pace": "speed"}))


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


# ---- when it is due, and what a commit leaves ----


def test_a_fragment_is_due_every_interval_and_not_while_one_is_in_flight():
    one = Scene()
    one.train(3)
    assert not one.pace.timing.due
    one.train(1)
    assert one.pace.timing.due
    one.send()
    one.train(10)
    assert not one.pace.timing.due


@pytest.mark.parametrize("steps", [4, 2])  # two: a deadline came
def test_a_named_contribution_without_overlap_leaves_exactly_the_anchor(steps: int):
    one, after_N = Scene(), torch.arange(8.0)
    one.train(steps)
    one.commit(one.send(), after_N)
    assert torch.equal(one.live_N, after_N)
    assert (one.pace.timing.since, one.pace.seen, one.pace.timing.due) == (0, b"\1" * 32, False)


def test_our_own_commit_waits_for_the_overlap_others_do_not_and_steps_of_meanwhile_are_carried():
    one, after_N = Scene(overlap=3), torch.arange(8.0)
    one.train(4)
    local_N = one.live_N
    ours = one.update(one.send(), after_N)
    one.train(2)
    assert not one.pace.timing.may_merge(ours)
    assert one.pace.timing.may_merge(one.update(None))
    one.train(1)
    assert one.pace.timing.may_merge(ours)
    one.model.write(0, local_N + 1.0)
    one.pace.merge(ours, one.model)
    same(one.live_N, after_N + 1.0)
    assert one.pace.timing.since == 3


def test_a_commit_that_passes_us_by_keeps_our_progress_and_leaves_it_due():
    one = Scene()
    one.train(4)
    live_N = one.live_N
    one.send()
    one.commit(None, torch.ones(8))
    same(one.live_N, live_N + 1.0)
    assert one.pace.timing.since == 4
    assert one.pace.timing.due


def test_streaming_mixes_local_and_anchor_by_alpha():
    one = Scene(StreamingDiLoCo(alpha=0.25), overlap=1)
    one.train(4)
    local_N, made = one.live_N, one.send()
    one.train(1)
    one.commit(made, torch.ones(8))
    same(one.live_N, 0.25 * local_N + 0.75)


def test_a_record_that_only_changes_the_membership_moves_no_parameter():
    one = Scene()
    live_N = one.live_N
    assert not one.pace.merge(CommittedUpdate(record(frames=False), b"3" * 32, 0, None, None, None), one.model)
    assert torch.equal(one.live_N, live_N)
    assert one.pace.seen == b"3" * 32


def test_rounds_that_were_given_up_are_due_again_as_steps_and_as_progress():
    one = Scene()
    one.train(1)
    live_N, owed_N = one.live_N, torch.full((8,), 5.0)
    given_up = CommittedUpdate(None, b"4" * 32, 0, owed_N, torch.ones(8), None, reclaimed_steps=8)
    assert one.pace.merge(given_up, one.model)
    same(one.live_N, torch.ones(8) + live_N - owed_N)
    assert one.pace.timing.since == 9
    assert one.pace.timing.due


def test_the_deadline_makes_a_slow_peer_contribute_what_it_has_but_never_twice_and_never_nothing():
    one = Scene()
    pace, soon = one.pace, (one.pace.seen, 1.0)
    assert not pace.due_early(soon, 2.0), "not one inner step yet"
    one.train(1)
    assert not pace.timing.due
    assert not pace.due_early(None, 2.0)
    assert not pace.due_early((b"n" * 32, 1.0), 2.0), "a round that is not merged here yet"
    assert not pace.due_early(soon, 0.5), "there is time for another step"
    assert pace.due_early(soon, 2.0)
    one.send()
    assert not pace.due_early(soon, 2.0)


def test_tokens_are_counted_for_the_steps_behind_a_fragment_and_steps_since_the_last_contribution():
    one = Scene(num_fragments=2)
    for turn in range(4):
        one.train(4)
        made = one.send(10)
        assert (made.steps, made.tokens) == (4, 40 if turn == 0 else 80), "8 steps lie between two rounds of a fragment"
        one.commit(made)
        one.train(4)
        one.pace.timing.since = 0  # the other fragment's turn, taken alike


# ---- models that keep less than was learnt ----


class Halves:
    """A model in bfloat16, as one flat fragment."""

    def __init__(self, wanted: Tensor) -> None:
        self.live = wanted.to(torch.bfloat16)

    def read(self, fragment: int) -> Tensor:
        return self.live.float()

    def write(self, fragment: int, flat_N: Tensor) -> None:
        self.live = flat_N.to(torch.bfloat16)

    def keeps(self, fragment: int) -> bool:
        return False

    def in_place(self, fragment: int) -> None:
        return None


def rounded(seed: int = 0) -> tuple[Scene, Tensor, Tensor]:
    """A scene of such a model, its anchor, and one after it."""
    generator = torch.Generator().manual_seed(seed)
    anchor_N, after_N = (torch.randn(1000, generator=generator) for _ in range(2))
    one = Scene()
    one.model = Halves(anchor_N)  # type: ignore[assignment]
    one.pace.put(one.model, 0, anchor_N)
    return one, anchor_N, after_N


def test_the_rounding_of_a_model_in_bfloat16_is_no_progress():
    one, anchor_N, _ = rounded()
    one.train(4)
    assert not torch.equal(one.live_N, anchor_N)
    assert not one.send(1, anchor_N).gradient_N.any()


@pytest.mark.parametrize("named", [True, False])
def test_progress_in_bfloat16_is_what_was_learnt_whether_a_commit_takes_it_or_passes_it_by(named: bool):
    one, anchor_N, after_N = rounded()
    one.model.write(0, one.live_N - 0.5)
    one.train(4)
    moved_N = pseudo_gradient(one.pace.progress[0], anchor_N, one.live_N)
    one.commit(one.send(1, anchor_N) if named else None, after_N, anchor_N)
    left_N = pseudo_gradient(one.pace.progress[0], after_N, one.live_N)
    torch.testing.assert_close(left_N, torch.zeros(1000) if named else moved_N, rtol=0, atol=1e-6)


def test_a_restart_goes_on_with_the_count_and_the_rounding():
    one, anchor_N, _ = rounded()
    one.train(3)
    moved_N, again = pseudo_gradient(one.pace.progress[0], anchor_N, one.live_N), Scene().pace
    held, memory = {"anchor/0": anchor_N, **tensors_of(one.pace)}, memory_of(one.pace)
    resume(again, one.model, held, memory, [anchor_N + 1.0], outer_steps=1)
    torch.testing.assert_close(
        pseudo_gradient(again.progress[0], anchor_N + 1.0, one.live_N), moved_N, rtol=0, atol=1e-6
    )
    assert (again.timing.since, again.progress[0].steps, again.progress[0].missed) == (3, 3, 1)


# ---- a peer that was held back, or away ----


def usual_then_missed(one: Scene) -> Contribution:
    """One contribution in time, then a round that passes by."""
    one.train(4)
    usual = one.send()
    one.commit(usual)
    one.learn(1.0)
    one.train(4)
    one.commit(None)
    return usual


def test_a_peer_that_was_held_back_for_a_round_sends_no_more_than_one_although_no_round_passed_it_by():
    one = Scene()
    one.train(12)
    moved_N = pseudo_gradient(one.pace.progress[0], ZEROS, one.live_N)
    made = one.send(10)
    same(made.gradient_N, moved_N / 3)
    assert made.tokens == 40
    one.commit(made)
    (away,) = one.pace.absences
    same(away.dropped_N, moved_N - made.gradient_N)
    assert (away.steps, away.counted) == (12, 4)
    assert torch.equal(one.live_N, ZEROS), "what is not sent is given up, not carried"


@pytest.mark.parametrize("took", [True, False])
def test_what_an_adopted_branch_took_without_counting_is_told_like_that_of_a_commit(took):
    """Another branch left it where it was, and nothing is told."""
    one = Scene()
    one.train(12)
    moved_N = pseudo_gradient(one.pace.progress[0], ZEROS, one.live_N)
    made = one.send()
    before_N, steps = (ZEROS - moved_N, -12) if took else (ZEROS, 0)
    adopted = CommittedUpdate(None, b"1" * 32, 0, before_N, ZEROS, None, reclaimed_steps=steps, took=took)
    one.pace.merge(adopted, one.model)
    assert [(away.steps, away.counted) for away in one.pace.absences] == ([(12, 4)] if took else [])
    for away in one.pace.absences:
        same(away.dropped_N, moved_N - made.gradient_N)
    same(one.live_N, ZEROS if took else -moved_N)


def test_steps_of_a_fast_peer_while_its_contribution_is_in_flight_count_in_full():
    one = Scene(overlap=1)
    for _ in range(3):
        one.train(4)
        made = one.send()
        one.train(20)  # the others are slow
        one.commit(made)
        assert one.pace.timing.due
        assert one.pace.progress[0].steps == 20
        made = one.send()
        assert made.trained == 20
        one.commit(made)
    assert not one.pace.absences


def test_an_outlying_norm_after_an_absence_is_dropped_where_the_usual_one_is_known():
    one = Scene()
    usual_then_missed(one)
    one.learn(100.0)
    assert one.take() is None
    assert one.pace.timing.sent_at is None
    one.pace.restart(one.model, [ZEROS], one.pace.away_too_long(0))
    assert torch.equal(one.live_N, ZEROS)
    assert [away.counted for away in one.pace.absences] == [0]


def test_a_peer_that_trained_on_through_one_long_round_brings_nothing_rather_than_a_thin_share():
    one = Scene()
    one.train(4 * 4)
    one.commit(None)
    assert one.take() is None


def test_a_peer_that_was_held_back_is_shortened_to_its_usual_norm_where_that_is_known():
    one = Scene()
    one.train(4)
    usual = one.send()
    one.commit(usual)
    one.learn(50.0)
    one.train(400)
    assert float(one.send().gradient_N.norm()) == pytest.approx(float(usual.gradient_N.norm()), rel=1e-5)


def test_rounds_in_which_nothing_moved_tell_no_usual_norm():
    one = Scene()
    for _ in range(3):
        one.learn(0.0)
        one.train(4)
        one.commit(one.send())
    one.train(12)
    one.send()
    assert one.pace.progress[0].usual_norm is None


def test_a_blend_keeps_nothing_of_what_an_absence_gave_up():
    one, after_N = Scene(StreamingDiLoCo(alpha=0.5)), torch.full((8,), 0.25)
    usual_then_missed(one)
    made = one.send()
    assert one.pace.progress[0].missed == 1
    one.commit(made, after_N)
    assert one.pace.absences
    same(one.live_N, 0.5 * (ZEROS - made.gradient_N) + 0.5 * after_N)


@pytest.mark.parametrize("absent", [False, True])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_taken_whole_also_after_an_absence_so_that_whoever_checks_it_names_it(absent, bad):
    one = Scene()
    if absent:
        usual_then_missed(one)
    one.train(4)
    one.learn(bad)
    made = one.send()
    assert not made.is_finite
    assert not bool(torch.isfinite(made.gradient_N).all())


def test_what_was_measured_and_is_sent_as_it_was_need_not_be_looked_at_again():
    one, slow = Scene(), Scene(lengthens=True, paced=2)
    one.train(4)
    assert one.send().is_finite
    slow.train(2)  # of a slow peer more is sent than was measured, and may overflow
    assert not slow.send().is_finite


def test_what_the_inner_optimizer_lacks_is_known_after_a_restart():
    """It has no place for moments before its first step; a checkpoint may be written until then."""
    method = DESLoc(first_moment=2, second_moment=3)
    pace, again = (SyncSchedule(1, 0, method, b"0" * 32, num_fragments=2) for _ in range(2))
    note_replayed(pace, range(2, 5))  # fragment 0 in its steps 1 and 2, fragment 1 in its step 1
    assert pace.unadopted == {0: ["change", "exp_avg", "exp_avg_sq"], 1: ["change", "exp_avg"]}
    recall_unadopted(again, json.loads(json.dumps(memory_of(pace))))
    assert again.unadopted == pace.unadopted
    plain = SyncSchedule(1, 0, DiLoCo(), b"0" * 32)
    note_replayed(plain, range(5))
    assert not plain.unadopted


# ---- a method that goes by time ----


def by_time(seconds: float = 10.0) -> Scene:
    return Scene(AEDiT(seconds=seconds, least=1), interval=20)


@pytest.mark.parametrize(("each", "steps"), [(1.0, 10), (4.0, 3), (0.5, 20), (0.01, 20)])
def test_slow_and_fast_peers_contribute_at_one_time_with_the_steps_they_made(each: float, steps: int):
    one = by_time()
    while not one.pace.timing.due:
        one.train(1, each)
    assert one.pace.timing.since == steps


def test_a_commit_that_names_the_contribution_begins_the_time_anew_from_where_it_was_sent():
    one = by_time()
    one.train(10, 1.0)
    made = one.send()
    one.train(3, 1.0)  # while the round is in flight
    one.commit(made, torch.ones(8))
    assert (one.pace.timing.since, one.pace.timing.seconds) == (3, 3.0)
    one.train(6, 1.0)
    assert not one.pace.timing.due
    one.train(1, 1.0)
    assert one.pace.timing.due
    one.send()
    one.commit(None)
    assert one.pace.timing.due, "a round passed it by"
    one.pace.restart(one.model, [ZEROS], [0])
    assert one.pace.timing.seconds == 0.0, "it starts over"


def test_time_without_a_step_is_no_contribution_nor_are_steps_before_it_is_due_an_absence():
    one = by_time()
    one.pace.timing.seconds += 1000.0
    assert not one.pace.timing.due
    one.pace.stepped()
    assert one.pace.timing.due
    other = by_time(seconds=5.0)
    other.train(5, 1.0)
    assert other.pace.timing.held == 0
    other.train(3, 1.0)
    assert other.pace.timing.held == 3


def test_a_checkpoint_keeps_the_time_and_one_from_before_has_none():
    one, resumed, old = by_time(), by_time(), by_time()
    one.train(8, 1.0)
    memory = json.loads(json.dumps(memory_of(one.pace)))
    resume(resumed.pace, resumed.model, {"anchor/0": ZEROS}, memory, [ZEROS], 0)
    assert (resumed.pace.timing.since, resumed.pace.timing.seconds) == (8, 8.0)
    del memory["seconds"]
    resume(old.pace, old.model, {"anchor/0": ZEROS}, memory, [ZEROS], 0)
    assert (old.pace.timing.since, old.pace.timing.seconds) == (8, 0.0)


def test_a_method_that_counts_steps_does_not_look_at_the_time():
    one = Scene(interval=20)
    one.train(19, 1000.0)
    assert not one.pace.timing.due
    one.train(1)
    assert one.pace.timing.due
