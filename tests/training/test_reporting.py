"""What a peer says of itself while its training thread waits."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from decentral.peer.status import state_of
from decentral.replica.pair_step import GossipStep
from decentral.rounds.local_state import Decision
from decentral.training.reporting import NOTABLE_WAIT, Reporter
from decentral.wire.keys import peer_name


def test_the_short_wait_of_every_round_is_training_and_a_long_one_is_waiting() -> None:
    clock = [100.0]
    directory, ready = SimpleNamespace(live=lambda: {b"other": None}), SimpleNamespace(is_set=lambda: True)
    node = SimpleNamespace(state="training", resting=SimpleNamespace(reasons=()), ready=ready, directory=directory)
    reporter = Reporter(lambda kind, fields: None, b"me", lambda: clock[0])
    shown: Any = SimpleNamespace(done=False, paused=False, node=node, reporter=reporter.counters)
    reporter.waits(True)
    assert state_of(shown) == "training"
    clock[0] += NOTABLE_WAIT + 0.1
    assert state_of(shown) == "waiting"
    reporter.waits(False)
    assert state_of(shown) == "training"
    assert reporter.counters.waited == pytest.approx(NOTABLE_WAIT + 0.1)


def test_rounds_that_ended_while_a_peer_was_away_are_none_that_it_missed() -> None:
    reporter = Reporter(lambda kind, fields: None, b"me", lambda: 0.0)
    for members, contributed in ([(b"other",), False], [(b"me", b"other"), False], [(b"me", b"other"), True]):
        reporter.round_ended(update(members, contributed))
    assert reporter.counters.outcomes == [False, True]


def test_gossip_steps_in_which_nobody_meets_are_none_that_a_peer_missed() -> None:
    """Late merging meets in one step of ten at first, so that a healthy peer was shown as late."""
    now, other, x_N = [0.0], b"o" * 32, torch.zeros(2)
    reporter = Reporter(lambda kind, fields: None, b"me", lambda: now[0])
    for step, (partner, matched) in enumerate([(None, False), (other, True), (None, False), (None, True)]):
        now[0] += 3.0
        reporter.swap_ended(GossipStep(0, step, x_N, x_N, {}, {}, b"", partner=partner, matched=matched))
    assert reporter.counters.outcomes == [True, False]
    assert reporter.counters.usual_round == 3.0, "the time of each step is known all the same"


def test_rounds_that_end_while_a_peer_is_away_are_no_hang_and_none_that_took_long() -> None:
    """Back after an hour it was called stalled, and the hour a round's length."""
    now = [0.0]
    reporter = Reporter(lambda kind, fields: None, b"me", lambda: now[0])
    for members in ([(b"me", b"other")] * 5, [(b"other",)] * 120, [(b"me", b"other")]):
        for each in members:
            now[0] += 30.0
            reporter.round_ended(update(each, b"me" in each))
            assert reporter.counters.since_round == 0.0
    assert reporter.counters.usual_round == 30.0
    assert reporter.counters.outcomes == [True] * 6


def test_the_merge_that_ends_a_gossip_run_is_no_round_beside_its_steps() -> None:
    """A run of 6 rounds ended with "you contributed to 7 of the last 7"."""
    other, x_N, told = b"o" * 32, torch.zeros(2), []
    reporter = Reporter(lambda kind, fields: told.append(kind), b"me", lambda: 0.0)
    for step in range(6):
        reporter.swap_ended(GossipStep(0, step, x_N, x_N, {}, {}, b"", partner=other))
    reporter.round_ended(update((b"me", other), True), of_pairs=True)
    assert reporter.counters.outcomes == [True] * 6
    assert told == ["pair"] * 6 + ["commit"]


def test_rounds_of_a_branch_that_is_given_up_are_none_that_a_peer_contributed_to() -> None:
    """It contributed to 95 of the last 100, of which the run had five."""
    reporter = Reporter(lambda kind, fields: None, b"me", lambda: 0.0)
    for made in range(100):
        reporter.round_ended(update((b"me", b"other"), made != 3, outer_step=made))
    reporter.branch_left(5)
    assert reporter.counters.outcomes == [True, True, True, False, True]
    reporter.branch_left(5)  # each fragment's move of one adoption says so
    reporter.round_ended(update((b"me", b"other"), True, outer_step=200))
    assert len(reporter.counters.outcomes) == 6
    reporter.branch_left(0)  # nobody knows where
    assert reporter.counters.outcomes == []


