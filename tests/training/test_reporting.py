"""What a peer says of its rounds, and of itself while its training thread waits."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from decentral.peer.status import state_of
from decentral.replica.pair_step import GossipStep
from decentral.rounds.local_state import Decision
from decentral.training.outer_loop import LoopControl
from decentral.training.reporting import NOTABLE_WAIT, Reporter, is_long, usual
from decentral.wire.keys import peer_name
from tests.kit.updates import update

ME, OTHER = b"me", b"other"
BOTH = (ME, OTHER)


class Told:
    """A reporter by a clock of its own, and what it told."""

    def __init__(self, now: float = 0.0) -> None:
        self.now, self.kinds, self.fields = now, list[str](), list[dict[str, Any]]()
        self.reporter = Reporter(self._tell, ME, lambda: self.now)
        self.counters = self.reporter.counters

    def _tell(self, kind: str, fields: dict[str, Any]) -> None:
        self.kinds.append(kind)
        self.fields.append(fields)

    def round(self, contributed: bool = True, *, seconds: float = 0.0, members: tuple[bytes, ...] = BOTH, at: int = 0):
        self.now += seconds
        self.reporter.round_ended(update(members, contributed, at))

    def swap(self, step: int, partner: bytes | None = OTHER, *, matched: bool = True, seconds: float = 0.0) -> None:
        self.now += seconds
        x_N = torch.zeros(2)
        taken = GossipStep(0, step, x_N, x_N, {}, {}, b"", partner=partner, matched=matched)
        self.reporter.swap_ended(taken)


def test_the_short_wait_of_every_round_is_training_and_a_long_one_is_waiting() -> None:
    one = Told(now=100.0)
    directory, ready = SimpleNamespace(live=lambda: {OTHER: None}), SimpleNamespace(is_set=lambda: True)
    node: Any = SimpleNamespace(state="training", resting=SimpleNamespace(reasons=()), ready=ready, directory=directory)

    def state() -> str:
        return state_of(node, one.counters, LoopControl(), done=False)

    one.reporter.waits(True)
    assert state() == "training"
    one.now += NOTABLE_WAIT + 0.1
    assert state() == "waiting"
    one.reporter.waits(False)
    assert state() == "training"
    assert one.counters.waited == pytest.approx(NOTABLE_WAIT + 0.1)


@pytest.mark.parametrize(
    ("waits", "wait", "told"),
    [
        ([], 1.9, False),
        ([], 2.1, True),  # of the first round nobody knows how long it takes
        ([20.0], 29.0, False),
        ([20.0], 31.0, True),
        ([0.0, 20.0, 0.0, 20.0], 20.0, False),  # every second round
        ([20.0, 3600.0, 21.0], 30.0, False),
        ([20.0, 3600.0, 21.0], 32.0, True),  # a stall of an hour is no measure
    ],
)
def test_a_wait_is_long_by_those_of_the_last_rounds(waits: list[float], wait: float, told: bool) -> None:
    assert is_long(wait, waits) is told


def test_a_peer_that_waits_in_every_round_for_slower_ones_does_not_change_its_word_in_each() -> None:
    one, words = Told(now=100.0), []
    for _ in range(6):
        one.now += 5.0
        one.reporter.waits(True)
        one.now += 19.0
        words.append(one.counters.stands_long)
        one.now += 1.0
        one.reporter.waits(False)
        one.counters.measure_round()
        one.counters.count_round(True, 1)
    assert words == [True, False, False, False, False, False]


def test_rounds_that_ended_while_a_peer_was_away_are_none_that_it_missed_no_hang_and_none_that_took_long() -> None:
    """Back after an hour it was called stalled, and the hour a round's length."""
    one = Told()
    for members in ([BOTH] * 5, [(OTHER,)] * 120, [BOTH]):
        for each in members:
            one.round(ME in each, seconds=30.0, members=each)
            assert one.counters.since_round == 0.0
    assert one.counters.usual_round == 30.0
    assert one.counters.outcomes == [True] * 6
    one.round(False)
    assert one.counters.outcomes == [True] * 6 + [False]


def test_gossip_steps_in_which_nobody_meets_are_none_that_a_peer_missed() -> None:
    """Late merging meets in one step of ten at first, so that a healthy peer was shown as late."""
    one = Told()
    for step, (partner, matched) in enumerate([(None, False), (OTHER, True), (None, False), (None, True)]):
        one.swap(step, partner, matched=matched, seconds=3.0)
    assert one.counters.outcomes == [True, False]
    assert one.counters.usual_round == 3.0, "the time of each step is known all the same"


