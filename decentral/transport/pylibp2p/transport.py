"""Streams over py-libp2p's host, in a thread of its own beside whatever loop the peer runs on.

Speaks with daemons, with native peers, and with other implementations of libp2p: TCP, Noise, yamux, relays. It needs
the extra ``libp2p``; what strangers may hold is bounded as the native transport's is (docs/transports.md).
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, suppress
from dataclasses import dataclass, field
from typing import Generic, Self, TypeVar, TypeVarTuple

import anyio
import anyio.abc
import anyio.lowlevel
import anyio.to_thread
import sniffio
import trio

from decentral.errors import DecentralError, PeerUnreachable, StreamClosed
from decentral.flow.budget import Limits
from decentral.transport.base import OwnTransport, attend, everywhere
from decentral.transport.native.dialling import unreachable
from decentral.transport.native.links import LinkOptions
from decentral.transport.protocols.yamux import NativeStream
from decentral.transport.pylibp2p.node import Above, Libp2pNode
from decentral.wire.keys import PeerId, Signer, peer_name

logger = logging.getLogger("decentral.transport")


class PyLibp2pTransport(OwnTransport):
    """A peer on py-libp2p: see ``Transport``.

    ``listen`` defaults to all interfaces; TCP only. Entering raises ListenError when an address is taken, ConfigError
    when one is malformed.
    """

    def __init__(
        self,
        signer: Signer,
        *,
        listen: Sequence[str] | None = None,
        options: LinkOptions | None = None,
        limits: Limits | None = None,
    ) -> None:
        super().__init__(signer.peer, limits)  # counts are booked in the node's thread only
        self.options = options or LinkOptions()
        self._signer = signer
        self.listen_on = tuple(listen) if listen is not None else everywhere()
        self._node: Libp2pNode | None = None
        self._arrived: deque[tuple[str, ThreadedStream]] = deque()  # as many as negotiate at most

    async def __aenter__(self) -> Self:
        self.services.fixed, self._arrival = True, anyio.Event()
        above = Above(tuple(self.services.handlers), self._take, self.budget.comes_first, self.traffic)
        self._node = Libp2pNode(self._signer, self.listen_on, self.options, above)
        self._thread = TrioThread(self._node)
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._thread)
            handlers = await stack.enter_async_context(anyio.create_task_group())
            stack.callback(handlers.cancel_scope.cancel)
            handlers.start_soon(self._answer_all, handlers)
            self.stack = stack.pop_all()
        return self

    def addresses(self) -> tuple[str, ...]:
        """Return the addresses that others may dial."""
        return () if self._node is None else self._node.links.addresses()

    async def paths(self) -> dict[PeerId, tuple[str, ...]]:
        """Return the other ends of the connections there are."""
        try:
            return await self._thread.call(self.node.paths)
        except StreamClosed:
            return {}

    async def connect(self, peer: PeerId, addresses: Sequence[str]) -> None:
        """Dial ``peer`` at its addresses. The addresses are remembered for when the connection is gone."""
        try:
            await self._thread.call(self.node.links.dialler.connect, peer, tuple(addresses))
        except StreamClosed as error:
            raise unreachable(peer, error) from None

    async def open(self, peer: PeerId, protocol: str) -> ThreadedStream:
        """Open a stream to ``peer``."""
        try:
            inner = await self._thread.call(self.node.links.opener.open, peer, protocol, undo=NativeStream.reset)
        except StreamClosed as error:
            raise unreachable(peer, error) from None
        return ThreadedStream(self._thread, inner)

    @property
    def node(self) -> Libp2pNode:
        """The host, in whose thread everything but its counts is to be asked. PeerUnreachable before it has started."""
        if self._node is None:
            raise PeerUnreachable("this peer has not started")
        return self._node

    # ---- inbound ----

    def _take(self, protocol: str, stream: NativeStream) -> bool:
        """Have the stream answered, from the node's thread, in the loop that entered."""
        stream.traffic = self.traffic
        self._thread.post_home(self._note, protocol, ThreadedStream(self._thread, stream))
        return True

    def _note(self, protocol: str, stream: ThreadedStream) -> None:
        self._arrived.append((protocol, stream))
        self._arrival.set()

    async def _answer_all(self, group: anyio.abc.TaskGroup) -> None:
        """Answer each stream in a task that a task starts: asyncio's callbacks have none of their own."""
        while True:
            await self._arrival.wait()
            self._arrival = anyio.Event()
            while self._arrived:
                protocol, stream = self._arrived.popleft()
                group.start_soon(self._attend, stream, protocol)

    async def _attend(self, stream: ThreadedStream, protocol: str) -> None:
        try:
            with self.budget.inbound(stream.peer):
                await attend(stream, protocol, self.services.handlers[protocol])
        except DecentralError as error:
            logger.debug("inbound stream of %s refused: %s", peer_name(stream.peer), error)
        finally:
            with anyio.CancelScope(shield=True):
                await stream.aclose()


