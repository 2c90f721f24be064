"""What a peer says of itself while its training thread waits."""

from types import SimpleNamespace
from typing import Any

import pytest

from decentral.training.reporting import NOTABLE_WAIT, Reporter


def test_the_short_wait_of_every_round_is_training_and_a_long_one_is_waiting() -> None:
    clock = [100.0]
    directory, ready = SimpleNamespace(live=lambda: {b"other": None}), SimpleNamespace(is_set=lambda: True)
    node = SimpleNamespace(state="training", resting=False, ready=ready, directory=directory)
    peer: Any = SimpleNamespace(done=False, paused=False, swarm=SimpleNamespace(node=node))
    reporter = Reporter(lambda kind, fields: None, b"me", lambda: clock[0])
    reporter.waits(True)
    assert reporter._state(peer) == "training"
    clock[0] += NOTABLE_WAIT + 0.1
    assert reporter._state(peer) == "waiting"
    reporter.waits(False)
    assert reporter._state(peer) == "training"
    assert reporter.waited == pytest.approx(NOTABLE_WAIT + 0.1)


def test_rounds_that_ended_while_a_peer_was_away_are_none_that_it_missed() -> None:
    reporter = Reporter(lambda kind, fields: None, b"me", lambda: 0.0)
    for members, contributed in ([(b"other",), False], [(b"me", b"other"), False], [(b"me", b"other"), True]):
        reporter.round_ended(advance(members, contributed))
    assert list(reporter._outcomes) == [False, True]


def advance(members: tuple[bytes, ...], contributed: bool) -> Any:
    frames = (SimpleNamespace(peer=bytes(32)),)
    where = {"round": 1, "epoch": 0, "outer_step": 0, "fragment": 0, "final": False, "hash": b""}
    record = SimpleNamespace(**where, frames=frames, contributors=(), members=members, next_members=())
    return SimpleNamespace(record=record, fragment=0, contribution=object() if contributed else None, anchor=b"")
