"""Tasks under virtual time, and nothing else: what is left of trio's scheduler without sockets and threads.

Tasks that can run, run in batches: those that can when a batch begins, in an order that is drawn from the seed. When
none can, the clock jumps to the next timer. The rules are trio's, to the batch and to the draw, so that a seed is the
same run as under trio itself (a test compares them).

Source: trio 0.35, `trio._core._run` and `trio.testing.MockClock`, by the trio contributors (MIT or Apache 2.0).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Coroutine, Generator
from contextlib import suppress
from heapq import heapify, heappop, heappush
from types import TracebackType, coroutine
from typing import Any, Protocol, Self

__all__ = [
    "CancelScope",
    "Cancelled",
    "Job",
    "Loop",
    "Scope",
    "Task",
    "cancel_shielded_checkpoint",
    "checkpoint",
    "checkpoint_if_cancelled",
    "look_from",
    "outermost",
    "pause",
    "sleep",
]

Job = Coroutine[Any, Any, object]  # Any: what traps yield and are sent is this module's own
Abort = Callable[["Task"], object]  # told of a task that waits no more, as it is cancelled
_NEVER = float("inf")  # of a deadline, or of a sleep: no timer is started
_STALE = 1000  # timers that are not wanted any more and may stay in the heap


class Cancelled(BaseException):
    """A scope around this task was cancelled; caught by that scope."""


class Scope(Protocol):
    """A scope that a task stands in: ``CancelScope``."""

    cancel_called: bool
    effective: bool
    parent: Scope | None
    group: Group | None

    @property
    def shield(self) -> bool:
        """Return whether what is cancelled around it is not cancelled in it."""
        ...


class Group(Protocol):
    """A group that a task belongs to: ``TaskGroup`` in `decentral.simulate.backend`."""

    tasks: dict[Task, None]
    host: Task | None

    def ended(self, task: Task, error: BaseException | None) -> None:
        """Note that one of its tasks has ended."""
        ...


class Task:
    """A coroutine and where it stands. ``id``: as anyio's TaskInfo has it."""

    __slots__ = ("abort", "coro", "error", "group", "number", "scope")

    def __init__(self, coro: Job, number: int, group: Group | None, scope: Scope) -> None:
        self.coro, self.number, self.group, self.scope = coro, number, group, scope
        self.abort: Abort | None = None  # while it waits for what may be called off
        self.error: Cancelled | None = None  # to be raised where it waits

    @property
    def id(self) -> int:
        """Its number among all objects."""
        return id(self)


class Timer:
    """Something that is due at a time, unless it is called off or put off before."""

    __slots__ = ("due", "entry", "fire")

    def __init__(self, due: float, fire: Callable[[], object]) -> None:
        self.due, self.fire = due, fire
        self.entry = -1  # its entry in the heap; -1: none


