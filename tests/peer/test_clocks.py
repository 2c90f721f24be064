"""A loop's schedules against the run's rounds: of a newcomer, of one that comes back, and those that are the run's."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from decentral.errors import ConfigError
from decentral.peer import Peer
from decentral.peer.boundary import NewestRound, Word
from decentral.tasks.batches import ShardPlace
from decentral.training.clocks import OwnClock
from tests.kit.patience import until
from tests.kit.problems import Problem, alone, joined, run_terms
from tests.kit.tables import long_but

ROUNDS, STEPS = 8, 2
TERMS = run_terms("diloco", run={"rounds": ROUNDS}, inner={"steps": STEPS})


def linear(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    return lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / (2 * ROUNDS * STEPS))


def cosine(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    return lr_scheduler.CosineAnnealingLR(optimizer, ROUNDS * STEPS)


def one_cycle(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    return lr_scheduler.OneCycleLR(optimizer, max_lr=0.02, total_steps=ROUNDS * STEPS + 1)


def sequential(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    rise = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3)
    return lr_scheduler.SequentialLR(optimizer, [rise, lr_scheduler.ExponentialLR(optimizer, 0.9)], [3])


def short(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    return lr_scheduler.OneCycleLR(optimizer, max_lr=0.02, total_steps=6)


def makes(problem: Problem, steps: int, schedule: Any = None) -> None:
    for _ in range(steps):
        problem.step()
        if schedule is not None:
            schedule.step()


@pytest.fixture
def first() -> Problem:
    return Problem(0)


@pytest.fixture
def second() -> Problem:
    return Problem(1)


@pytest.fixture
def founder(tmp_path: Path, first: Problem) -> Iterator[Peer]:
    with joined(TERMS, first, tmp_path / "founder") as peer:
        yield peer


@pytest.fixture(autouse=True)
def sentences_are_heard(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "decentral")


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("make", long_but([one_cycle, sequential], [linear, cosine, one_cycle, sequential]))
def test_a_newcomers_schedule_begins_where_the_run_is_and_a_sentence_says_so(
    founder, first, second, make, tmp_path, caplog
):
    schedules = make(first.optimizer), make(second.optimizer)
    makes(first, 4 * STEPS, schedules[0])
    with joined(founder.invite, second, tmp_path / "late", scheduler=schedules[1]) as peer:
        assert peer.progress == 0.5
        assert schedules[1].last_epoch == schedules[0].last_epoch == 8
        assert second.optimizer.param_groups[0]["lr"] == pytest.approx(first.optimizer.param_groups[0]["lr"])
        (told,) = [one for one in caplog.messages if "the run is at inner step 8" in one]
        assert "goes on from step 8 instead of 0, at a rate of" in told
        makes(second, 1, schedules[1])


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lr_scheduler.ReduceLROnPlateau, "the ReduceLROnPlateau stays where it was"),
        (short, "the OneCycleLR ends before that, so it stays at 0"),
    ],
    ids=["plateau", "too short"],
)
def test_a_schedule_that_cannot_be_moved_there_is_as_it_was_and_a_sentence_says_why(
    founder, first, second, make, why, tmp_path, caplog
):
    makes(first, 4 * STEPS)
    schedule = make(second.optimizer)

    def state() -> str:
        (group,) = second.optimizer.param_groups
        return str((schedule.state_dict(), {name: value for name, value in group.items() if name != "params"}))

    before = state()
    with joined(founder.invite, second, tmp_path / "late", scheduler=schedule):
        assert any(why in one and "peer.schedule(" in one for one in caplog.messages)
        assert state() == before


def test_a_schedule_with_a_clock_of_its_own_is_left_alone_without_a_word(founder, first, second, tmp_path, caplog):
    makes(first, 4 * STEPS)
    schedule = linear(second.optimizer)
    with joined(founder.invite, second, tmp_path / "late", scheduler=[OwnClock(schedule)]):
        assert schedule.last_epoch == 0
        assert not any("inner step" in one for one in caplog.messages)


def test_a_schedule_of_the_run_gives_a_newcomer_the_rate_of_the_others_step_by_step(founder, first, second, tmp_path):
    ours = founder.schedule(first.optimizer, lambda progress: 1 - progress)
    rates = [first.optimizer.param_groups[0]["lr"]]
    for _ in range(4 * STEPS):
        makes(first, 1, ours)  # its own step changes nothing
        rates.append(first.optimizer.param_groups[0]["lr"])
    assert rates == pytest.approx([0.02 * (1 - step / 16) for step in range(9)])
    with joined(founder.invite, second, tmp_path / "late") as late:
        theirs = late.schedule(second.optimizer, lambda progress: 1 - progress)
        assert theirs.get_last_lr() == pytest.approx([0.01])


def test_a_schedule_of_a_peer_that_missed_rounds_catches_up(founder, first, second, tmp_path, caplog):
    makes(first, 2 * STEPS)
    with joined(founder.invite, second, tmp_path / "sleeps", scheduler=linear(second.optimizer)):
        pass
    makes(first, 3 * STEPS)
    again = Problem(1)
    restored = linear(again.optimizer)
    with joined(founder.invite, again, tmp_path / "sleeps", scheduler=restored) as peer:
        until(lambda: peer.round == 5)  # its swarm's side has caught up; the next step brings that into the model
        makes(again, 1, restored)
        assert abs(restored.last_epoch - peer.progress * ROUNDS * STEPS) <= STEPS
    assert any("LambdaLR goes on from step" in one for one in caplog.messages)


def test_schedules_and_progress_go_on_after_a_restart_in_the_middle_of_a_round(tmp_path):
    seen = []
    for pieces in ([8], [3, 5]):
        folder, rates = tmp_path / str(len(pieces)), []
        for count in pieces:
            problem = Problem(0)
            counted = linear(problem.optimizer)
            with alone(folder, TERMS.changed(inner={"steps": 4}), problem, scheduler=counted) as peer:
                other = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
                peer.schedule(other)
                for _ in range(count):
                    problem.step()
                    counted.step()
                    rates.append((peer.progress, problem.optimizer.param_groups[0]["lr"], other.param_groups[0]["lr"]))
        seen.append(rates)
    assert seen[0] == seen[1]
    assert [progress for progress, _, _ in seen[0]] == [step / 32 for step in range(1, 9)]


def test_the_rate_of_a_schedule_of_the_run_is_the_one_it_was_first_made_with(tmp_path):
    for _ in range(2):
        problem = Problem(0)
        with alone(tmp_path, TERMS, problem) as peer:
            schedule = peer.schedule(problem.optimizer)
            assert schedule.base_lrs == [0.02]
            for _ in range(5):
                problem.step()
            assert problem.optimizer.param_groups[0]["lr"] < 0.02


def test_a_rate_that_a_script_changed_before_a_restart_is_told_with_both_and_which_counts(tmp_path, caplog):
    changed = (
        "settings of the optimizer were changed: lr is 0.005 here and 0.02 in the checkpoint; the checkpoint's count, "
        "until the loop sets others inside the with block (group['lr'] of optimizer.param_groups, and base_lrs of a "
        "schedule)"
    )
    for rate in (0.02, 0.02, 0.005, 0.005):
        problem = Problem(0, lr=rate)
        schedule = linear(problem.optimizer)
        with alone(tmp_path, TERMS, problem, scheduler=schedule):
            told = [one for one in caplog.messages if "settings of the optimizer were changed" in one]
            assert told == ([] if rate == 0.02 else [changed])
            makes(problem, 1, schedule)
            assert schedule.base_lrs == [0.02]
        caplog.clear()


def test_what_cannot_be_scheduled_is_one_sentence(tmp_path):
    problem = Problem(0)
    with alone(tmp_path, TERMS, problem) as peer:
        with pytest.raises(ConfigError, match=r"peer\.schedule: the optimizer is a str"):
            peer.schedule("adamw")
        with pytest.raises(ConfigError, match=r"peer\.schedule: a int cannot be called"):
            peer.schedule(problem.optimizer, 3)


def test_the_word_of_the_main_process_comes_whole_out_of_its_numbers() -> None:
    newest = NewestRound(members=3, contributed=1, bytes_sent=2**40, bytes_received=7)
    word = Word(True, 2**63 - 1, ShardPlace(1, 3, 40), (9, 2, 1, 4), newest, bytes(range(224, 256)))
    assert Word.unpack(word.pack()) == word
    assert len(word.pack()) == len(Word().pack())
    assert all(0 <= number < 2**63 for number in word.pack())
