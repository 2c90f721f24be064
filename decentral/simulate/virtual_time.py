"""Virtual time: hours of timeouts in seconds, and the same interleaving for the same seed, in every process.

It is trio that runs, by a clock that jumps to the next deadline once no task can run. Names of its scheduler that are
not public: the switch for simulations with the generator behind its shuffles, which Hypothesis sets, too, and the queue
out of which tasks of a machine that sleeps are taken. A test holds them.

Every second event is the end of a sleep, for which trio makes a scope and cancels it. Here the clock wakes who sleeps.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import anyio
import trio
import trio._core._run as scheduler
from trio.abc import Clock, Instrument
from trio.lowlevel import (
    Abort,
    Task,
    add_instrument,
    checkpoint,
    current_task,
    remove_instrument,
    reschedule,
    wait_task_rescheduled,
)

__all__ = ["run_in_virtual_time", "suspend"]

T = TypeVar("T")
PATIENCE = 1000  # looks with nothing due: trio has to hear of what it says to itself through a socket


class VirtualClock(Clock):
    """A clock that stands while a task can run; trio's own ``MockClock`` would wait for ever where nothing is due."""

    def __init__(self) -> None:
        self.now = 0.0
        self.scope = trio.CancelScope()  # of all that runs by it
        self.suspended = _Suspended()
        self._looks = 0  # with nothing due
        self._asleep: list[tuple[float, int, _Sleeper]] = []  # a heap
        self._slept = 0  # how often anybody did

    def start_clock(self) -> None:
        """Begin at 0."""

    def current_time(self) -> float:
        """Return the seconds of virtual time."""
        return self.now

    def deadline_to_sleep_time(self, deadline: float) -> float:
        """Jump to the deadline, or to the end of a sleep before it: trio asks when no task can run."""
        asleep = self._asleep
        while asleep and asleep[0][2].task is None:
            heapq.heappop(asleep)
        due = min(deadline, asleep[0][0]) if asleep else deadline
        if due < math.inf:
            self.now = max(self.now, due)
            self._looks = 0
            self._wake()
        else:
            self._looks += 1
            if self._looks > PATIENCE:
                self.scope.cancel()
        return 0.0

    async def sleep(self, seconds: float) -> None:
        """Do what ``anyio.sleep`` does."""
        if seconds <= 0:
            await checkpoint()
            return
        sleeper = _Sleeper(current_task())
        self._slept += 1
        heapq.heappush(self._asleep, (self.now + seconds, self._slept, sleeper))
        await wait_task_rescheduled(sleeper.give_up)

    def _wake(self) -> None:
        while self._asleep and self._asleep[0][0] <= self.now:
            sleeper = heapq.heappop(self._asleep)[2]
            if sleeper.task is not None:
                reschedule(sleeper.task)


class _Sleeper:
    """A task until it is woken; None: it was cancelled."""

    __slots__ = ("task",)

    def __init__(self, task: Task) -> None:
        self.task: Task | None = task

    def give_up(self, raise_cancel: object) -> Abort:
        self.task = None
        return Abort.SUCCEEDED


def run_in_virtual_time(main: Callable[[], Awaitable[T]], seed: int) -> T:
    """Run ``main()`` under virtual time; equal seeds give equal interleavings."""
    clock = VirtualClock()

    async def run() -> T:
        with clock.scope:
            return await main()
        raise RuntimeError("every task waits, and nothing is due: this run would never end")

    names: Any = scheduler  # Any: not public
    before = names._ALLOW_DETERMINISTIC_SCHEDULING, names._r
    names._ALLOW_DETERMINISTIC_SCHEDULING, names._r = True, random.Random(seed)
    try:
        with _timing(clock):
            return trio.run(run, clock=clock)
    finally:
        names._ALLOW_DETERMINISTIC_SCHEDULING, names._r = before


@contextmanager
def _timing(clock: VirtualClock) -> Iterator[None]:
    """Have ``anyio.sleep`` and ``anyio.current_time`` go by this clock, for what runs by it and for nothing beside."""
    usual, context = (anyio.sleep, anyio.current_time), scheduler.GLOBAL_RUN_CONTEXT
    ours: object = clock

    def is_here() -> bool:
        return hasattr(context, "runner") and context.runner.clock is ours

    async def sleep(delay: float) -> None:
        await (clock.sleep if is_here() else usual[0])(delay)

    def current_time() -> float:
        return clock.now if is_here() else usual[1]()

    anyio.sleep, anyio.current_time = sleep, current_time
    try:
        yield
    finally:
        anyio.sleep, anyio.current_time = usual


# ---- machines that sleep ----


class _Suspended(Instrument):
    """Puts tasks aside that could run, where they are of a process that stands still. One for all: each task that can
    run is looked at.
    """

    def __init__(self) -> None:
        self.aside: dict[int, list[Task]] = {}  # by the root of its process

    def begin(self, root: int) -> None:
        """Put aside what could run by now."""
        if not self.aside:
            add_instrument(self)
        self.aside[root] = []
        for task in [task for task in _queue() if self._root_of(task) == root]:
            _queue().remove(task)
            self.aside[root].append(task)

    def end(self, root: int) -> None:
        """Let all go on: what came due meanwhile is done now."""
        _queue().extend(self.aside.pop(root))
        if not self.aside:
            remove_instrument(self)

    def task_scheduled(self, task: Task) -> None:
        """Put it aside, the last of the queue."""
        if (root := self._root_of(task)) is not None:
            _queue().remove(task)
            self.aside[root].append(task)

    def _root_of(self, task: Task | None) -> int | None:
        while task is not None:
            if id(task) in self.aside:
                return id(task)
            task = None if task.parent_nursery is None else task.parent_nursery.parent_task
        return None


def _queue() -> deque[Task]:
    names: Any = scheduler  # Any: not public
    queue: deque[Task] = names.GLOBAL_RUN_CONTEXT.runner.runq
    return queue


@contextmanager
def suspend(root: int) -> Iterator[None]:
    """Let no task below the one of this id, as anyio has it, make a step in the block, as on a machine that sleeps."""
    names: Any = scheduler  # Any: not public
    suspended: _Suspended = names.GLOBAL_RUN_CONTEXT.runner.clock.suspended
    suspended.begin(root)
    try:
        yield
    finally:
        suspended.end(root)
