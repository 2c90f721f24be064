"""A loop's schedules against the run's rounds: of a newcomer, of one that comes back, and those that are the run's."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from decentral.errors import ConfigError
from decentral.peer import Peer, join
from decentral.peer.boundary import NewestRound, Word
from decentral.tasks.batches import ShardPlace
from decentral.training.clocks import OwnClock
from tests.kit.problems import LOOPBACK, Problem, alone, run_terms, until

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


Make = Callable[[torch.optim.Optimizer], Any]


class Swarm:
    """A founder that is some rounds on, and peers that come to it."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder, self._stack, self._count = folder, stack, 0
        self.peer: Peer | None = None

    def enters(self, problem: Problem, *, out: str | None = None, **given: Any) -> Peer:
        self._count += 1
        options = {"listen": LOOPBACK, "transport": "native", "lan": False, "commands": False, "quiet": True}
        options |= {"alone": True, **given}
        run = TERMS if self.peer is None else self.peer.invite
        made = join(run, problem.model, problem.optimizer, out=self._folder / (out or str(self._count)), **options)
        entered = self._stack.enter_context(made)
        self.peer = self.peer or entered
        return entered


@pytest.fixture
def swarm(tmp_path: Path) -> Any:
    with ExitStack() as stack:
        yield Swarm(tmp_path, stack)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("make", [linear, cosine, one_cycle, sequential], ids=lambda make: make.__name__)
def test_a_newcomers_schedule_begins_where_the_run_is_and_a_sentence_says_so(swarm, make, caplog):
    first, second = Problem(0), Problem(1)
    schedules = make(first.optimizer), make(second.optimizer)
    swarm.enters(first, scheduler=schedules[0])
    for _ in range(4 * STEPS):
        first.step()
        schedules[0].step()
    with caplog.at_level(logging.WARNING, "decentral"):
        peer = swarm.enters(second, scheduler=schedules[1])
    assert peer.progress == 0.5
    assert schedules[1].last_epoch == schedules[0].last_epoch == 8
    assert second.optimizer.param_groups[0]["lr"] == pytest.approx(first.optimizer.param_groups[0]["lr"])
    (told,) = [one for one in caplog.messages if "the run is at inner step 8" in one]
    assert "goes on from step 8 instead of 0, at a rate of" in told
    second.step()
    schedules[1].step()


def plateau(optimizer: torch.optim.Optimizer) -> Any:
    return lr_scheduler.ReduceLROnPlateau(optimizer)


def short(optimizer: torch.optim.Optimizer) -> Any:
    return lr_scheduler.OneCycleLR(optimizer, max_lr=0.02, total_steps=6)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (plateau, "the ReduceLROnPlateau stays where it was"),
        (short, "the OneCycleLR ends before that, so it stays at 0"),
    ],
    ids=["plateau", "too short"],
)
def test_a_schedule_that_cannot_be_moved_there_is_as_it_was_and_a_sentence_says_why(swarm, make, why, caplog):
    first, second = Problem(0), Problem(1)
    swarm.enters(first)
    for _ in range(4 * STEPS):
        first.step()
    schedule = make(second.optimizer)
    before = {**schedule.state_dict()}, {**second.optimizer.param_groups[0]}
    with caplog.at_level(logging.WARNING, "decentral"):
        swarm.enters(second, scheduler=schedule)
    assert any(why in one and "peer.schedule(" in one for one in caplog.messages)
    after = {**schedule.state_dict()}, {**second.optimizer.param_groups[0]}
    assert str(after) == str(before)


def test_a_schedule_with_a_clock_of_its_own_is_left_alone_without_a_word(swarm, caplog):
    first, second = Problem(0), Problem(1)
    swarm.enters(first)
    for _ in range(4 * STEPS):
        first.step()
    schedule = linear(second.optimizer)
    with caplog.at_level(logging.WARNING, "decentral"):
        swarm.enters(second, scheduler=[OwnClock(schedule)])
    assert schedule.last_epoch == 0
    assert not any("inner step" in one for one in caplog.messages)


