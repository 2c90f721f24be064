"""Cancel scopes of anyio under virtual time.

A scope knows the task that entered it, and a task its innermost scope; what lies between is found by going outwards,
and what a group's tasks stand in by going through the group. So entering and leaving, which every message does a dozen
times, touch two attributes, and cancelling, which is rare, looks around.
"""

from __future__ import annotations

from types import TracebackType
from typing import Self

from decentral.simulate.virtual.loop import Cancelled, Group, Loop, Scope, Task, Timer

__all__ = ["CancelScope", "outermost"]

_NEVER = float("inf")


class CancelScope:
    """See anyio.CancelScope.

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
        """See anyio.CancelScope."""
        if self.cancel_called:
            return
        self.cancel_called = True
        if self._task is not None:
            if self._timer is not None:
                Loop.current.stop(self._timer)
            self._look(self._task)

    @property
    def deadline(self) -> float:
        """See anyio.CancelScope."""
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
        """See anyio.CancelScope."""
        return self._shield

    @shield.setter
    def shield(self, value: bool) -> None:
        self._shield = value
        if self._task is not None:
            self._look(self._task)

    def _expire(self) -> None:
        self.cancel()

    def _look(self, task: Task) -> None:
        """What has become of this scope, and of all that are in it."""
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
    """What a main task begins in; never cancelled."""
    return CancelScope()
