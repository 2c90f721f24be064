from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from decentral.cli.job.steering import StatusPublisher
from decentral.observe.status import Status


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
    answers = iter([Status(), Status(invite="decentral1:a"), Status(invite="decentral1:b")])
    peer: Any = SimpleNamespace(status=lambda: next(answers))
    teller = StatusPublisher(peer, told.append, trains_while_paused=False)
    for _ in range(3):
        teller()
    assert told == ["decentral1:a"]


def test_a_loop_of_one_process_stops_while_paused_and_its_status_says_so() -> None:
    peer: Any = SimpleNamespace(status=lambda: Status(state="paused", trains_while_paused=True))
    assert not StatusPublisher(peer, print, trains_while_paused=False)().trains_while_paused
    assert StatusPublisher(peer, print, trains_while_paused=True)().trains_while_paused
