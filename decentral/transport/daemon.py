"""Streams over go-libp2p: the daemon that comes with hivemind, kept running, spoken to by raw binary streams.

Runs on asyncio. The daemon is this process's child and never outlives it; when it dies it is started again with
the same key, on the same ports if they are still free, and every protocol is served again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Protocol, Self

import anyio
import anyio.abc

from decentral.errors import DecentralError, ListenError, PeerUnreachable, TransportError
from decentral.transport.base import Handler, Services, Traffic, attend
from decentral.transport.budget import Budget, Limits
from decentral.transport.child import Child, launched, private_folder
from decentral.transport.control import READ_LIMIT, Control, Ends, drop, read_stream_info
from decentral.transport.daemon_stream import DaemonStream
from decentral.transport.listen import check_listen, dialable, everywhere, pinned
from decentral.transport.placeless import Placeless, grants_little, until_placed, until_worth_a_restart
from decentral.wire.keys import PeerId, peer_name

_REMEMBERED = 1024  # peers whose addresses are dialled again after the daemon died
_LOOK_EVERY = 5.0  # s between looks at the daemon's addresses: relays and NATs change them
_LISTEN_POLL = 0.02  # s between questions to a daemon that does not listen yet
_FIRST_ATTEMPTS = 3  # one may be killed while it starts; what is wrong with all three is for the user to mend
_STINGY = 6  # starts for the sake of the limits; then a useless relay is better than no peer
_PARTING = 1.0  # s for what was sent last to be read when the transport is left
_LONGEST_PAUSE = 30.0  # s between attempts to start a daemon again

logger = logging.getLogger("decentral.transport")


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonOptions:
    """How the daemon takes part in the network."""

    announce: tuple[str, ...] = ()  # addresses to tell others instead of those found
    relays: tuple[str, ...] = ()  # one address per relay that may carry this peer's streams
    reachability: Literal["public", "private"] | None = None  # None: found out by asking others
    nat_port_map: bool = False  # ask the router to open a port (UPnP, NAT-PMP)
    dial_timeout: float = 10.0  # s, for open, connect and every request to the daemon
    start_timeout: float = 60.0  # s; 0.1 s is usual, a laden machine may take a hundred times that
    watcher: bool | None = None  # see transport.child.launched

    def flags(self) -> list[str]:
        """The daemon's command line, but for key, addresses and socket."""
        flags = ["-dhtServer=1", "-connManager=1", "-autonat=1", "-relay=1", "-relayDiscovery=0", "-tls=1"]
        flags.append(f"-natPortMap={int(self.nat_port_map)}")
        if self.reachability is not None:
            flags.append(f"-forceReachability{self.reachability.capitalize()}=1")
        if self.announce:
            flags.append(f"-announceAddrs={','.join(self.announce)}")
        if self.relays:
            flags += ["-autoRelay=1", f"-trustedRelays={','.join(self.relays)}"]
        return flags


class KeyFile(Protocol):
    """A libp2p private key file and whose it is: ``decentral.swarm.identity.Identity`` is one."""

    @property
    def path(self) -> Path:
        """The file the daemon reads."""
        ...

    @property
    def peer(self) -> PeerId:
        """The Ed25519 public key in it."""
        ...