class Loop:
    """A run: its tasks, its clock. ``current`` while it runs; there is one at a time."""

    current: Loop  # of the run in progress: anyio's functions take no argument that would tell

    def __init__(self, seed: int) -> None:
        self.now = 0.0
        self.task: Task  # the one that runs
        self.tasks: dict[Task, None] = {}
        self.before_step: Callable[[Task], object] | None = None
        self.over = False
        self._generator = random.Random(seed)
        self._generator.shuffle([0, 1])  # trio's own first two tasks
        self._ready: list[Task] = []
        self._suspended: dict[Scope, list[Task]] = {}  # whose tasks stand still, and those that could run meanwhile
        self._heap: list[tuple[float, int, Timer]] = []
        self._entries = self._wanted = self._count = 0

    # ---- tasks ----

    def spawn(self, coro: Job, group: Group | None, scope: Scope) -> Task:
        """Begin a task; it makes its first step in a later batch."""
        self._count += 1
        task = Task(coro, self._count, group, scope)
        self.tasks[task] = None
        self._ready.append(task)
        return task

    def resume(self, task: Task) -> None:
        """Let a task go on: what it waits for has come."""
        task.abort = None
        self._ready.append(task)

    def deliver(self, task: Task) -> None:
        """A scope around it was cancelled: it waits no more, unless it must."""
        abort, task.abort = task.abort, None
        if abort is not None:
            abort(task)
            task.error = Cancelled()
            self._ready.append(task)

    def suspend(self, scope: Scope) -> None:
        """Let no task in ``scope`` make a step until ``wake``, as on a machine that sleeps; time goes on."""
        self._suspended[scope] = []

    def wake(self, scope: Scope) -> None:
        """Undo ``suspend``: what came due meanwhile is done now."""
        self._ready += self._suspended.pop(scope, [])

    def _awake(self, tasks: list[Task]) -> list[Task]:
        """Give those that may make a step; the others are put aside."""
        awake = list[Task]()
        for task in tasks:
            scope: Scope | None = task.scope
            while scope is not None and scope not in self._suspended:
                scope = scope.parent
            (awake if scope is None else self._suspended[scope]).append(task)
        return awake

    # ---- timers ----

    def start(self, timer: Timer) -> None:
        """Have it fire when it is due."""
        self._entries += 1
        self._wanted += 1
        timer.entry = self._entries
        heappush(self._heap, (timer.due, timer.entry, timer))

    def stop(self, timer: Timer) -> None:
        """Call it off."""
        if timer.entry >= 0:
            timer.entry = -1
            self._wanted -= 1
            if len(self._heap) > 2 * self._wanted + _STALE:
                self._heap = [entry for entry in self._heap if entry[2].entry == entry[1]]
                heapify(self._heap)

    def _next_due(self) -> float | None:
        """When the first timer is due that is still wanted. One that was put off has its entry where it was."""
        heap = self._heap
        while heap:
            due, entry, timer = heap[0]
            if timer.entry != entry:
                heappop(heap)
            elif timer.due > due:
                heappop(heap)
                heappush(heap, (timer.due, entry, timer))
            else:
                return due
        return None

    def _fire(self) -> None:
        while (due := self._next_due()) is not None and due <= self.now:
            timer = heappop(self._heap)[2]
            timer.entry = -1
            self._wanted -= 1
            timer.fire()

    # ---- running ----

    def run(self, main: Job, scope: Scope) -> Any:  # Any: what ``main`` returns
        """Until ``main`` has ended; what it returned. Every task is closed then."""
        task = self.spawn(main, None, scope)
        try:
            while True:
                if self._heap:
                    self._fire()
                if not self._ready:
                    self._jump()
                    continue
                for one in self._batch():
                    try:
                        self._step(one)
                    except StopIteration as ended:
                        if one is task:
                            return ended.value
        finally:
            self.over = True
            for left in self.tasks:
                with suppress(BaseException):
                    left.coro.close()

    def _jump(self) -> None:
        due = self._next_due()
        if due is None:
            raise RuntimeError("every task waits, and nothing is due: this run would never end")
        self.now += due - self.now  # trio's sum: another rounding would be another run

    def _batch(self) -> list[Task]:
        """The tasks that can run, as ``random.shuffle`` leaves them, from its end."""
        batch, self._ready = self._ready, []
        if self._suspended:
            batch = self._awake(batch)
        if len(batch) == 1:
            return batch
        batch.sort(key=_number)
        getrandbits = self._generator.getrandbits
        for i in range(len(batch) - 1, 0, -1):
            bits = (i + 1).bit_length()
            j = getrandbits(bits)
            while j > i:
                j = getrandbits(bits)
            batch[i], batch[j] = batch[j], batch[i]
        batch.reverse()
        return batch

    def _step(self, task: Task) -> None:
        """Step once. StopIteration when the main task has ended; its errors are raised, others are their group's."""
        self.task = task
        if self.before_step is not None:
            self.before_step(task)
        error, task.error = task.error, None
        try:
            abort = task.coro.send(error)
        except StopIteration:
            del self.tasks[task]
            if task.group is None:
                raise
            task.group.ended(task, None)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as failed:
            del self.tasks[task]
            if task.group is None:
                raise
            task.group.ended(task, failed)
        else:
            if abort is _AGAIN:
                self._ready.append(task)
            else:
                task.abort = abort
                if task.scope.effective:
                    self.deliver(task)


def _number(task: Task) -> int:
    return task.number


def _again(task: Task) -> None:
    """Yielded by who only lets others run."""


_AGAIN: Abort = _again


def leave_be(task: Task) -> None:
    """Nothing is to be undone when this wait is called off."""


@coroutine
def pause(abort: Abort | None) -> Generator[Abort | None, Cancelled | None, None]:
    """Wait until resumed. ``abort`` is told when the wait is called off; None: it cannot be. Raises Cancelled."""
    if Loop.current.over:
        raise Cancelled
    error = yield abort
    if error is not None:
        raise error


@coroutine
def cancel_shielded_checkpoint() -> Generator[Abort | None, Cancelled | None, None]:
    """Let others run."""
    if Loop.current.over:
        raise Cancelled
    yield _AGAIN


@coroutine
def checkpoint() -> Generator[Abort | None, Cancelled | None, None]:
    """Let others run; raises Cancelled if a scope around this was cancelled."""
    loop = Loop.current
    if loop.over:
        raise Cancelled
    yield _AGAIN
    if loop.task.scope.effective:
        error = yield leave_be
        assert error is not None, "the scope is cancelled"
        raise error


async def checkpoint_if_cancelled() -> None:
    """As ``checkpoint``, if a scope around this was cancelled."""
    if Loop.current.task.scope.effective:
        await checkpoint()