def test_bytes_per_round_are_those_of_the_rounds_that_are_told_of() -> None:
    """All bytes ever sent were shared out among the last hundred rounds: they seemed to grow from there on."""
    reporter, sent = Reporter(lambda kind, fields: None, b"me", lambda: 0.0), 0
    for number in range(400):
        sent += 5_000 if number < 100 else 1_000
        reporter.round_ended(update((b"me", b"other"), True))
        if number % 3 == 0 or number == 99:  # rounds may be faster than anybody looks
            per_round = reporter.counters.sent_per_round(sent)
        if number == 99:
            assert per_round == 5_000
    assert per_round == 1_000
    assert reporter.counters.sent_per_round(sent + 700) == 1_000, "what the round in progress sends counts with it"


def test_the_wait_for_company_is_no_part_of_the_first_round() -> None:
    """Who had waited for a quarter of an hour had hours left after the first round of seconds."""
    now = [0.0]
    reporter = Reporter(lambda kind, fields: None, b"me", lambda: now[0])
    for seconds, wanted in ((0.0, 2), (900.0, 2), (0.2, 0), (5.0, 0)):
        now[0] += seconds
        reporter.counters.waits_for(wanted)
    reporter.round_ended(update((b"me", b"other"), True))
    assert reporter.counters.usual_round == pytest.approx(5.0)
    assert reporter.counters.wanted_members == 0


def test_rounds_that_a_peer_catches_up_with_do_not_tell_how_long_one_takes() -> None:
    """Back after an hour it had "1 s left" of a run of hours."""
    now = [0.0]
    reporter = Reporter(lambda kind, fields: None, b"me", lambda: now[0])
    for _ in range(20):
        now[0] += 0.01
        reporter.round_ended(update((b"me", b"other"), False))
    assert reporter.counters.own_round is reporter.counters.next_round_in is None, "not known yet"
    for _ in range(3):
        now[0] += 30.0
        reporter.round_ended(update((b"me", b"other"), True))
    assert reporter.counters.usual_round == pytest.approx(30.0)
    now[0] += 10.0
    assert reporter.counters.next_round_in == pytest.approx(20.0)


def update(members: tuple[bytes, ...], contributed: bool, outer_step: int = 0) -> Any:
    frames = (SimpleNamespace(peer=bytes(32)),)
    where = {"round": 1, "epoch": 0, "outer_step": outer_step, "fragment": 0, "final": False, "hash": b""}
    record = SimpleNamespace(**where, frames=frames, contributors=(), members=members, next_members=())
    return SimpleNamespace(
        record=record, fragment=0, contribution=object() if contributed else None, anchor=b"", decision=None
    )


def test_a_round_tells_its_seconds_how_many_of_them_training_stood_still_and_how_it_was_decided() -> None:
    now, told = [0.0], []
    reporter = Reporter(lambda kind, fields: told.append((kind, fields)), b"me", lambda: now[0])
    decided = update((b"me", b"other"), True)
    decided.decision = Decision(b"l" * 32, 2, 3, 0.5, 0.25)
    for waited in (2.0, 1.0):
        now[0] += 8.0
        reporter.waits(True)
        now[0] += waited
        reporter.round_ended(decided)  # told while the loop still stands
        reporter.waits(False)
    keys = ("seconds", "waited", "leader", "ballot", "votes", "sending", "applying")
    rows = [tuple(fields[key] for key in keys) for kind, fields in told if kind == "commit"]
    how = (peer_name(b"l" * 32), 2, 3, 0.5, 0.25)
    assert rows == [(10.0, 2.0, *how), (9.0, 1.0, *how)]


def test_a_round_tells_how_long_copying_held_the_training_thread() -> None:
    told: list[dict[str, Any]] = []
    reporter = Reporter(lambda kind, fields: told.append(fields), b"me", lambda: 0.0)
    assert reporter.counters.usual_hold is None
    for holds in ((0.25, 0.5), (0.125,), ()):
        for seconds in holds:
            reporter.holds(seconds)
        reporter.round_ended(update((b"me", b"other"), True))
    assert [fields["held"] for fields in told] == [0.75, 0.125, 0.0]
    assert reporter.counters.usual_hold == 0.125


def test_a_commit_that_was_adopted_tells_nothing_of_how_it_was_decided() -> None:
    told: list[dict[str, Any]] = []
    reporter = Reporter(lambda kind, fields: told.append(fields), b"me", lambda: 0.0)
    reporter.round_ended(update((b"me", b"other"), True))
    assert "leader" not in told[0]
