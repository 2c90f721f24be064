"""Streams over go-libp2p: the daemon that comes with hivemind, kept running, spoken to by raw binary streams.

Runs on asyncio. The daemon is this process's child and never outlives it; when it dies it is started again with
the same key, on the same ports if they are still free, and every protocol is served again.
"""

from __future__ import annotations

import asyncio
import logging
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Self

import anyio
import anyio.abc
import anyio.to_thread

from decentral.errors import DecentralError, PayloadError, PeerUnreachable, TransportError
from decentral.flow.budget import Budget, Limits
from decentral.flow.waiting import Changes
from decentral.transport.base import (
    MAX_ADDRESSES,
    AddressBook,
    Handler,
    OwnTransport,
    Services,
    Traffic,
    attend,
    check_listen,
    dialable,
    everywhere,
)
from decentral.transport.daemon.control import READ_LIMIT, Control, DaemonStream, Ends, drop, read_stream_info
from decentral.transport.daemon.process import DaemonOptions, KeyFile, private_folder
from decentral.transport.daemon.supervisor import Supervisor
from decentral.transport.native.tcp import endpoint
from decentral.transport.protocols.messages import peer_from_id
from decentral.transport.protocols.noise import secure_outbound
from decentral.wire.keys import PeerId, Signer, peer_name

logger = logging.getLogger("decentral.transport")

_PARTING = 1.0  # s for what was sent last to be read when the transport is left


class DaemonTransport(OwnTransport):
    """A peer on libp2p, by the daemon: see ``Transport``.

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
        super().__init__(identity.peer, limits)
        self.options = options or DaemonOptions()
        self.listen_on = tuple(listen) if listen is not None else everywhere()
        self._known = AddressBook()
        self._supervisor = Supervisor(identity, self.listen_on, self.options, self._known)
        self._doors = Doors(self.options.dial_timeout)
        self._inbound = Inbound(self.services, self.budget, self.traffic, self.options.dial_timeout)
        self._closing = 0  # streams that are left, and not read yet
        self._closed = Changes()

    async def __aenter__(self) -> Self:
        check_listen(self.listen_on)
        self.services.fixed = True
        self.stack = AsyncExitStack()
        try:
            await self.stack.enter_async_context(self._running())
        except ExceptionGroup as errors:
            raise _only(errors) from None
        return self

    async def paths(self) -> dict[PeerId, tuple[str, ...]]:
        """Return the other ends of the connections there are."""
        await self._supervisor.until_up(self.peer)
        return await self._control.connections()

    def addresses(self) -> tuple[str, ...]:
        """Return the addresses that others may dial."""
        return dialable(self._supervisor.addresses, peer_name(self.peer))

    async def connect(self, peer: PeerId, addresses: Sequence[str]) -> None:
        """Dial ``peer`` at its addresses. The addresses are remembered for when the daemon has to be started again."""
        self._known.remember(peer, addresses)
        await self._supervisor.until_up(peer)
        await self._reach(peer, addresses, patient=True)

    async def open(self, peer: PeerId, protocol: str) -> DaemonStream:
        """Open a stream to ``peer``."""
        await self._supervisor.until_up(peer)
        addresses = self._known.find(peer)
        if addresses is not None and self._doors.are_shut(peer):
            await self._reach(peer, addresses, patient=False)
        try:
            ends = await self._control.open(peer, protocol)
        except PeerUnreachable:
            if addresses is None:
                raise
            await self._reach(peer, addresses, patient=False)
            ends = await self._control.open(peer, protocol)
        return DaemonStream(peer, *ends, self.traffic, self._later)

    async def _reach(self, peer: PeerId, addresses: Sequence[str], *, patient: bool) -> None:
        """Have the daemon dial, once it is known that the peer is there, or connected already."""
        opened = False
        async with anyio.create_task_group() as group:
            group.start_soon(self._look_for_connection, peer, group.cancel_scope)
            opened = await self._doors.knock(peer, addresses, patient=patient)
            group.cancel_scope.cancel()
        if not opened:
            if peer not in await self._control.connections():
                raise PeerUnreachable(f"{peer_name(peer)}: it answers at none of its addresses now; try again")
            self._doors.note_open(peer)
        await self._control.connect(peer, addresses)

    async def _look_for_connection(self, peer: PeerId, scope: anyio.CancelScope) -> None:
        """End a knock that lasts when the peer came by itself: most of those that cannot be dialled have."""
        await anyio.sleep(_LASTS)
        with suppress(DecentralError):
            if peer in await self._control.connections():
                scope.cancel()

    @asynccontextmanager
    async def attach(self) -> AsyncIterator[Any]:  # Any: hivemind.P2P, which has no types
        """Yield hivemind's own client of the daemon that runs now, for its DHT. Its bytes count in ``traffic``."""
        await self._supervisor.until_up(self.peer)
        async with hivemind_client(self.folder, self._control.socket, self.traffic) as client:
            yield client

    @property
    def dht_host(self) -> Self:
        """The host for hivemind's DHT, where there is one."""
        return self

    @property
    def is_private(self) -> bool:
        """Tell whether it was told that others cannot dial it."""
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
                self._inbound.serve_at(str(self.folder / "i.sock")),
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
        """Wait for what was said last: a goodbye, say, may still be on its way to the daemon or the peer."""
        with anyio.move_on_after(_PARTING):
            while self._closing:
                await self._closed.next()