# ---- a stream, used from another loop ----


class ThreadedStream:
    """A stream of another loop. ``inner`` lives in ``thread``, and counts the bytes."""

    def __init__(self, thread: TrioThread, inner: NativeStream) -> None:
        self.peer = inner.peer
        self._thread, self._inner = thread, inner

    async def send(self, data: bytes | memoryview) -> None:
        """Send all of ``data``."""
        await self._thread.call(self._inner.send, data)

    async def receive_exactly(self, nbytes: int, on_bytes: Callable[[int], None] | None = None) -> bytes:
        """Return the next ``nbytes``."""
        receive = self._inner.receive_exactly
        if on_bytes is None:
            return await self._thread.call(receive, nbytes)
        return await self._thread.call_telling(receive, nbytes, tell=on_bytes)

    async def aclose(self) -> None:
        """Close; what was sent still arrives.

        What this peer sent before goes first, as the thread does one thing after another.
        """
        self._thread.post(self._inner.muxed.close)
        await anyio.lowlevel.checkpoint()

    def reset(self) -> None:
        """End both directions at once; what was sent may be lost."""
        self._thread.post(self._inner.reset)


# ---- a trio loop in a thread of its own ----
#
# And the two ways across: py-libp2p runs on trio, peers mostly on asyncio.
#
# A call costs two wake-ups, about 0.1 ms, whatever the number of bytes. Functions sent across keep their order.

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
Post = Callable[..., object]  # have a loop call a function soon, from any thread


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
        """Have the loop that asked look at what changed."""
        self.changed.set()

    def end(self) -> None:
        """Note that there is a result, or that none will come."""
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
            await self._join()
            raise self._error
        return self

    async def __aexit__(self, *exception: object) -> None:
        with anyio.CancelScope(shield=True):
            self.post(self._leave.set)
            await self._join()

    def post(self, function: Callable[[*Ts], object], *args: *Ts) -> None:
        """Have the trio loop call ``function``, which must not raise; nothing happens once it has ended."""
        with suppress(trio.RunFinishedError):
            self._there(function, *args)

    def post_home(self, function: Callable[[*Ts], object], *args: *Ts) -> None:
        """Have the loop that entered call, the other way, ``function``, which must not raise."""
        with suppress(trio.RunFinishedError, RuntimeError):  # its loop has ended
            self._home(function, *args)

    async def call(
        self, work: Callable[[*Ts], Awaitable[T]], *args: *Ts, undo: Callable[[T], object] | None = None
    ) -> T:
        """Run ``work`` in the trio loop; cancelled here, it is cancelled there. StreamClosed once that has ended.

        ``undo`` gets the result there when it came too late for who asked.
        """
        return await self._make_call(_Call[T](), work, args, None, undo)

    async def call_telling(
        self, work: Callable[[*Ts, Callable[[int], None]], Awaitable[T]], *args: *Ts, tell: Callable[[int], None]
    ) -> T:
        """Run it likewise; ``tell`` is called by the task that waits, with what ``work`` gives its last argument."""
        call = _Call[T]()

        def count_here(count: int) -> None:
            call.counts.append(count)
            self.post_home(call.wake)

        return await self._make_call(call, work, (*args, count_here), tell, None)

    async def _make_call(
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

    async def _join(self) -> None:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(self._thread.join)


def _poster() -> Post:
    """Return a function that has this loop call something, from any thread."""
    if sniffio.current_async_library() == "trio":
        return trio.lowlevel.current_trio_token().run_sync_soon
    return asyncio.get_running_loop().call_soon_threadsafe
