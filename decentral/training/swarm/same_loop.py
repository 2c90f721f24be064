"""The swarm side of an outer loop that is a task on the node's own event loop, as in a simulation."""

from __future__ import annotations

import queue
from collections.abc import Awaitable, Callable
from concurrent.futures import CancelledError
from typing import Any, TypeVar

import anyio
import anyio.abc

from decentral.errors import DecentralError
from decentral.node.node import Node
from decentral.rounds.local_state import CommittedUpdate
from decentral.training.swarm.backlog import Backlog, IsTime
from decentral.training.swarm.side import PendingResult

T = TypeVar("T")


class Updates(Backlog):
    """A backlog that a task can wait for."""

    def __init__(self) -> None:
        super().__init__()
        self._news = anyio.Event()

    def put(self, update: CommittedUpdate) -> None:
        """Add the newest commit."""
        super().put(update)
        self._news.set()
        self._news = anyio.Event()

    async def next(self, within: float, is_time: IsTime) -> CommittedUpdate | None:
        """Take the oldest if ``is_time`` says so of it; None when there is no such one within so many seconds."""
        if within and not self.has_one(is_time):
            with anyio.move_on_after(within):
                await self._news.wait()
        try:
            return self.get(is_time)
        except queue.Empty:
            return None


class SameLoop:
    """The swarm side of a task beside ``node``. Work that is begun runs in ``group``, so that it outlives the wait."""

    alive = True  # as long as anybody can ask

    def __init__(self, node: Node, updates: Updates, group: anyio.abc.TaskGroup) -> None:
        self.node, self._updates, self._group = node, updates, group

    @property
    def has_updates(self) -> bool:
        """See SwarmSide."""
        return not self._updates.empty()

    async def next_update(self, within: float, is_time: IsTime) -> CommittedUpdate | None:
        """See SwarmSide."""
        return await self._updates.next(within, is_time)

    def begin(self, work: Callable[..., Awaitable[T]], *args: Any) -> PendingResult[T]:
        """See SwarmSide."""
        begun: _Begun[T] = _Begun()
        self._group.start_soon(begun.run, work, *args)
        return begun

    async def call(self, work: Callable[..., Awaitable[T]], *args: Any) -> T:
        """See SwarmSide."""
        return await self.begin(work, *args).result()


class _Begun(PendingResult[T]):
    def __init__(self) -> None:
        self._ended = anyio.Event()
        self._results: list[T] = []
        self._error: DecentralError | None = None

    async def run(self, work: Callable[..., Awaitable[T]], *args: Any) -> None:
        """Keeps the errors that a caller can do something about; others end the group."""
        try:
            self._results.append(await work(*args))
        except DecentralError as error:
            self._error = error
        finally:
            self._ended.set()

    def done(self) -> bool:
        return self._ended.is_set()

    async def result(self, within: float | None = None) -> T:
        if not self.done():
            with anyio.fail_after(within):
                await self._ended.wait()
        if self._error is not None:
            raise self._error
        if not self._results:
            raise CancelledError
        return self._results[0]
