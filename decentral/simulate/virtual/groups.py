"""Task groups of anyio under virtual time."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from decentral.simulate.virtual.loop import Cancelled, Job, Loop, Scope, Task, cancel_shielded_checkpoint, pause
from decentral.simulate.virtual.scopes import CancelScope, look_from

__all__ = ["TaskGroup"]

_NOTHING = object()


class TaskGroup:
    """See anyio.abc.TaskGroup; it returns no handles. ``host``: the task whose block it is."""

    __slots__ = ("_closed", "_errors", "_inside", "_starting", "_waiting", "cancel_scope", "host", "tasks")

    def __init__(self) -> None:
        self.cancel_scope = CancelScope()
        self.cancel_scope.group = self
        self.tasks: dict[Task, None] = {}
        self._errors: list[BaseException] = []
        self.host: Task | None = None
        self._inside = True  # its block is being executed
        self._waiting = self._closed = False
        self._starting = 0

    async def __aenter__(self) -> Self:
        self.host = Loop.current.task
        self.cancel_scope.__enter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if error is not None:
            self._fail(error)
        self._inside = False
        self._look()
        if self._closed:
            await cancel_shielded_checkpoint()
        else:
            self._waiting = True
            await pause(None)
        group = BaseExceptionGroup("errors of a task group", self._errors) if self._errors else None
        left = self.cancel_scope.close(group)
        if left is None:
            return True
        try:
            if isinstance(left, BaseExceptionGroup) and left.split(Cancelled)[1] is None:
                raise Cancelled from left
            raise left
        finally:
            del left, group, error
            self._errors = []

    def start_soon(self, func: Callable[..., Job], *args: object, name: object = None) -> None:
        """See anyio.abc.TaskGroup."""
        if self._closed or self.host is None:
            raise RuntimeError("This task group is not active; no new tasks can be started.")
        self.tasks[Loop.current.spawn(func(*args), self, self.cancel_scope)] = None

    async def start(self, func: Callable[..., Job], *args: object, name: object = None) -> Any:
        """See anyio.abc.TaskGroup. The task is a group's of its own until it has started."""
        if self._closed:
            raise RuntimeError("This task group is not active; no new tasks can be started.")
        self._starting += 1
        try:
            try:
                async with TaskGroup() as until_started:
                    status = _Status(until_started, self)

                    async def begin() -> None:
                        await func(*args, task_status=status)

                    until_started.start_soon(begin)
            except BaseExceptionGroup as group:
                raise group.exceptions[0]  # noqa: B904 - it is the task's own error, as if awaited
            if status.value is _NOTHING:
                raise RuntimeError("child exited without calling task_status.started()")
            return status.value
        finally:
            self._starting -= 1
            self._look()

    def ended(self, task: Task, error: BaseException | None) -> None:
        """One of its tasks has."""
        del self.tasks[task]
        if error is not None:
            self._fail(error)
        self._look()

    def take_over(self, other: TaskGroup) -> None:
        """Its tasks are this group's from now on."""
        tasks, other.tasks = other.tasks, {}
        for task in tasks:
            task.group = self
            self.tasks[task] = None
            _hang(task, other.cancel_scope, self.cancel_scope)
            look_from(task, self.cancel_scope)
        other._look()

    def _fail(self, error: BaseException) -> None:
        self._errors.append(error)
        self.cancel_scope.cancel()

    def _look(self) -> None:
        """Whether it is over."""
        if self._inside or self.tasks or self._starting:
            return
        self._closed = True
        if self._waiting:
            self._waiting = False
            assert self.host is not None
            Loop.current.resume(self.host)


class _Status:
    """See anyio.abc.TaskStatus."""

    def __init__(self, until_started: TaskGroup, group: TaskGroup) -> None:
        self._until_started, self._group = until_started, group
        self.value: object = _NOTHING

    def started(self, value: object = None) -> None:
        """See anyio.abc.TaskStatus. Who is being cancelled stays where it is: its end is near."""
        if self.value is not _NOTHING:
            raise RuntimeError("called 'started' twice on the same task status")
        self.value = value
        if not self._until_started.cancel_scope.effective:
            self._group.take_over(self._until_started)


def _hang(task: Task, before: Scope, after: Scope) -> None:
    """Its outermost scope lies in another from now on."""
    if task.scope is before:
        task.scope = after
        return
    scope = task.scope
    while scope.parent is not before:
        assert scope.parent is not None
        scope = scope.parent
    scope.parent = after
