import threading
from pathlib import Path

import pytest

from decentral.cli.train import BaselinePace
from decentral.errors import DecentralError
from decentral.observe.status import ProcessInfo, Status, write_status

DEAD = ProcessInfo(pid=1, created=0.0)


def test_a_baseline_is_never_ahead_of_the_peer_and_waits_for_it(tmp_path: Path) -> None:
    write_status(tmp_path, Status(state="training", inner_steps=3), ProcessInfo())
    pace, halted = BaselinePace(tmp_path), threading.Event()
    assert [pace.may_step(step, halted) for step in range(3)] == [True, True, True]
    later = threading.Timer(0.1, write_status, (tmp_path, Status(state="training", inner_steps=4), ProcessInfo()))
    later.start()
    assert pace.may_step(3, halted)
    later.join()


def test_a_baseline_ends_where_the_peer_ended(tmp_path: Path) -> None:
    write_status(tmp_path, Status(state="done", inner_steps=2), DEAD)
    pace, halted = BaselinePace(tmp_path), threading.Event()
    assert [pace.may_step(step, halted) for step in (0, 1, 2, 2)] == [True, True, False, False]


def test_a_baseline_that_is_told_to_leave_stops_waiting(tmp_path: Path) -> None:
    halted = threading.Event()
    halted.set()
    assert not BaselinePace(tmp_path).may_step(0, halted)


def test_a_peer_that_died_is_no_measure(tmp_path: Path) -> None:
    write_status(tmp_path, Status(state="training", inner_steps=2), DEAD)
    with pytest.raises(DecentralError, match="the peer to keep pace with has died"):
        BaselinePace(tmp_path).may_step(2, threading.Event())
