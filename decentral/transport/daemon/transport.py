"""Streams over go-libp2p: the daemon that comes with hivemind, kept running, spoken to by raw binary streams.

Runs on asyncio. The daemon is this process's child and never outlives it; when it dies it is started again with
the same key, on the same ports if they are still free, and every protocol is served again.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from types import TracebackType
from typing import Any, Self

import anyio
import anyio.abc

from decentral.errors import PeerUnreachable
from decentral.flow.upload import Budget, Changes, Limits
from decentral.transport.address_book import AddressBook
from decentral.transport.base import Handler, Services, Traffic, Uncapped
from decentral.transport.daemon.child import private_folder
from decentral.transport.daemon.control import Control
from decentral.transport.daemon.inbound import Inbound
from decentral.transport.daemon.options import DaemonOptions, KeyFile
from decentral.transport.daemon.stream import DaemonStream
from decentral.transport.daemon.supervisor import Supervisor
from decentral.transport.listen import check_listen, dialable, everywhere
from decentral.wire.keys import PeerId, peer_name

_PARTING = 1.0  # s for what was sent last to be read when the transport is left


class DaemonTransport(Uncapped):
    """One peer on libp2p. See Transport.

    ``listen`` defaults to all interfaces. Entering raises ListenError when an address is taken, ConfigError when
    one is malformed or the key file cannot be used.
    """

    def __init__(
        self,
        identity: KeyFile,
        *,
        listen: Sequence[str] | None = None,
        options: DaemonOptions | None = None,
        limits: Limits | None = None,
    ) -> None:
        self.peer = identity.peer
        self.traffic = Traffic()
        self.budget = Budget(limits)
        self.options = options or DaemonOptions()
        self.listen_on = tuple(listen) if listen is not None else everywhere()
        self._services = Services()
        self._known = AddressBook()
        self._supervisor = Supervisor(identity, self.listen_on, self.options, self._known)
        self._inbound = Inbound(self._services, self.budget, self.traffic, self.options.dial_timeout)
        self._closing = 0  # streams that are left, and not read yet
        self._closed = Changes()
        self._stack: AsyncExitStack | None = None

    def serve(self, protocol: str, handler: Handler) -> None:
        """See Transport."""
        self._services.add(protocol, handler)

    async def __aenter__(self) -> Self:
        check_listen(self.listen_on)
        self._services.fixed = True
        self._stack = AsyncExitStack()
        try:
            await self._stack.enter_async_context(self._running())
        except ExceptionGroup as errors:
            raise _only(errors) from None
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        assert self._stack is not None, "entered before it is left"
        await self._stack.__aexit__(None, None, None)  # the body's error leaves as it is
        return None

    async def paths(self) -> dict[PeerId, tuple[str, ...]]:
        """See Transport."""
        await self._supervisor.until_up(self.peer)
        return await self._control.connections()

    def addresses(self) -> tuple[str, ...]:
        """See Transport."""
        return dialable(self._supervisor.found, peer_name(self.peer))

    async def connect(self, peer: PeerId, addresses: Sequence[str]) -> None:
        """See Transport. The addresses are remembered for when the daemon has to be started again."""
        self._known.remember(peer, addresses)
        await self._supervisor.until_up(peer)
        await self._control.connect(peer, addresses)

    async def open(self, peer: PeerId, protocol: str) -> DaemonStream:
        """See Transport."""
        await self._supervisor.until_up(peer)
        try:
            ends = await self._control.open(peer, protocol)
        except PeerUnreachable:
            addresses = self._known.find(peer)
            if addresses is None:
                raise
            await self._control.connect(peer, addresses)
            ends = await self._control.open(peer, protocol)
        return DaemonStream(peer, *ends, self.traffic, self._later)

    @asynccontextmanager
    async def attached(self) -> AsyncIterator[Any]:  # Any: hivemind.P2P, which has no types
        """hivemind's own client of the daemon that runs now, for its DHT. Its bytes count in ``traffic``."""
        from decentral.transport.daemon.unary import attached

        await self._supervisor.until_up(self.peer)
        async with attached(self.folder, self._control.socket, self.traffic) as client:
            yield client

    @property
    def dht_host(self) -> Self:
        """See Transport."""
        return self

    @property
    def is_private(self) -> bool:
        """Whether it was told that others cannot dial it."""
        return self.options.reachability == "private"

    @property
    def starts(self) -> int:
        """Daemons started so far; grows when one died."""
        return self._supervisor.starts

    @property
    def daemon_pid(self) -> int | None:
        """The operating system's number of the newest daemon."""
        return self._supervisor.pid

    async def until_restarted(self, starts: int) -> None:
        """Wait until the daemon with number ``starts`` is no more and its successor answers."""
        await self._supervisor.until_restarted(starts)

    @asynccontextmanager
    async def _running(self) -> AsyncIterator[None]:
        with private_folder() as self.folder:
            self._control = Control(str(self.folder / "d.sock"), self.options.dial_timeout)
            async with (
                self._inbound.served(str(self.folder / "i.sock")),
                anyio.create_task_group() as self._group,
            ):
                self._inbound.group = self._group
                try:
                    await self._group.start(self._supervisor.run, self._group, self._control, self._inbound.offer)
                    yield
                    await self._all_closed()
                finally:
                    self._inbound.end()
                    self._group.cancel_scope.cancel()

    def _later(self, close: Callable[[], Awaitable[None]]) -> None:
        async def closing() -> None:
            try:
                await close()
            finally:
                self._closing -= 1
                self._closed.tell()

        self._group.start_soon(closing)
        self._closing += 1

    async def _all_closed(self) -> None:
        """What was said last, a goodbye say, may still be on its way to the daemon or the peer."""
        with anyio.move_on_after(_PARTING):
            while self._closing:
                await self._closed.next()


def _only(errors: ExceptionGroup[Exception]) -> Exception:
    """The error itself, when it is alone: a task group wraps whatever passes through it."""
    first = errors.exceptions[0]
    if len(errors.exceptions) > 1:
        return errors
    return _only(first) if isinstance(first, ExceptionGroup) else first
