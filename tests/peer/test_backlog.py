from __future__ import annotations

import queue

import pytest
import torch

from decentral.peer.backlog import LIMIT, Backlog
from decentral.rounds.driver import Advance


def advance(number: int, *, fragment: int = 0, at: int = 0, moves: bool = True) -> Advance:
    before, after = (torch.tensor([float(at)]), torch.tensor([at + 1.0])) if moves else (None, None)
    return Advance(None, bytes([number % 256]) * 32, fragment, before, after, None)


def test_advances_come_out_in_the_order_of_the_commits():
    backlog = Backlog()
    for number in range(5):
        backlog.put(advance(number))
    assert [backlog.get().head[0] for _ in range(5)] == list(range(5))
    with pytest.raises(queue.Empty):
        backlog.get()


def test_a_training_loop_that_stands_still_keeps_a_bounded_backlog_that_adds_up_to_the_same_move():
    backlog = Backlog()
    for number in range(300):
        backlog.put(advance(number, fragment=number % 2, at=number // 2))
    assert len(backlog) <= LIMIT
    moved = {0: 0.0, 1: 0.0}
    last = b""
    while not backlog.empty():
        taken = backlog.get()
        moved[taken.fragment] += float(taken.after_N - taken.before_N)
        last = taken.head
    assert moved == {0: 150.0, 1: 150.0}
    assert last == bytes([299 % 256]) * 32


def test_commits_that_only_change_the_membership_do_not_pile_up_either():
    backlog = Backlog()
    for number in range(300):
        backlog.put(advance(number, moves=False))
    assert len(backlog) <= LIMIT
