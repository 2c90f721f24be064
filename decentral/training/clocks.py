"""Clocks of a loop against the run's: where the run is in inner steps, and schedules that follow it.

The run's clock is its rounds: each stands for H / fragments inner steps, whoever makes them. A peer that comes late,
was away, or is slower than the others, has made fewer steps than the clock says, and a schedule that counts its steps
would train at a rate that the others have left behind. `RunSchedule` goes by the run's clock itself; schedules
that a loop steps are moved on to it by `move_on`.
"""

from __future__ import annotations

import copy
import inspect
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from decentral.state.checkpoint import fill_in, storable


class Scheduler(Protocol):
    """A schedule, as checkpoints keep it: torch's, or any object that gives its state and takes it back."""

    def state_dict(self) -> dict[str, Any]:  # Any: plain values, as torch's schedulers have it
        """Return plain values and tensors."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> object:
        """Go on from what ``state_dict`` gave."""
        ...


@dataclass(slots=True)
class StepCount:
    """Inner steps of this peer, and where the run is: alike on all processes of the peer."""

    value: int = 0  # of this peer, over all its lives
    round: int = 0  # outer steps in the live model
    since: int = 0  # inner steps since the last of them came
    advance: int = 0  # by which schedules that the loop steps were moved on beyond ``value``
    interval: int = 1  # inner steps of one outer step: H / fragments
    rounds: int = 1  # of the run

    def stepped(self) -> None:
        """Count an inner step."""
        self.value += 1
        self.since += 1

    def reaches(self, outer_steps: int) -> bool:
        """Note that so many are in the live model; tell whether that is news."""
        is_news = outer_steps != self.round
        if is_news:
            self.round, self.since = outer_steps, 0
        return is_news

    @property
    def position(self) -> int:
        """Inner steps that the run has behind it: of its rounds, and of this one as far as it can be."""
        return self.round * self.interval + min(self.since, self.interval)

    @property
    def progress(self) -> float:
        """Share of the run's rounds, from 0 to 1."""
        return min(1.0, self.position / (self.rounds * self.interval))

    @property
    def behind(self) -> int:
        """Inner steps by which a schedule that counts this peer's is behind the run; 0 for less than a round."""
        missed = self.position - self.value - self.advance
        return missed if missed >= self.interval else 0

    def numbers(self) -> tuple[int, ...]:
        """Return the numbers that other processes of the peer hear."""
        return self.value, self.round, self.since, self.advance

    def hear(self, numbers: Sequence[int]) -> None:
        """Take over the ``numbers`` of the main process."""
        self.value, self.round, self.since, self.advance = numbers

    def memory(self) -> list[int]:
        """Return the numbers that a checkpoint keeps beside ``value``."""
        return [self.round, self.since, self.advance]

    def recall(self, value: int, memory: Sequence[int]) -> None:
        """Go on from a checkpoint; ``memory`` is empty in one that has none."""
        self.value = value
        self.round, self.since, self.advance = memory or (0, 0, 0)


@dataclass(frozen=True, slots=True)
class RoundEnded:
    """A round whose outcome is in the model now, as ``peer.on_round`` hears of it."""

    round: int  # outer steps that the model has behind it
    rounds: int  # of the run
    merged: int  # outer steps that came since the last call: 1, or more for a peer that catches up
    members: int  # of the run, as the newest commit has them
    contributed: bool  # whether the newest one has this peer's update
    bytes_sent: int  # by this peer, since its process began
    bytes_received: int
    done: bool  # whether training is over for this peer


# ---- a schedule of the run ----


def cosine(progress: float) -> float:
    """Follow half a cosine from 1 down to 0.1, as in Hoffmann et al., 2022, arXiv:2203.15556."""
    return 0.55 + 0.45 * math.cos(math.pi * progress)