def _only(errors: ExceptionGroup[Exception]) -> Exception:
    """Return the error itself, when it is alone: a task group wraps whatever passes through it."""
    first = errors.exceptions[0]
    if len(errors.exceptions) > 1:
        return errors
    return _only(first) if isinstance(first, ExceptionGroup) else first


# ---- knocking before the daemon dials ----
#
# go-libp2p does not dial an address again for 5 s after it failed there, then 6, 9, 14 s, up to 5 minutes, and calls it
# a failure meanwhile. Of two peers that are restarted together, the first to listen dials the other in vain: they met
# 7 s later where only that one had an address, and minutes later when it had been alone for long. So this process
# knocks, by a handshake that ends at once, and the daemon is not asked to dial who does not open.

_MOST_SHUT = 1024  # peers
_LASTS = 1.0  # s until a knock is said to last
_AGAIN = 1.0  # s from a knock in vain to the next one for the sake of a stream


class Doors:
    """The peers' addresses, as far as TCP leads there. ``timeout`` (s) is what all of one peer's have to answer."""

    def __init__(self, timeout: float) -> None:
        self._timeout, self._stranger = timeout, Signer.generate()  # who knocks is nobody they know
        self._shut: dict[PeerId, float] = {}  # until when a stream is refused at once, of those that did not open

    def are_shut(self, peer: PeerId) -> bool:
        """Tell whether ``peer`` did not open the last time."""
        return peer in self._shut

    async def knock(self, peer: PeerId, addresses: Sequence[str], *, patient: bool) -> bool:
        """Tell whether ``peer`` answers at one of them. True where a relay leads to it, or nothing that TCP can dial:
        the daemon may know more. False at once for one in vain a moment ago or under way, unless ``patient``: a machine
        that is off takes ``timeout`` to say nothing, and every vote for it would wait as long.
        """
        if not addresses or not all(map(endpoint, addresses)):
            return True
        now = anyio.current_time()
        if peer in self._shut:
            if now < self._shut[peer] and not patient:
                return False
            self._shut[peer] = now + self._timeout + _AGAIN
        opened = await self._knock(peer, addresses)
        if opened:
            self._shut.pop(peer, None)
        elif peer in self._shut or len(self._shut) < _MOST_SHUT:
            self._shut[peer] = anyio.current_time() + _AGAIN
        return opened

    def note_open(self, peer: PeerId) -> None:
        """Note that there is a connection, whoever dialled."""
        self._shut.pop(peer, None)

    async def _knock(self, peer: PeerId, addresses: Sequence[str]) -> bool:
        opened = anyio.Event()
        ends = dict.fromkeys(end for end in map(endpoint, addresses[:MAX_ADDRESSES]) if end is not None)
        with anyio.move_on_after(self._timeout):
            async with anyio.create_task_group() as group:
                for host, port in ends:
                    group.start_soon(self._try, host, port, peer, opened, group.cancel_scope)
        return opened.is_set()

    async def _try(self, host: str, port: int, peer: PeerId, opened: anyio.Event, scope: anyio.CancelScope) -> None:
        try:
            async with await anyio.connect_tcp(host, port) as socket:
                await secure_outbound(socket, self._stranger, peer)
        except (OSError, ValueError, DecentralError) as error:  # ValueError: of a name that no resolver takes
            logger.debug("%s at %s: %s", peer_name(peer), host, error)
            return
        opened.set()
        scope.cancel()


# ---- streams that others open ----
#
# The daemon brings each to a unix socket of this process, which serves its protocol.

_WAITING = 1024  # streams that the daemon has brought and that are not looked at yet