def test_a_schedule_of_the_run_gives_a_newcomer_the_rate_of_the_others_step_by_step(swarm):
    first, second = Problem(0), Problem(1)
    founder = swarm.enters(first)
    ours = founder.schedule(first.optimizer, lambda progress: 1 - progress)
    rates = [first.optimizer.param_groups[0]["lr"]]
    for _ in range(4 * STEPS):
        first.step()
        ours.step()  # as loops do, which changes nothing
        rates.append(first.optimizer.param_groups[0]["lr"])
    assert rates == pytest.approx([0.02 * (1 - step / 16) for step in range(9)])
    late = swarm.enters(second)
    assert late.schedule(second.optimizer, lambda progress: 1 - progress).get_last_lr() == pytest.approx([0.01])


def test_schedules_and_progress_go_on_after_a_restart_in_the_middle_of_a_round(tmp_path):
    seen = []
    for pieces in ([8], [3, 5]):
        folder, rates = tmp_path / str(len(pieces)), []
        for count in pieces:
            problem = Problem(0)
            counted = linear(problem.optimizer)
            with alone(folder, TERMS.changed(inner={"steps": 4}), problem, scheduler=counted, quiet=True) as peer:
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
        with alone(tmp_path, TERMS, problem, quiet=True) as peer:
            schedule = peer.schedule(problem.optimizer)
            assert schedule.base_lrs == [0.02]
            for _ in range(5):
                problem.step()
            assert problem.optimizer.param_groups[0]["lr"] < 0.02


def test_a_schedule_of_a_peer_that_missed_rounds_catches_up(swarm, caplog):
    first, second = Problem(0), Problem(1)
    swarm.enters(first)
    for _ in range(2 * STEPS):
        first.step()
    schedule = linear(second.optimizer)
    with ExitStack() as stack:
        slept = Swarm(swarm._folder, stack)
        slept.peer = swarm.peer
        slept.enters(second, out="sleeps", scheduler=schedule)
    for _ in range(3 * STEPS):
        first.step()
    again = Problem(1)
    restored = linear(again.optimizer)
    with caplog.at_level(logging.WARNING, "decentral"):
        peer = swarm.enters(again, out="sleeps", scheduler=restored)
        until(lambda: peer.round == 5)  # its swarm's side has caught up; the next step brings that into the model
        again.step()
        restored.step()
    assert abs(restored.last_epoch - peer.progress * ROUNDS * STEPS) <= STEPS
    assert any("LambdaLR goes on from step" in one for one in caplog.messages)


def test_a_rate_that_a_script_changed_before_a_restart_is_told_with_both_and_which_counts(tmp_path, caplog):
    for rate in (0.02, 0.02, 0.005, 0.005):
        problem = Problem(0, lr=rate)
        schedule = linear(problem.optimizer)
        with (
            caplog.at_level(logging.WARNING, "decentral"),
            alone(tmp_path, TERMS, problem, scheduler=schedule, quiet=True),
        ):
            told = [one for one in caplog.messages if "settings of the optimizer were changed" in one]
            assert told == (
                []
                if rate == 0.02
                else [
                    "settings of the optimizer were changed: lr is 0.005 here and 0.02 in the checkpoint; the "
                    "checkpoint's count, until the loop sets others inside the with block (group['lr'] of "
                    "optimizer.param_groups, and base_lrs of a schedule)"
                ]
            )
            problem.step()
            schedule.step()
            assert schedule.base_lrs == [0.02]
        caplog.clear()


@pytest.mark.parametrize(
    ("optimizer", "factor", "why"),
    [
        ("adamw", None, "peer.schedule: the optimizer is a str"),
        (None, 3, "peer.schedule: a int cannot be called"),
    ],
)
def test_what_cannot_be_scheduled_is_one_sentence(tmp_path, optimizer, factor, why):
    problem = Problem(0)
    with alone(tmp_path, TERMS, problem, quiet=True) as peer:
        given = [optimizer or problem.optimizer, *([factor] if factor else [])]
        with pytest.raises(ConfigError, match=why):
            peer.schedule(*given)


def test_the_word_of_the_main_process_comes_whole_out_of_its_numbers() -> None:
    newest = NewestRound(members=3, contributed=1, bytes_sent=2**40, bytes_received=7)
    word = Word(True, 2**63 - 1, ShardPlace(1, 3, 40), (9, 2, 1, 4), newest, bytes(range(224, 256)))
    assert Word.unpack(word.pack()) == word
    assert len(word.pack()) == len(Word().pack())
    assert all(0 <= number < 2**63 for number in word.pack())