class RunSchedule(LRScheduler):
    """Rates that follow the run's clock: ``factor(progress)`` times the rate that each parameter group began with.

    The peer steps it after every inner step, so ``step()`` in a loop changes nothing more. It has no state: where it is
    follows from where the run is.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, factor: Callable[[float], float], clock: StepCount) -> None:
        self._factor, self._clock = factor, clock
        super().__init__(optimizer)

    def get_lr(self) -> list[float | Tensor]:
        """Return the rate of each group, where the run is now."""
        factor = float(self._factor(self._clock.progress))
        return [base * factor for base in self.base_lrs]

    def step(self, epoch: int | None = None) -> None:
        """Set the rates; ``epoch`` changes nothing. ``last_epoch`` is the run's inner step."""
        self.last_epoch = self._clock.position
        self._last_lr = self.get_lr()
        for group, rate in zip(self.optimizer.param_groups, self._last_lr, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def state_dict(self) -> dict[str, Any]:  # Any: as torch has it
        """Return nothing: it is where the run is."""
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore nothing."""


# ---- schedules that a loop steps ----


@dataclass(frozen=True, slots=True)
class OwnClock:
    """A schedule on a clock of its own, such as a warm-up of fresh moments: it is kept, and never moved on."""

    scheduler: Scheduler

    def state_dict(self) -> dict[str, Any]:  # Any: as torch has it
        """Return that of the schedule."""
        return self.scheduler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load it into the schedule."""
        self.scheduler.load_state_dict(state_dict)


def move_on(given: object, clock: StepCount, processes: int) -> str:
    """Step a schedule as often as the run is ahead of it; return a sentence, "" of one with a clock of its own.

    ``given``: as join was given it: accelerate's wrapper steps what is inside once for each of so many ``processes``.
    The optimizer's rates change with it, and nothing else of it. What cannot be moved so far is as before.
    """
    if isinstance(given, OwnClock):
        return ""
    scheduler: Any = getattr(given, "scheduler", given)  # Any: schedules of other packages have no base
    each = processes if _is_for_each_process(given) else 1
    name, where = type(scheduler).__name__, f"the run is at inner step {clock.position}"
    instead = "peer.schedule(optimizer, ...) goes by the run's rounds"
    if not _steps_by_itself(scheduler):
        return f"{where}, and the {name} stays where it was, as it is not stepped by a count of steps alone; {instead}"
    at, expected = scheduler.last_epoch, (clock.value + clock.advance) * each
    if abs(at - expected) > each + expected // 10:
        return (
            f"{where}, and the {name} stays at {at}, as it does not count this peer's {clock.value} inner steps; "
            f"{instead}"
        )
    before, kept = _rates(scheduler), _Kept(scheduler)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that no step of the optimizer came before
            for _ in range(clock.behind * each):
                scheduler.step()
    except ValueError:  # as OneCycleLR ends
        kept.put_back()
        return (
            f"{where}, and the {name} ends before that, so it stays at {at}; make it as long as the run, "
            f"{clock.rounds * clock.interval * each} steps: {instead}"
        )
    return (
        f"{where}: the {name} goes on from step {scheduler.last_epoch // each} instead of {at // each}, at a rate of "
        f"{_rates(scheduler)} instead of {before}; one that does not count inner steps does not belong into "
        f"join(scheduler=...), and {instead}"
    )


def _is_for_each_process(given: object) -> bool:
    linked = bool(getattr(given, "step_with_optimizer", False))
    return linked and not getattr(given, "split_batches", False)


def _steps_by_itself(scheduler: object) -> bool:
    """Tell whether ``step()`` without a loss or an epoch is a step, and is counted."""
    step = getattr(scheduler, "step", None)
    if not callable(step) or not isinstance(getattr(scheduler, "last_epoch", None), int):
        return False
    with suppress(ValueError, TypeError):
        wanted = inspect.signature(step).parameters.values()
        variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        return all(one.default is not inspect.Parameter.empty or one.kind in variable for one in wanted)
    return False


def _rates(scheduler: Any) -> str:  # Any: as above
    rates = sorted({float(group["lr"]) for group in scheduler.optimizer.param_groups})
    return " and ".join(f"{rate:g}" for rate in rates)


class _Kept:
    """A schedule and the settings of its optimizer, to be put back."""

    def __init__(self, scheduler: Any) -> None:  # Any: as above
        self._scheduler = scheduler
        self._state = copy.deepcopy(storable(scheduler.state_dict()))
        self._groups = [copy.deepcopy(_settings(group)) for group in scheduler.optimizer.param_groups]

    def put_back(self) -> None:
        """Restore both."""
        self._scheduler.load_state_dict(fill_in(self._state, self._scheduler.state_dict()))
        for group, kept in zip(self._scheduler.optimizer.param_groups, self._groups, strict=True):
            group.update(kept)


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:  # Any: as various as settings are
    return {key: value for key, value in group.items() if key != "params"}