@coroutine
def sleep(delay: float) -> Generator[Abort | None, Cancelled | None, None]:
    """Wait so many seconds of virtual time."""
    if delay == 0:
        yield from checkpoint()
        return
    loop = Loop.current
    if loop.over:
        raise Cancelled
    task = loop.task
    if delay == _NEVER:
        error = yield leave_be
    else:
        timer = Timer(loop.now + delay, lambda: loop.resume(task))
        loop.start(timer)
        error = yield lambda _: loop.stop(timer)
    if error is not None:
        raise error
    if task.scope.effective:  # cancelled between the timer and this step
        raise Cancelled


# ---- cancel scopes ----
#
# A scope knows the task that entered it, and a task its innermost scope; what lies between is found by going outwards,
# and what a group's tasks stand in by going through the group. So entering and leaving, which every message does a
# dozen times, touch two attributes, and cancelling, which is rare, looks around.


class CancelScope:
    """An anyio.CancelScope.

    Attributes:
        effective: whether what waits in it is called off, by it or by a scope around it.
        group: the task group that it is the scope of.

    """

    __slots__ = (
        "_deadline",
        "_shield",
        "_task",
        "_timer",
        "cancel_called",
        "cancelled_caught",
        "effective",
        "group",
        "parent",
    )

    def __init__(self, *, deadline: float = _NEVER, shield: bool = False) -> None:
        self._deadline, self._shield = deadline, shield
        self.cancel_called = self.cancelled_caught = self.effective = False
        self.parent: Scope | None = None
        self.group: Group | None = None
        self._task: Task | None = None  # while it is entered
        self._timer: Timer | None = None

    def __enter__(self) -> Self:
        loop = Loop.current
        self._task = task = loop.task
        self.parent = parent = task.scope
        task.scope = self
        if loop.now >= self._deadline:
            self.cancel_called = True
        elif self._deadline != _NEVER and not self.cancel_called:
            self._timer = Timer(self._deadline, self._expire)
            loop.start(self._timer)
        self.effective = self.cancel_called or (parent.effective and not self._shield)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        left = self.close(error)
        if left is None or left is error:
            return left is None
        context = left.__context__
        try:
            raise left
        finally:
            left.__context__ = context

    def close(self, error: BaseException | None) -> BaseException | None:
        """Leave it; what is left of an error when its own cancellation is taken out of it."""
        task, parent = self._task, self.parent
        assert task is not None
        assert parent is not None
        assert task.scope is self, "scopes are left in the opposite order of being entered"
        task.scope, self._task = parent, None
        if self._timer is not None:
            Loop.current.stop(self._timer)
            self._timer = None
        if error is None or not self.effective or (parent.effective and not self._shield):
            return error
        if isinstance(error, Cancelled):
            self.cancelled_caught = True
            return None
        if isinstance(error, BaseExceptionGroup):
            caught, left = error.split(Cancelled)
            self.cancelled_caught = self.cancelled_caught or caught is not None
            return left
        return error

    def cancel(self, reason: str | None = None) -> None:
        """Do what ``anyio.CancelScope.cancel`` says."""
        if self.cancel_called:
            return
        self.cancel_called = True
        if self._task is not None:
            if self._timer is not None:
                Loop.current.stop(self._timer)
            self._look(self._task)

    @property
    def deadline(self) -> float:
        """Return ``anyio.CancelScope.deadline``."""
        return self._deadline

    @deadline.setter
    def deadline(self, value: float) -> None:
        self._deadline = value
        timer = self._timer
        if timer is not None and timer.entry >= 0 and value >= timer.due and value != _NEVER:
            timer.due = value  # its entry in the heap is found too early, and put off then
            return
        if timer is not None:
            Loop.current.stop(timer)
            self._timer = None
        if self._task is not None and value != _NEVER and not self.cancel_called:
            self._timer = Timer(value, self._expire)
            Loop.current.start(self._timer)

    @property
    def shield(self) -> bool:
        """Return ``anyio.CancelScope.shield``."""
        return self._shield

    @shield.setter
    def shield(self, value: bool) -> None:
        self._shield = value
        if self._task is not None:
            self._look(self._task)

    def _expire(self) -> None:
        self.cancel()

    def _look(self, task: Task) -> None:
        """Look at what has become of this scope, and of all that are in it."""
        assert self.parent is not None
        look_from(task, self.parent)


def look_from(task: Task, outer: Scope) -> None:
    """Tell the scopes of a task within ``outer``, and those of its groups' tasks, what was cancelled around them."""
    inner: list[Scope] = []
    scope = task.scope
    while scope is not outer:
        inner.append(scope)
        assert scope.parent is not None
        scope = scope.parent
    around = outer.effective
    for scope in reversed(inner):
        effective = scope.cancel_called or (around and not scope.shield)
        if effective != scope.effective:
            scope.effective = effective
            for child in tuple(scope.group.tasks) if scope.group is not None else ():
                look_from(child, scope)
        around = effective
    if around:
        Loop.current.deliver(task)


def outermost() -> CancelScope:
    """Return the scope that a main task begins in, which is never cancelled."""
    return CancelScope()