class DaemonTransport:
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
        self.key = identity.path.absolute()
        self.peer = identity.peer
        self.traffic = Traffic()
        self.budget = Budget(limits)
        self.options = options or DaemonOptions()
        self.starts = 0  # daemons started so far; grows when one died
        self.daemon_pid: int | None = None
        self._listen = tuple(listen) if listen is not None else everywhere()
        self._services = Services()
        self._pinned = self._listen
        self._found: tuple[str, ...] = ()
        self._remembered: dict[PeerId, tuple[str, ...]] = {}
        self._inbound: set[asyncio.StreamWriter] | None = None  # None: not running
        self._placeless: Placeless | None = None
        self._stingy = 0  # starts in vain, as they would have made a useless relay
        self._closing = 0  # streams that are left, and not read yet
        self._closed = anyio.Event()
        self._up = anyio.Event()
        self._stack: AsyncExitStack | None = None

    def serve(self, protocol: str, handler: Handler) -> None:
        """See Transport."""
        self._services.add(protocol, handler)

    async def __aenter__(self) -> Self:
        check_listen(self._listen)
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
        await self._daemon_up(self.peer)
        return await self._control.connections()

    def addresses(self) -> tuple[str, ...]:
        """See Transport."""
        return dialable(self._found, peer_name(self.peer))

    async def connect(self, peer: PeerId, addresses: Sequence[str]) -> None:
        """See Transport. The addresses are remembered for when the daemon has to be started again."""
        self._remember(peer, addresses)
        await self._daemon_up(peer)
        await self._control.connect(peer, addresses)

    async def open(self, peer: PeerId, protocol: str) -> DaemonStream:
        """See Transport."""
        await self._daemon_up(peer)
        try:
            ends = await self._control.open(peer, protocol)
        except PeerUnreachable:
            if peer not in self._remembered:
                raise
            await self._control.connect(peer, self._remembered[peer])
            ends = await self._control.open(peer, protocol)
        return DaemonStream(peer, *ends, self.traffic, self._later)

    @asynccontextmanager
    async def attached(self) -> AsyncIterator[Any]:  # Any: hivemind.P2P, which has no types
        """hivemind's own client of the daemon that runs now, for its DHT. Its bytes count in ``traffic``."""
        from decentral.transport.unary import attached

        await self._daemon_up(self.peer)
        async with attached(self._folder, self._socket, self.traffic) as client:
            yield client

    async def until_restarted(self, starts: int) -> None:
        """Wait until the daemon with number ``starts`` is no more and its successor answers."""
        while self.starts == starts or not self._up.is_set():
            await (self._down if self._up.is_set() else self._up).wait()

    @property
    def _wants_a_place(self) -> bool:
        return bool(self.options.relays) and self.options.reachability == "private"

    @asynccontextmanager
    async def _running(self) -> AsyncIterator[None]:
        with private_folder() as self._folder:
            self._socket = str(self._folder / "d.sock")
            self._control = Control(self._socket, self.options.dial_timeout)
            server = await self._serve_inbound()
            try:
                async with anyio.create_task_group() as self._group:
                    try:
                        await self._group.start(self._keep_running)
                        yield
                        await self._all_closed()
                    finally:
                        self._end_inbound()
                        self._group.cancel_scope.cancel()
            finally:
                server.close()  # after the daemon: asyncio leaks a connection that is being accepted meanwhile

    async def _serve_inbound(self) -> asyncio.Server:
        def came(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if self._inbound is None:
                drop(writer)
                return
            self._inbound.add(writer)
            self._group.start_soon(self._attend, reader, writer)

        self._inbound = set()
        self._inbox = str(self._folder / "i.sock")
        return await asyncio.start_unix_server(came, self._inbox, limit=READ_LIMIT, backlog=1024)

    def _end_inbound(self) -> None:
        """Drop every inbound stream: a handler cancelled before its first step would close nothing."""
        streams, self._inbound = tuple(self._inbound or ()), None
        for writer in streams:
            drop(writer)

    def _later(self, close: Callable[[], Awaitable[None]]) -> None:
        async def closing() -> None:
            try:
                await close()
            finally:
                self._closing -= 1
                self._closed.set()

        self._group.start_soon(closing)
        self._closing += 1

    async def _all_closed(self) -> None:
        """What was said last, a goodbye say, may still be on its way to the daemon or the peer."""
        with anyio.move_on_after(_PARTING):
            while self._closing:
                self._closed = anyio.Event()
                await self._closed.wait()

    async def _attend(self, *ends: *Ends) -> None:
        reader, writer = ends
        stream = None
        try:
            with anyio.fail_after(self.options.dial_timeout):
                peer, protocol = await read_stream_info(reader)
            handler = self._handler(protocol)
            with self.budget.inbound(peer):
                stream = DaemonStream(peer, reader, writer, self.traffic)
                await attend(stream, protocol, handler)
        except (DecentralError, OSError, EOFError) as error:
            logger.debug("inbound stream refused: %s", error)
        finally:
            if stream is None:
                drop(writer)
            if self._inbound is not None:
                self._inbound.discard(writer)

    def _handler(self, protocol: str) -> Handler:
        if protocol not in self._services.handlers:
            raise TransportError(f"{protocol}: not served here")
        return self._services.handlers[protocol]

    async def _keep_running(self, *, task_status: anyio.abc.TaskStatus[None]) -> None:
        pause, attempts = 0.1, 0
        while True:
            try:
                async with self._one_daemon() as child:
                    if self.starts == 1:
                        task_status.started()
                    pause = 0.1
                    code = await child.wait()
                    logger.warning("the libp2p daemon ended (code %d) and is started again", code)
            except TransportError as error:
                attempts += 1
                if self.starts == 0 and (attempts == _FIRST_ATTEMPTS + self._stingy or isinstance(error, ListenError)):
                    raise
                logger.warning("the libp2p daemon cannot be started again, next try in %.1f s: %s", pause, error)
            await anyio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    @asynccontextmanager
    async def _one_daemon(self) -> AsyncIterator[Child]:
        listen = self._listen_now()
        arguments = [f"-listen=/unix{self._socket}", f"-id={self.key}", f"-hostAddrs={','.join(listen)}"]
        Path(self._socket).unlink(missing_ok=True)  # a killed daemon leaves its socket behind
        timeout = self.options.start_timeout
        launch = launched(
            [*arguments, *self.options.flags()], self._group, timeout=timeout, watcher=self.options.watcher
        )
        async with launch as child, self._control.held():
            await self._set_up(child)
            async with anyio.create_task_group() as group:
                group.start_soon(self._look_at_addresses)
                group.start_soon(self._dial_again)
                if self._wants_a_place:
                    group.start_soon(self._keep_a_place, child)
                try:
                    yield child
                finally:
                    self._up = anyio.Event()
                    self._down.set()
                    group.cancel_scope.cancel()

    def _listen_now(self) -> tuple[str, ...]:
        """The addresses of before, or others of their kind when somebody took those meanwhile."""
        try:
            check_listen(self._pinned)
        except ListenError:
            return self._listen
        return self._pinned

    async def _set_up(self, child: Child) -> None:
        peer, found = await self._listening()
        if peer != self.peer:
            raise TransportError(f"{self.key}: holds the key of {peer_name(peer)} now; put the old one back")
        for protocol in self._services.handlers:
            await self._control.handle(protocol, self._inbox)
        if self.options.reachability == "public" and self._stingy < _STINGY and await grants_little(peer, found):
            self._stingy += 1
            raise TransportError("as a relay it would carry 128 KiB a connection; another start grants more")
        if self._wants_a_place:
            found = list(await until_placed(self._control, self.options.relays, found))
        self._found = tuple(found)
        self._pinned = pinned(self._listen, found)
        self.starts += 1
        self.daemon_pid = child.pid
        self._down = anyio.Event()
        self._up.set()

    async def _listening(self) -> tuple[PeerId, list[str]]:
        """Who the daemon is and where it listens: it answers a moment before it does, with no address at all, and an
        invite made then would lead nowhere.
        """
        with anyio.move_on_after(self.options.start_timeout):
            while True:
                peer, found = await self._control.identify()
                if found:
                    return peer, found
                await anyio.sleep(_LISTEN_POLL)
        raise TransportError(f"the libp2p daemon listens on none of {', '.join(self._listen)}; give another address")

    async def _look_at_addresses(self) -> None:
        while True:
            await anyio.sleep(_LOOK_EVERY)
            try:
                self._found = tuple((await self._control.identify())[1])
            except TransportError as error:
                logger.debug("the daemon's addresses: %s", error)

    async def _dial_again(self) -> None:
        for peer, addresses in list(self._remembered.items()) if self.starts > 1 else []:
            try:
                await self._control.connect(peer, addresses)
            except TransportError as error:
                logger.debug("after the restart: %s", error)

    async def _keep_a_place(self, child: Child) -> None:
        self._placeless = self._placeless or Placeless(anyio.current_time())
        await until_worth_a_restart(self._placeless, self._control, self.options.relays, lambda: self._found)
        logger.warning("no place at a relay although one answers: the libp2p daemon is started again")
        child.kill()

    async def _daemon_up(self, peer: PeerId) -> None:
        with anyio.move_on_after(self.options.dial_timeout):
            await self._up.wait()
            return
        raise PeerUnreachable(f"{peer_name(peer)}: the libp2p daemon is being started again; try again")

    def _remember(self, peer: PeerId, addresses: Sequence[str]) -> None:
        self._remembered.pop(peer, None)
        if len(self._remembered) >= _REMEMBERED:
            del self._remembered[next(iter(self._remembered))]
        self._remembered[peer] = tuple(addresses)


def _only(errors: ExceptionGroup[Exception]) -> Exception:
    """The error itself, when it is alone: a task group wraps whatever passes through it."""
    first = errors.exceptions[0]
    if len(errors.exceptions) > 1:
        return errors
    return _only(first) if isinstance(first, ExceptionGroup) else first