def test_the_merge_that_ends_a_gossip_run_is_no_round_beside_its_steps() -> None:
    """A run of 6 rounds ended with "you contributed to 7 of the last 7"."""
    one = Told()
    for step in range(6):
        one.swap(step)
    one.reporter.round_ended(update(BOTH, True), of_pairs=True)
    assert one.counters.outcomes == [True] * 6
    assert one.kinds == ["pair"] * 6 + ["commit"]


def test_rounds_of_a_branch_that_is_given_up_are_none_that_a_peer_contributed_to() -> None:
    """It contributed to 95 of the last 100, of which the run had five."""
    one = Told()
    for made in range(100):
        one.round(made != 3, at=made)
    one.reporter.branch_left(5)
    assert one.counters.outcomes == [True, True, True, False, True]
    one.reporter.branch_left(5)  # each fragment's move of one adoption says so
    one.round(at=200)
    assert len(one.counters.outcomes) == 6
    one.reporter.branch_left(0)  # nobody knows where
    assert one.counters.outcomes == []


def test_bytes_per_round_are_those_of_the_rounds_that_are_told_of() -> None:
    """All bytes ever sent were shared out among the last hundred rounds: they seemed to grow from there on."""
    one, sent = Told(), 0
    for number in range(400):
        sent += 5_000 if number < 100 else 1_000
        one.round()
        if number % 3 == 0 or number == 99:  # rounds may be faster than anybody looks
            per_round = one.counters.traffic.per_round(sent, one.counters.num_outcomes)
        if number == 99:
            assert per_round == 5_000
    assert per_round == 1_000
    assert one.counters.traffic.per_round(sent + 700, one.counters.num_outcomes) == 1_000, (
        "what the round in progress sends counts with it"
    )


def test_the_wait_for_company_is_no_part_of_the_first_round() -> None:
    """Who had waited for a quarter of an hour had hours left after the first round of seconds."""
    one = Told()
    for seconds, wanted in ((0.0, 2), (900.0, 2), (0.2, 0), (5.0, 0)):
        one.now += seconds
        one.counters.waits_for(wanted)
    one.round()
    assert one.counters.usual_round == pytest.approx(5.0)
    assert one.counters.wanted_members == 0


def test_rounds_that_a_peer_catches_up_with_do_not_tell_how_long_one_takes() -> None:
    """Back after an hour it had "1 s left" of a run of hours."""
    one = Told()
    for _ in range(20):
        one.round(False, seconds=0.01)
    assert one.counters.own_round is one.counters.next_round_in is None, "not known yet"
    for _ in range(3):
        one.round(seconds=30.0)
    assert one.counters.usual_round == pytest.approx(30.0)
    one.now += 10.0
    assert one.counters.next_round_in == pytest.approx(20.0)


def test_a_round_tells_its_seconds_how_many_of_them_training_stood_still_and_how_it_was_decided() -> None:
    one, decided = Told(), update(BOTH, True)
    decided.decision = Decision(b"l" * 32, 2, 3, 0.5, 0.25)
    for waited in (2.0, 1.0):
        one.now += 8.0
        one.reporter.waits(True)
        one.now += waited
        one.reporter.round_ended(decided)  # told while the loop still stands
        one.reporter.waits(False)
    keys = ("seconds", "waited", "leader", "ballot", "votes", "sending", "applying")
    how = (peer_name(b"l" * 32), 2, 3, 0.5, 0.25)
    assert one.kinds == ["commit"] * 2
    assert [tuple(fields[key] for key in keys) for fields in one.fields] == [(10.0, 2.0, *how), (9.0, 1.0, *how)]
    one.round()
    assert "leader" not in one.fields[2], "it was adopted"


def test_a_round_tells_how_long_copying_held_the_training_thread() -> None:
    one = Told()
    assert usual(one.counters.held_seconds) is None
    for holds in ((0.25, 0.5), (0.125,), ()):
        for seconds in holds:
            one.reporter.holds(seconds)
        one.round()
    assert [fields["held"] for fields in one.fields] == [0.75, 0.125, 0.0]
    assert usual(one.counters.held_seconds) == 0.125
