"""The swarm as an outer loop sees it, and how a loop on a thread of its own drives it.

The loop is written once, as coroutines. Beside a node on one event loop they are awaited (`same_loop`). On the training
thread every await blocks the thread instead of suspending, so one ``send`` runs a coroutine to its end.
"""

from __future__ import annotations

import queue
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

from decentral.node.node import Node
from decentral.rounds.local_state import CommittedUpdate
from decentral.training.swarm.backlog import IsTime
from decentral.training.swarm.thread import SwarmThread

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class PendingResult(Protocol[T_co]):
    """Of work that was begun on the swarm's loop, and goes on whether or not anybody waits for it."""

    def done(self) -> bool:
        """Whether ``result`` need not wait."""
        ...

    async def result(self, within: float | None = None) -> T_co:
        """What the work returned or raised; TimeoutError after ``within`` seconds."""
        ...


class SwarmSide(Protocol):
    """Where rounds are made. Plain attributes of ``node`` may be read; all else is asked of its loop."""

    @property
    def node(self) -> Node:
        """The node that takes part for this loop."""
        ...

    @property
    def alive(self) -> bool:
        """Whether commits can still come."""
        ...

    @property
    def has_updates(self) -> bool:
        """Whether commits wait, be it their time or not."""
        ...

    async def next_update(self, within: float, is_time: IsTime) -> CommittedUpdate | None:
        """The next commit, in order, if ``is_time`` says so of it; None when it is not there by then, or too early."""
        ...

    def begin(self, work: Callable[..., Awaitable[T]], *args: Any) -> PendingResult[T]:
        """Run ``work(*args)`` on the swarm's loop; do not wait."""
        ...

    async def call(self, work: Callable[..., Awaitable[T]], *args: Any) -> T:
        """Run ``work(*args)`` on the swarm's loop and wait for its result."""
        ...


class AcrossThreads:
    """The swarm side of a loop whose thread is not the swarm's: what it awaits blocks, and never suspends."""

    def __init__(self, thread: SwarmThread[Node]) -> None:
        self._thread = thread

    @property
    def node(self) -> Node:
        """See SwarmSide."""
        return self._thread.node

    @property
    def alive(self) -> bool:
        """See SwarmSide."""
        return self._thread.alive

    @property
    def has_updates(self) -> bool:
        """See SwarmSide."""
        return not self._thread.updates.empty()

    async def next_update(self, within: float, is_time: IsTime) -> CommittedUpdate | None:
        """See SwarmSide."""
        try:
            return self._thread.updates.get(is_time, within if self.alive else None)
        except queue.Empty:
            return None

    def begin(self, work: Callable[..., Awaitable[T]], *args: Any) -> PendingResult[T]:
        """See SwarmSide."""
        return _Begun(self._thread.begin(work, *args))

    async def call(self, work: Callable[..., Awaitable[T]], *args: Any) -> T:
        """See SwarmSide."""
        return self._thread.call(work, *args)


class _Begun(PendingResult[T]):
    def __init__(self, future: Future[T]) -> None:
        self._future = future

    def done(self) -> bool:
        return self._future.done()

    async def result(self, within: float | None = None) -> T:
        return self._future.result(within)


def run_blocking(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that awaits nothing but what blocks, on the thread that calls."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    coroutine.close()
    raise AssertionError(f"{coroutine!r} suspended: nobody would ever go on with it")
