"""tests/training/test_swarm_side.py"""

from __future__ import annotations

import queue
from dataclasses import replace

import pytest
import torch

from decentral.replica.contribution import Contribution
from decentral.rounds.local_state import CommittedUpdate
from decentral.training.swarm_side import MOST_APART, Backlog


def at_once(update: CommittedUpdate) -> bool:
    return True


def update(number: int, *, fragment: int = 0, at: int = 0, moves: bool = True) -> CommittedUpdate:
    before, after = (torch.tensor([float(at)]), torch.tensor([at + 1.0])) if moves else (None, None)
    return CommittedUpdate(None, bytes([number % 256]) * 32, fragment, before, after, None)


def test_advances_come_out_in_the_order_of_the_commits():
    backlog = Backlog()
    for number in range(5):
        backlog.put(update(number))
    assert [backlog.get(at_once).head[0] for _ in range(5)] == list(range(5))
    with pytest.raises(queue.Empty):
        backlog.get(at_once)


def test_a_commit_whose_time_has_not_come_stays_the_first_and_those_behind_it_do_not_overtake():
    backlog = Backlog()
    for number in range(3):
        backlog.put(update(number))

    def is_not_the_first(update: CommittedUpdate) -> bool:
        return update.head[0] != 0

    with pytest.raises(queue.Empty):
        backlog.get(is_not_the_first, timeout=0.01)
    assert len(backlog) == 3
    assert [backlog.get(at_once).head[0] for _ in range(3)] == [0, 1, 2]


def test_commits_behind_one_that_must_wait_are_folded_too():
    """They lay in a queue of their own, without a bound, while our contribution waited for its overlap."""
    backlog = Backlog()
    zero, ours = torch.zeros(1), bytes([255]) * 32
    mine = Contribution(0, bytes(32), zero, zero, 4, 4)
    backlog.put(CommittedUpdate(None, ours, 0, zero, zero, mine))
    for number in range(300):
        backlog.put(update(number, at=number))
        with pytest.raises(queue.Empty):
            backlog.get(lambda update: update.contribution is None)
    assert len(backlog) <= MOST_APART
    first, *others = backlog.drain()
    assert first.head == ours
    assert sum(float(other.after_N - other.before_N) for other in others) == 300.0
    assert backlog.empty()


def test_a_training_loop_that_stands_still_keeps_a_bounded_backlog_that_adds_up_to_the_same_move():
    backlog = Backlog()
    for number in range(300):
        backlog.put(update(number, fragment=number % 2, at=number // 2))
    assert len(backlog) <= MOST_APART
    moved = {0: 0.0, 1: 0.0}
    last = b""
    for taken in backlog.drain():
        moved[taken.fragment] += float(taken.after_N - taken.before_N)
        last = taken.head
    assert moved == {0: 150.0, 1: 150.0}
    assert last == bytes([299 % 256]) * 32


def test_commits_that_only_change_the_membership_do_not_pile_up_either():
    backlog = Backlog()
    for number in range(300):
        backlog.put(update(number, moves=False))
    assert len(backlog) <= MOST_APART


def test_folding_over_a_branch_that_was_given_up_keeps_what_is_owed_since():
    backlog = Backlog()
    for number in range(MOST_APART):
        backlog.put(update(number, at=number))
    owed = CommittedUpdate(
        None, b"h" * 32, 0, torch.tensor([MOST_APART - 0.0 + 40.0]), torch.tensor([-7.0]), None, reclaimed_steps=12
    )
    backlog.put(owed)
    live = torch.tensor([100.0])
    steps = 0
    for taken in backlog.drain():
        live += taken.after_N - taken.before_N
        steps += taken.reclaimed_steps
    assert live == 100.0 - 7.0 - 40.0
    assert steps == 12


def test_a_branch_that_took_what_was_in_flight_is_merged_by_itself():
    backlog = Backlog()
    for number in range(MOST_APART):
        backlog.put(update(number, at=number))
    backlog.put(replace(update(MOST_APART, at=MOST_APART), took=True))
    backlog.put(update(MOST_APART + 1, at=MOST_APART + 1))
    updates = backlog.drain()
    assert [one.before_N.item() for one in updates if one.took] == [MOST_APART]


def test_that_a_snapshot_was_taken_over_is_known_when_a_commit_after_it_is_joined_with_it():
    """Else nobody would save a model that has left its last checkpoint's branch."""
    backlog = Backlog()
    for number in range(MOST_APART):
        backlog.put(update(number, at=number))
    backlog.put(CommittedUpdate(None, b"h" * 32, 0, torch.zeros(1), torch.ones(1), None, adopted=True))
    backlog.put(update(MOST_APART, at=MOST_APART))
    told = backlog.drain()
    assert len(told) <= MOST_APART
    assert told[-1].adopted
    assert torch.equal(told[-1].after_N, update(MOST_APART, at=MOST_APART).after_N), "joined"
