"""Two peers in one process, of which one evaluates its model around commits: what it finds, says and leaves alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from decentral.errors import ConfigError
from decentral.manifest import Manifest
from decentral.observe.diagnostics import BANDS, BEHIND_ALONE, ROUNDS
from decentral.observe.health import health_sentence
from decentral.observe.status import read_status
from decentral.peer.joining import check_processes
from decentral.peer.participation import cause_of_being_behind
from decentral.training import reporting
from tests.kit.problems import Problem, Swarm, alone, run_terms, run_together, told

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


class Two(Swarm):
    """A founder, which may evaluate, and one that it invites."""

    def __init__(self, manifest: Manifest, folder: Path) -> None:
        super().__init__(manifest, folder, Held(0), Held(1), commands=False)

    def evaluates(self, evaluate: Callable[[], Any] | None) -> Two:
        """Run it; the founder by this function."""
        run_together(lambda: self.peer(0, evaluate=evaluate), lambda: self.peer(1))
        return self

    def told(self, event: str) -> list[dict[str, Any]]:
        """By the founder."""
        return told(self.events[0], event)


def test_a_peer_evaluates_around_commits_which_are_the_same_to_the_bit_as_without(tmp_path: Path) -> None:
    two, plain = Two(USUAL, tmp_path / "with"), Two(USUAL, tmp_path / "without")
    two.evaluates(two.problems[0].evaluate)
    found, last = two.told("metrics"), two.last[0]
    assert len(found) == 4
    assert last.held_out_loss == found[-1]["held_out_loss"]
    assert last.held_out_loss == pytest.approx(two.problems[0].evaluate().item(), rel=1e-6)
    assert BEHIND_ALONE in last.diagnostics
    assert found[0]["held_out_before"] > found[-1]["held_out_before"]
    plain.run()
    assert len(plain.told("commit")) == 4
    assert len({*two.digests.values(), *plain.digests.values()}) == 1


@pytest.mark.long
def test_beside_overlap_it_evaluates_and_does_not_judge(tmp_path: Path) -> None:
    """A commit leaves no anchor there, and looks that are none were taken for a run that is behind."""
    two = Two(run_terms("streaming", run={"rounds": 4}, swarm=PATIENT), tmp_path)
    two.evaluates(two.problems[0].evaluate)
    assert two.last[0].held_out_loss is not None
    assert BEHIND_ALONE not in two.last[0].diagnostics


def test_terms_by_which_together_falls_behind_are_said_with_their_cause_and_the_command(tmp_path: Path) -> None:
    """64 of 4,096 values: the commits of a short run take back most of what the steps gained."""
    two = Two(run_terms("sparseloco", run={"rounds": 12}, swarm=PATIENT), tmp_path)
    two.evaluates(two.problems[0].evaluate)
    (told,) = [one for one in two.told("out_of_band") if one["figure"] == BEHIND_ALONE]
    assert told["outer_step"] >= BAND.after + ROUNDS - 1
    assert BEHIND_ALONE in two.last[0].out_of_band
    (sentence,) = [one for one in two.last[0].notices if one.startswith("together lacks ")]
    assert "probably too little is sent: 94% of a round's change is left for later rounds" in sentence
    assert sentence.endswith("decentral tune SCRIPT.py:FUNCTION tries terms on your model, beside a peer alone")
    now = replace(two.last[0], state="training", notices=(sentence,))
    assert health_sentence(now).startswith(f"attention: {sentence}")


@pytest.mark.parametrize(
    ("evaluate", "why"),
    [(lambda: "no number", "is not one number"), (lambda: [][0], r"join\(evaluate=...\) raised IndexError")],
    ids=["no number", "raises"],
)
def test_what_cannot_be_evaluated_at_first_is_the_callers_error_and_the_peer_has_left(
    tmp_path: Path, evaluate: Callable[[], Any], why: str
) -> None:
    """No training begins, and its status does not look like one of a crash."""
    peer = alone(tmp_path, USUAL, Problem(0), evaluate=evaluate, commands=True)
    with pytest.raises(ConfigError, match=why), peer:
        raise AssertionError("training began")
    assert read_status(tmp_path).state == "left"


def test_a_function_that_raises_later_ends_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    losses = iter([5.0, 4.0])
    two = Two(USUAL, tmp_path)
    two.evaluates(lambda: next(losses))
    assert two.last[0].round == 4
    assert two.last[0].rounds_contributed == 4
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
            two.peer(0, evaluate=evaluate)

    run_together(interrupted, lambda: two.peer(1))
    assert not two.told("checkpoint_failed")
    assert [one["outer_step"] for one in two.told("commit")][:1] == [1]


def test_without_a_function_the_losses_that_the_loop_logs_are_judged(tmp_path: Path) -> None:
    two = Two(USUAL.changed(model={"task": "custom"}, inner={"clip": None}), tmp_path)
    two.logs = True
    two.run()
    assert -1.0 <= two.last[0].diagnostics[BEHIND_ALONE] <= 1.0
    assert two.last[0].held_out_loss is None
    assert "pass evaluate= to join to be surer" in cause_of_being_behind(USUAL, held_out=False)
