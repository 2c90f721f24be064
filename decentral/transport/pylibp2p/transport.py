"""Streams over py-libp2p's host, in a thread of its own beside whatever loop the peer runs on.

Speaks with daemons, with native peers, and with other implementations of libp2p: TCP, Noise, yamux, relays. It needs
the extra ``libp2p``; what strangers may hold is bounded as the native transport's is (docs/transports.md).
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Self

import anyio
import anyio.abc
import anyio.lowlevel

from decentral.errors import DecentralError, PeerUnreachable, StreamClosed
from decentral.flow.budget import Budget, Limits
from decentral.transport.base import Handler, Services, Traffic, Uncapped, attend, everywhere
from decentral.transport.native.dialling import unreachable
from decentral.transport.protocols.yamux import NativeStream
from decentral.transport.pylibp2p.node import Above, Libp2pNode, PyLibp2pOptions
from decentral.transport.pylibp2p.trio_thread import TrioThread
from decentral.wire.keys import PeerId, Signer, peer_name

logger = logging.getLogger("decentral.transport")


class PyLibp2pTransport(Uncapped):
    """One peer on py-libp2p. See Transport.

    ``listen`` defaults to all interfaces; TCP only. Entering raises ListenError when an address is taken, ConfigError
    when one is malformed.
    """

    def __init__(
        self,
        signer: Signer,
        *,
        listen: Sequence[str] | None = None,
        options: PyLibp2pOptions | None = None,
        limits: Limits | None = None,
    ) -> None:
        self.peer = signer.peer
        self.traffic = Traffic()  # booked in the node's thread only
        self.budget = Budget(limits)  # of the loop that entered
        self.options = options or PyLibp2pOptions()
        self._services = Services()
        self._signer = signer
        self.listen_on = tuple(listen) if listen is not None else everywhere()
        self._node: Libp2pNode | None = None
        self._arrived: deque[tuple[str, ThreadedStream]] = deque()  # as many as negotiate at most
        self._stack: AsyncExitStack | None = None

    def serve(self, protocol: str, handler: Handler) -> None:
        """See Transport."""
        self._services.add(protocol, handler)

    async def __aenter__(self) -> Self:
        self._services.fixed, self._arrival = True, anyio.Event()
        above = Above(tuple(self._services.handlers), self._take, self.budget.comes_first, self.traffic)
        self._node = Libp2pNode(self._signer, self.listen_on, self.options, above)
        self._thread = TrioThread(self._node)
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._thread)
            handlers = await stack.enter_async_context(anyio.create_task_group())
            stack.callback(handlers.cancel_scope.cancel)
            handlers.start_soon(self._answer_all, handlers)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        assert self._stack is not None, "entered before it is left"
        await self._stack.__aexit__(None, None, None)  # the body's error leaves as it is
        return None

    def addresses(self) -> tuple[str, ...]:
        """See Transport."""
        return () if self._node is None else self._node.addresses()

    async def paths(self) -> dict[PeerId, tuple[str, ...]]:
        """See Transport."""
        try:
            return await self._thread.call(self.node.paths)
        except StreamClosed:
            return {}

    async def connect(self, peer: PeerId, addresses: Sequence[str]) -> None:
        """See Transport. The addresses are remembered for when the connection is gone."""
        try:
            await self._thread.call(self.node.connect, peer, tuple(addresses))
        except StreamClosed as error:
            raise unreachable(peer, error) from None

    async def open(self, peer: PeerId, protocol: str) -> ThreadedStream:
        """See Transport."""
        try:
            inner = await self._thread.call(self.node.open, peer, protocol, undo=NativeStream.reset)
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
        """In the node's thread: have the stream answered in the loop that entered."""
        stream.traffic = self.traffic
        self._thread.post_home(self._note, protocol, ThreadedStream(self._thread, stream))
        return True

    def _note(self, protocol: str, stream: ThreadedStream) -> None:
        self._arrived.append((protocol, stream))
        self._arrival.set()

    async def _answer_all(self, group: anyio.abc.TaskGroup) -> None:
        """Tasks are started by a task: asyncio's callbacks have none of their own."""
        while True:
            await self._arrival.wait()
            self._arrival = anyio.Event()
            while self._arrived:
                protocol, stream = self._arrived.popleft()
                group.start_soon(self._attend, stream, protocol)

    async def _attend(self, stream: ThreadedStream, protocol: str) -> None:
        try:
            with self.budget.inbound(stream.peer):
                await attend(stream, protocol, self._services.handlers[protocol])
        except DecentralError as error:
            logger.debug("inbound stream of %s refused: %s", peer_name(stream.peer), error)
        finally:
            with anyio.CancelScope(shield=True):
                await stream.aclose()


# ---- a stream, used from another loop ----


class ThreadedStream:
    """See Stream. ``inner`` lives in ``thread``, and counts the bytes."""

    def __init__(self, thread: TrioThread, inner: NativeStream) -> None:
        self.peer = inner.peer
        self._thread, self._inner = thread, inner

    async def send(self, data: bytes | memoryview) -> None:
        """See Stream."""
        await self._thread.call(self._inner.send, data)

    async def receive_exactly(self, nbytes: int, on_bytes: Callable[[int], None] | None = None) -> bytes:
        """See Stream."""
        receive = self._inner.receive_exactly
        if on_bytes is None:
            return await self._thread.call(receive, nbytes)
        return await self._thread.call_telling(receive, nbytes, tell=on_bytes)

    async def aclose(self) -> None:
        """See Stream. What this peer sent before goes first, as the thread does one thing after another."""
        self._thread.post(self._inner.muxed.close)
        await anyio.lowlevel.checkpoint()

    def reset(self) -> None:
        """End both directions at once; what was sent may be lost."""
        self._thread.post(self._inner.reset)
