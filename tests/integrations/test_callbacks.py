"""A peer that a framework entered and never left: what the end of the process does with it."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from decentral.integrations.callbacks import Entered, JoinKeywords
from decentral.observe.status import read_status
from decentral.peer.settings import JoinOptions
from tests.peer.test_absence import alone
from tests.peer.test_join import Problem, run_terms


@pytest.mark.parametrize(("last", "state"), [(KeyboardInterrupt(), "left"), (ValueError("mine"), "looking")])
def test_an_interrupt_is_a_goodbye_with_a_checkpoint_and_an_error_is_not(tmp_path, monkeypatch, last, state):
    entered, problem = Entered(), Problem(0)
    entered.enter(alone(tmp_path, run_terms("diloco"), problem, quiet=True))
    for _ in range(7):
        problem.step()
    monkeypatch.setattr(sys, "last_value", last, raising=False)
    entered._at_exit()
    assert entered.peer is None
    assert read_status(tmp_path).state == state
    written = [path.name for path in (tmp_path / "checkpoints").iterdir()]
    assert ("00000001-round-000001" in written) == (state == "left")


def test_another_training_loop_ends_the_peer_of_the_one_before(tmp_path):
    entered, problem = Entered(), Problem(0)
    peers: list[Any] = []
    for _ in range(2):  # in one folder: only one may run there
        peers.append(alone(tmp_path, run_terms("diloco"), problem, quiet=True))
        entered.enter(peers[-1])
        problem.step()
    assert entered.peer is peers[1]
    entered.leave()
    assert read_status(tmp_path).state == "left"


def test_the_keywords_that_are_passed_on_are_those_of_join():
    theirs = {"accelerator", "scheduler"}  # the framework's to give
    assert set(JoinKeywords.__annotations__) == set(JoinOptions.__annotations__) - theirs