class Inbound:
    """The inbound streams of one transport. ``timeout`` (s) is what the daemon has to say whose a stream is."""

    def __init__(self, services: Services, budget: Budget, traffic: Traffic, timeout: float) -> None:
        self.group: anyio.abc.TaskGroup | None = None  # that handlers run in; None: streams are dropped
        self._services, self._budget, self._traffic, self._timeout = services, budget, traffic, timeout
        self._writers: set[asyncio.StreamWriter] = set()
        self._socket = ""

    @asynccontextmanager
    async def serve_at(self, socket: str) -> AsyncIterator[None]:
        """Take streams at this unix socket. To be left after the daemon has ended: asyncio leaks a connection that is
        being accepted meanwhile.
        """
        self._socket = socket
        server = await asyncio.start_unix_server(self._accept, socket, limit=READ_LIMIT, backlog=_WAITING)
        try:
            yield
        finally:
            server.close()

    async def offer(self, control: Control) -> None:
        """Have a daemon bring the streams of all protocols here."""
        for protocol in self._services.handlers:
            await control.handle(protocol, self._socket)

    def end(self) -> None:
        """Drop every inbound stream: a handler cancelled before its first step would close nothing."""
        self.group = None
        for writer in tuple(self._writers):
            drop(writer)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.group is None:
            drop(writer)
            return
        self._writers.add(writer)
        self.group.start_soon(self._attend, reader, writer)

    async def _attend(self, *ends: *Ends) -> None:
        reader, writer = ends
        stream = None
        try:
            with anyio.fail_after(self._timeout):
                peer, protocol = await read_stream_info(reader)
            handler = self._handler(protocol)
            with self._budget.inbound(peer):
                stream = DaemonStream(peer, reader, writer, self._traffic)
                await attend(stream, protocol, handler)
        except (DecentralError, OSError, EOFError) as error:
            logger.debug("inbound stream refused: %s", error)
        finally:
            if stream is None:
                drop(writer)
            self._writers.discard(writer)

    def _handler(self, protocol: str) -> Handler:
        if protocol not in self._services.handlers:
            raise TransportError(f"{protocol}: not served here")
        return self._services.handlers[protocol]


# ---- hivemind's client, for its DHT ----
#
# Attached to our daemon, counted, and taken down without a trace. Unary calls reach 50-100 MB/s and hold whole messages
# in memory: the DHT's small records only, never frames.

_ATTACHING = 2.0  # s: a daemon on this machine answers in milliseconds, or is dead


@asynccontextmanager
async def hivemind_client(folder: Path, socket: str, traffic: Traffic) -> AsyncIterator[Any]:  # Any: untyped hivemind
    """Yield a hivemind.P2P on the daemon behind ``socket``, closed when left; its own socket goes into ``folder``."""
    await anyio.to_thread.run_sync(quiet_hivemind, abandon_on_cancel=True)  # takes a second or three
    from hivemind.p2p import P2P
    from hivemind.utils.multiaddr import Multiaddr

    private: Any = type("PrivateP2P", (P2P,), {"_UNIX_SOCKET_PREFIX": f"/unix{folder}/"})
    with anyio.fail_after(_ATTACHING, shield=True):  # cancelled meanwhile, it would leave its connection open
        client = await private.replicate(Multiaddr(f"/unix{socket}"))
    control = client._client.control
    _count_calls(control, traffic)
    try:
        yield client
    finally:
        await client.shutdown()
        await _take_down(control)


def _count_calls(control: Any, traffic: Traffic) -> None:  # Any: hivemind's ControlClient
    call, add = control.call_unary_handler, control.add_unary_handler

    async def call_and_count(peer: Any, protocol: str, data: bytes) -> bytes:
        _book(traffic, peer, sent=len(data))
        answer: bytes = await call(peer, protocol, data)
        _book(traffic, peer, received=len(answer))
        return answer

    async def add_counting(
        protocol: str, handler: Callable[[bytes, Any], Awaitable[bytes]], *rest: Any, **more: Any
    ) -> None:
        async def handle_and_count(data: bytes, peer: Any) -> bytes:
            _book(traffic, peer, received=len(data))
            answer = await handler(data, peer)
            _book(traffic, peer, sent=len(answer))
            return answer

        await add(protocol, handle_and_count, *rest, **more)

    control.call_unary_handler, control.add_unary_handler = call_and_count, add_counting


def _book(traffic: Traffic, peer: Any, *, sent: int = 0, received: int = 0) -> None:
    try:
        traffic.add(peer_from_id(peer.to_bytes()), sent=sent, received=received)
    except PayloadError:  # not one of ours; the bytes were exchanged all the same
        traffic.total.sent += sent
        traffic.total.received += received


async def _take_down(control: Any) -> None:
    """End the client's tasks and look at what they ended with, or asyncio prints it when they are collected."""
    tasks = [task for task in (control._read_task, control._write_task) if task is not None]
    tasks += control._handler_tasks.values()
    for task in tasks:
        task.cancel()
    for call in control._pending_calls.values():
        call.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def quiet_hivemind() -> None:
    """Import hivemind and keep its log lines off stderr: what matters of them comes as our errors and events."""
    with warnings.catch_warnings():
        for kind in (DeprecationWarning, FutureWarning):  # torch's, about how hivemind is written; 2.14 has the other
            warnings.simplefilter("ignore", kind)
        from hivemind.utils.logging import use_hivemind_log_handler
    use_hivemind_log_handler("nowhere")
    log = logging.getLogger("hivemind")
    log.propagate = False
    if not log.handlers:
        log.addHandler(logging.NullHandler())
