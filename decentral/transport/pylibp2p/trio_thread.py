"""A trio loop in a thread of its own, and the two ways across: py-libp2p runs on trio, peers mostly on asyncio.

A call costs two wake-ups, about 0.1 ms, whatever the number of bytes. Functions sent across keep their order.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass, field
from typing import Generic, TypeVar, TypeVarTuple

import anyio
import anyio.to_thread
import sniffio
import trio

from decentral.errors import StreamClosed

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
Post = Callable[..., object]  # have a loop call a function soon, from any thread

logger = logging.getLogger("decentral.transport")


@dataclass(eq=False)
class _Call(Generic[T]):
    """Work that one loop asked of the other."""

    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    changed: anyio.Event = field(default_factory=anyio.Event)
    over: bool = False
    counts: deque[int] = field(default_factory=deque)  # to be told to who asked
    results: list[T] = field(default_factory=list)
    error: Exception | None = None

    async def until_over(self, tell: Callable[[int], None] | None) -> None:
        """Wait, in the loop that asked."""
        while not self.over:
            await self.changed.wait()
            self.changed = anyio.Event()
            while tell is not None and self.counts:
                tell(self.counts.popleft())

    def wake(self) -> None:
        """What changed is looked at, in the loop that asked."""
        self.changed.set()

    def end(self) -> None:
        """There is a result, or none will come."""
        self.over = True
        self.changed.set()

    def result(self) -> T:
        if self.error is not None:
            raise self.error
        if not self.results:
            raise StreamClosed("this peer is leaving")
        return self.results[0]


class TrioThread:
    """Runs ``inside`` in a trio loop while it is entered, and calls beside it. Entering raises what ``inside`` does."""

    def __init__(self, inside: AbstractAsyncContextManager[object]) -> None:
        self._inside = inside
        self._calls: set[_Call[object]] = set()
        self._lock = threading.Lock()  # over the calls, and whether there may be more
        self._open = False
        self._error: Exception | None = None

    async def __aenter__(self) -> TrioThread:
        self._home, up = _poster(), anyio.Event()
        self._thread = threading.Thread(target=trio.run, args=(self._main, up), name="py-libp2p", daemon=True)
        self._leave = trio.Event()
        self._thread.start()
        with anyio.CancelScope(shield=True):  # bounded: what is entered binds sockets, and waits for nobody
            await up.wait()
        if self._error is not None:
            await self._joined()
            raise self._error
        return self

    async def __aexit__(self, *exception: object) -> None:
        with anyio.CancelScope(shield=True):
            self.post(self._leave.set)
            await self._joined()

    def post(self, function: Callable[[*Ts], object], *args: *Ts) -> None:
        """Have the trio loop call ``function``, which must not raise; nothing happens once it has ended."""
        with suppress(trio.RunFinishedError):
            self._there(function, *args)

    def post_home(self, function: Callable[[*Ts], object], *args: *Ts) -> None:
        """The other way: have the loop that entered call ``function``, which must not raise."""
        with suppress(trio.RunFinishedError, RuntimeError):  # its loop has ended
            self._home(function, *args)

    async def call(
        self, work: Callable[[*Ts], Awaitable[T]], *args: *Ts, undo: Callable[[T], object] | None = None
    ) -> T:
        """Run ``work`` in the trio loop; cancelled here, it is cancelled there. StreamClosed once that has ended.

        ``undo`` gets the result there when it came too late for who asked.
        """
        return await self._called(_Call[T](), work, args, None, undo)

    async def call_telling(
        self, work: Callable[[*Ts, Callable[[int], None]], Awaitable[T]], *args: *Ts, tell: Callable[[int], None]
    ) -> T:
        """The same; ``tell`` is called by the task that waits, with what ``work`` gives its last argument."""
        call = _Call[T]()

        def came(count: int) -> None:
            call.counts.append(count)
            self.post_home(call.wake)

        return await self._called(call, work, (*args, came), tell, None)

    async def _called(
        self,
        call: _Call[T],
        work: Callable[[*Ts], Awaitable[T]],
        args: tuple[*Ts],
        tell: Callable[[int], None] | None,
        undo: Callable[[T], object] | None,
    ) -> T:
        with self._lock:
            if not self._open:
                raise StreamClosed("this peer has left")
            self._calls.add(call)  # type: ignore[arg-type]  # a set of calls of any type
        self.post(self._begin, call, work, args)
        try:
            await call.until_over(tell)
        except BaseException:
            self.post(call.scope.cancel)
            with anyio.CancelScope(shield=True):
                await call.until_over(None)
            if undo is not None and call.results:
                self.post(undo, call.results[0])
            raise
        return call.result()

    # ---- in the thread ----

    async def _main(self, up: anyio.Event) -> None:
        try:
            async with self._inside, trio.open_nursery() as self._nursery:
                self._there, self._open = trio.lowlevel.current_trio_token().run_sync_soon, True
                self.post_home(up.set)
                await self._until_left()
        except Exception as error:
            self._error = error
            if up.is_set():
                logger.exception("the thread of py-libp2p failed")
        finally:
            for call in tuple(self._calls):  # that had no time to begin
                self._end(call)
            self.post_home(up.set)

    async def _until_left(self) -> None:
        try:
            await self._leave.wait()
        finally:
            with self._lock:
                self._open = False
            self._nursery.cancel_scope.cancel()

    def _begin(self, call: _Call[T], work: Callable[[*Ts], Awaitable[T]], args: tuple[*Ts]) -> None:
        if self._open:
            self._nursery.start_soon(self._run, call, work, args)
        else:
            self._end(call)  # type: ignore[arg-type]

    async def _run(self, call: _Call[T], work: Callable[[*Ts], Awaitable[T]], args: tuple[*Ts]) -> None:
        try:
            with call.scope:
                call.results.append(await work(*args))
        except Exception as error:  # noqa: BLE001  # it is raised where the call was made
            call.error = error
        finally:
            self._end(call)  # type: ignore[arg-type]

    def _end(self, call: _Call[object]) -> None:
        with self._lock:
            self._calls.discard(call)
        self.post_home(call.end)

    async def _joined(self) -> None:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(self._thread.join)


def _poster() -> Post:
    """What has the loop that runs here call something, from any thread."""
    if sniffio.current_async_library() == "trio":
        return trio.lowlevel.current_trio_token().run_sync_soon
    return asyncio.get_running_loop().call_soon_threadsafe
