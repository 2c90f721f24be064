"""Where a run is in inner steps, and schedules that are brought there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from decentral.training.clocks import RunSchedule, StepCount, cosine, move_on
from decentral.training.inner_states import describe_changes, numbers_of


def optimizer_of(rate: float | torch.Tensor = 1.0, **given: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2))], lr=rate, **given)


class Wrapper:
    """As accelerate's, which steps what is inside once for each process."""

    step_with_optimizer, split_batches = True, False

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler


def test_the_position_rises_with_the_steps_and_waits_at_a_rounds_end_for_the_round() -> None:
    clock, seen = StepCount(interval=3, rounds=4), []
    for outer_steps in (0, 0, 0, 0, 1, 1, 4):
        clock.stepped()
        clock.reaches(outer_steps)
        seen.append(clock.position)
    assert seen == [1, 2, 3, 3, 3, 4, 12]
    assert clock.progress == 1.0
    assert clock.value == 7


def test_less_than_a_round_is_not_behind() -> None:
    clock = StepCount(value=4, round=2, interval=3, rounds=4)
    assert clock.position - clock.value == 2
    assert clock.behind == 0
    clock.reaches(3)
    assert clock.behind == 5
    clock.advance += clock.behind
    assert clock.behind == 0


def test_what_a_checkpoint_keeps_brings_it_back_and_an_older_one_counts_from_nought() -> None:
    clock, again, old = (StepCount(interval=3, rounds=4) for _ in range(3))
    clock.stepped()
    clock.reaches(2)
    clock.stepped()
    clock.advance = 5
    again.recall(clock.value, clock.memory())
    assert again == clock
    old.recall(2, ())
    assert (old.value, old.round, old.since, old.advance) == (2, 0, 0, 0)


@pytest.mark.parametrize(("wraps", "processes", "steps"), [(False, 2, 8), (True, 2, 16), (True, 1, 8)])
def test_accelerates_wrapper_steps_once_for_each_process(wraps: bool, processes: int, steps: int) -> None:
    scheduler = lr_scheduler.LambdaLR(optimizer_of(), lambda step: 1 - step / 100)
    told = move_on(Wrapper(scheduler) if wraps else scheduler, StepCount(round=4, interval=2, rounds=8), processes)
    assert scheduler.last_epoch == steps
    assert "goes on from step 8 instead of 0" in told


def test_one_that_counts_something_else_stays() -> None:
    scheduler = lr_scheduler.StepLR(optimizer_of(), 1)
    for _ in range(3):  # epochs
        scheduler.optimizer.step()
        scheduler.step()
    told = move_on(scheduler, StepCount(value=300, round=80, interval=5, rounds=100), 1)
    assert scheduler.last_epoch == 3
    assert "the StepLR stays at 3, as it does not count this peer's 300 inner steps" in told


def test_rates_that_are_tensors_are_written_in_place() -> None:
    clock, optimizer = StepCount(interval=2, rounds=4), optimizer_of(torch.tensor(0.5))
    held = optimizer.param_groups[0]["lr"]
    schedule = RunSchedule(optimizer, lambda progress: 1 - progress, clock)
    clock.reaches(2)
    schedule.step()
    assert held is optimizer.param_groups[0]["lr"]
    assert float(held) == 0.25
    assert schedule.state_dict() == {}
    assert (cosine(0.0), cosine(1.0)) == pytest.approx((1.0, 0.1))


def test_settings_that_were_changed_are_told_with_both_values() -> None:
    before, now = optimizer_of(1e-3, weight_decay=0.1), optimizer_of(3e-4, betas=(0.9, 0.95), weight_decay=0.1)
    lr_scheduler.LinearLR(now, 0.1)  # a warm-up is no change
    said = describe_changes([numbers_of(before)], [numbers_of(now)])
    assert "lr is 0.0003 here and 0.001 in the checkpoint" in said
    assert "betas is 0.9, 0.95 here and 0.9, 0.999 in the checkpoint" in said
    assert "weight_decay" not in said
    assert describe_changes([numbers_of(now)], [numbers_of(now)]) == ""
