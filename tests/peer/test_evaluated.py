"""Two peers in one process, of which one evaluates its model around commits: what it finds, says and leaves alone."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from decentral.errors import ConfigError
from decentral.manifest import Manifest
from decentral.observe.diagnostics import BANDS, ROUNDS
from decentral.observe.health import health_sentence
from decentral.observe.status import Status, read_status
from decentral.peer import join
from decentral.peer.joining import check_processes
from decentral.peer.participation import cause_of_being_behind
from decentral.replica.figures import BEHIND_ALONE
from decentral.training import reporting
from tests.kit.absent import alone
from tests.kit.participation import NET
from tests.kit.problems import Problem, run_terms, run_together

(BAND,) = (band for band in BANDS if band.figure == BEHIND_ALONE)
PATIENT = {"deadline_floor": 20.0, "deadline_ceiling": 30.0}  # no round goes on without a peer that is slow
USUAL = run_terms("diloco", run={"rounds": 4}, exchange={"kind": "gather"}, swarm=PATIENT)


@pytest.fixture(autouse=True)
def every_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the machine is beside the clock."""
    monkeypatch.setattr(reporting, "SHARE", 1e9)


class Held(Problem):
    """With a loss on data that nobody trains on, the same for both peers."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.inputs = torch.randn(64, 64, generator=torch.Generator().manual_seed(99))

    def evaluate(self) -> torch.Tensor:
        torch.randn(7)  # as a function that draws its data
        return (self.model(self.inputs) - self.inputs @ self.goal.T).square().mean()


class Two:
    """A founder, which may evaluate, and one that it invites, on loopback."""

    def __init__(self, manifest: Manifest, folder: Path, logs: bool = False) -> None:
        self.manifest, self.folder, self.logs = manifest, folder, logs
        self.invited = threading.Event()
        self.problems = [Held(number) for number in range(2)]
        self.invite, self.digests = "", ["", ""]
        self.events: list[dict[str, Any]] = []
        self.last = Status()
        self.drawn = torch.zeros(0)

    def run(self, evaluate: Callable[[], Any] | None) -> None:
        run_together(lambda: self.peer(0, evaluate), lambda: self.peer(1, None))

    def peer(self, number: int, evaluate: Callable[[], Any] | None) -> None:
        assert not number or self.invited.wait(60)
        problem, out = self.problems[number], self.folder / f"peer{number}"
        given: dict[str, Any] = {**NET, "out": out, "quiet": True, "commands": False}
        if not number:
            given["observer"] = self.events.append
        with join(
            self.invite or self.manifest, problem.model, problem.optimizer, evaluate=evaluate, **given, alone=True
        ) as peer:
            if not number:
                self.invite = peer.invite
                self.invited.set()
            waited = threading.Event()
            while len(peer.status().members) < 2:
                waited.wait(0.02)
            while not peer.done:
                loss = problem.step()
                if self.logs:
                    peer.log(loss=loss)
            self.digests[number] = peer.anchor_digest
            if not number:
                self.last = peer.status()

    def told(self, event: str) -> list[dict[str, Any]]:
        return [one for one in self.events if one["event"] == event]


def test_a_peer_evaluates_around_commits_and_its_status_has_the_anchors_loss(tmp_path: Path) -> None:
    two = Two(USUAL, tmp_path)
    two.run(two.problems[0].evaluate)
    found = two.told("metrics")
    assert len(found) == 4
    assert two.last.held_out_loss == found[-1]["held_out_loss"]
    assert two.last.held_out_loss == pytest.approx(two.problems[0].evaluate().item(), rel=1e-6)
    assert BEHIND_ALONE in two.last.diagnostics
    assert found[0]["held_out_before"] > found[-1]["held_out_before"]


def test_what_is_committed_is_the_same_to_the_bit_whether_or_not_somebody_evaluates(tmp_path: Path) -> None:
    ended = []
    for name, evaluates in (("with", True), ("without", False)):
        two = Two(USUAL, tmp_path / name)
        two.run(two.problems[0].evaluate if evaluates else None)
        assert two.digests[0] == two.digests[1]
        ended.append(two.digests[0])
    assert len(two.told("commit")) == 4
    assert ended[0] == ended[1]


def test_beside_overlap_it_evaluates_and_does_not_judge(tmp_path: Path) -> None:
    """A commit leaves no anchor there, and looks that are none were taken for a run that is behind."""
    two = Two(run_terms("streaming", run={"rounds": 4}, swarm=PATIENT), tmp_path)
    two.run(two.problems[0].evaluate)
    assert two.last.held_out_loss is not None
    assert BEHIND_ALONE not in two.last.diagnostics


def test_terms_by_which_together_falls_behind_are_said_with_their_cause_and_the_command(tmp_path: Path) -> None:
    """64 of 4,096 values: the commits of a short run take back most of what the steps gained."""
    two = Two(run_terms("sparseloco", run={"rounds": 12}, swarm=PATIENT), tmp_path)
    two.run(two.problems[0].evaluate)
    (told,) = [one for one in two.told("out_of_band") if one["figure"] == BEHIND_ALONE]
    assert told["outer_step"] >= BAND.after + ROUNDS - 1
    assert BEHIND_ALONE in two.last.out_of_band
    (sentence,) = [one for one in two.last.notices if one.startswith("together lacks ")]
    assert "probably too little is sent: 94% of a round's change is left for later rounds" in sentence
    assert sentence.endswith("decentral tune SCRIPT.py:FUNCTION tries terms on your model, beside a peer alone")
    now = replace(two.last, state="training", notices=(sentence,))
    assert health_sentence(now).startswith(f"attention: {sentence}")


def test_a_peer_that_was_refused_at_the_start_has_left_and_did_not_crash(tmp_path: Path) -> None:
    peer = alone(tmp_path, USUAL, Problem(0), evaluate=lambda: "no number", commands=True)
    with pytest.raises(ConfigError, match="is not one number"), peer:
        raise AssertionError("training began")
    assert read_status(peer.settings.out).state == "left"


def test_a_function_that_raises_at_first_is_the_callers_error_and_starts_no_training(tmp_path: Path) -> None:
    problem = Problem(0)
    peer = alone(tmp_path, USUAL, problem, evaluate=lambda: [][0])
    with pytest.raises(ConfigError, match=r"join\(evaluate=...\) raised IndexError"), peer:
        raise AssertionError("training began")


def test_a_function_that_raises_later_ends_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    losses = iter([5.0, 4.0])
    two = Two(USUAL, tmp_path)
    two.run(lambda: next(losses))
    assert two.last.round == 4
    assert two.last.rounds_contributed == 4
    assert sum("join(evaluate=...) raised StopIteration" in one for one in caplog.messages) == 1


def test_what_is_no_function_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"join\(evaluate=0.5\): it cannot be called; pass a function"):
        alone(tmp_path, USUAL, Problem(0), evaluate=0.5)


def test_a_peer_of_several_processes_is_told_that_it_cannot_evaluate() -> None:
    with pytest.raises(ConfigError, match="the 2 processes of this peer would have to evaluate at the same moment"):
        check_processes(USUAL, 2, evaluates=True)
    check_processes(USUAL, 1, evaluates=True)


def test_ctrl_c_while_it_evaluates_loses_no_commit(tmp_path: Path) -> None:
    """A commit that had been taken from the swarm, and was not brought into the live model, left no checkpoint."""
    calls, two = [0], Two(run_terms("diloco", run={"rounds": 3}, exchange={"kind": "gather"}), tmp_path)

    def evaluate() -> float:
        calls[0] += 1
        if calls[0] == 2:  # before the first commit comes in
            raise KeyboardInterrupt
        return 1.0

    def interrupted() -> None:
        with pytest.raises(KeyboardInterrupt):
            two.peer(0, evaluate)

    run_together(interrupted, lambda: two.peer(1, None))
    assert not two.told("checkpoint_failed")
    assert [one["outer_step"] for one in two.told("commit")][:1] == [1]


def test_without_a_function_the_losses_that_the_loop_logs_are_judged(tmp_path: Path) -> None:
    two = Two(USUAL.changed(model={"task": "custom"}, inner={"clip": None}), tmp_path, logs=True)
    two.run(None)
    assert -1.0 <= two.last.diagnostics[BEHIND_ALONE] <= 1.0
    assert two.last.held_out_loss is None
    assert "pass evaluate= to join to be surer" in cause_of_being_behind(USUAL, held_out=False)
