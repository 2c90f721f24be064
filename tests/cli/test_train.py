"""tests/cli/test_train.py"""

import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from decentral.cli.train import BaselinePace, StatusPublisher, Steering
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


SELF, OTHER = {"self": True}, {"self": False}


def test_the_last_word_has_the_last_round_although_nobody_asked_meanwhile() -> None:
    peer: Any = SimpleNamespace(now=Status(state="training", round=3))
    peer.status = lambda: peer.now
    teller = StatusPublisher(peer, lambda invite: None, trains_while_paused=False)
    assert teller().round == 3
    peer.now = replace(peer.now, round=8, bytes_sent=900)  # within the second between two looks
    teller.end("done")
    assert (teller().state, teller().round, teller().bytes_sent) == ("done", 8, 900)


def test_the_invite_is_told_once_and_not_before_there_is_one() -> None:
    told: list[str] = []
    answers = iter(
        [Status(), *(Status(state="waiting", members=(SELF,), invite=f"decentral1:{word}") for word in "ab")]
    )
    peer: Any = SimpleNamespace(status=lambda: next(answers))
    teller = StatusPublisher(peer, told.append, trains_while_paused=False)
    for _ in range(3):
        teller()
    assert told == ["decentral1:a"]


@pytest.mark.parametrize(
    ("keeps_serving", "members", "invites"),
    [(False, (OTHER,), []), (True, (OTHER,), ["decentral1:a"]), (False, (OTHER, SELF), ["decentral1:a"])],
)
def test_who_comes_after_the_end_and_goes_at_once_invites_nobody(
    keeps_serving: bool, members: tuple[dict[str, bool], ...], invites: list[str]
) -> None:
    told: list[str] = []
    late = Status(state="done", members=members, invite="decentral1:a")
    peer: Any = SimpleNamespace(status=lambda: late)
    StatusPublisher(peer, told.append, trains_while_paused=False, keeps_serving=keeps_serving).end("done")
    assert told == invites


@pytest.mark.parametrize("state", ["starting", "syncing"])
@pytest.mark.parametrize("keeps_serving", [False, True])
def test_nobody_is_invited_by_who_does_not_know_yet_whether_the_run_goes_on(state: str, keeps_serving: bool) -> None:
    """Its chain is its own until it has the others', so it took itself for a member, also after the run's end."""
    told: list[str] = []
    begins = Status(state=state, members=(SELF,), invite="decentral1:a")
    peer: Any = SimpleNamespace(status=lambda: begins)
    StatusPublisher(peer, told.append, trains_while_paused=False, keeps_serving=keeps_serving)()
    assert told == []


def test_a_loop_of_one_process_stops_while_paused_and_its_status_says_so() -> None:
    peer: Any = SimpleNamespace(status=lambda: Status(state="paused", own_loop=True, trains_while_paused=True))
    assert not StatusPublisher(peer, print, trains_while_paused=False)().trains_while_paused
    assert not StatusPublisher(peer, print, trains_while_paused=False)().own_loop
    assert StatusPublisher(peer, print, trains_while_paused=True)().trains_while_paused


@pytest.mark.parametrize("rests", [False, True])
def test_a_peer_that_rests_finishes_by_leaving(rests: bool) -> None:
    """It waited for its next round, and a paused peer has none."""
    asked: list[str] = []
    peer: Any = SimpleNamespace(rests=rests, leave=lambda: asked.append("leave"), finish=lambda: asked.append("finish"))
    context: Any = SimpleNamespace(running=SimpleNamespace(set=lambda: asked.append("goes on")))
    steering = Steering(context, peer)
    steering.finish()
    assert asked == (["leave", "goes on"] if rests else ["finish"])
    assert steering.left is rests


def test_an_end_that_an_error_undoes_is_taken_back() -> None:
    """On a full disk the status said that everything is kept, and the checkpoint was not there."""
    peer: Any = SimpleNamespace(status=lambda: Status(state="leaving"))
    teller = StatusPublisher(peer, lambda invite: None, trains_while_paused=False)
    teller.end("left")
    for kind in (None, KeyboardInterrupt):  # an impatient second Ctrl-C while it says goodbye
        teller.take_back(kind, None, None)
        assert teller().state == "left"
    teller.take_back(OSError, OSError(), None)
    assert teller().state == "leaving"
