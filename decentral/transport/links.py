"""Connections to peers: dialled and accepted, found by peer id, and bounded in number.

A stranger costs a TCP connection and nothing else until it has proven who it is; when too many are at it, the one that
takes longest is dropped, and so is, among those that have, the one that has been idle longest. Peers in use stay.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import anyio
import anyio.abc
import anyio.lowlevel

from decentral.errors import DecentralError, PayloadError, PeerUnreachable
from decentral.transport.circuit import HOP, RelayedSocket, pass_through, relay_of
from decentral.transport.multistream import answer, propose
from decentral.transport.muxed_stream import MuxedStream, Stock
from decentral.transport.native_stream import NativeStream
from decentral.transport.secured import Secured, Socket, close_now, secure_inbound, secure_outbound
from decentral.transport.tcp import endpoint
from decentral.transport.yamux import PROTOCOL, Session
from decentral.wire.keys import PeerId, Signer, peer_name

_STRANGERS = 64  # connections in their handshake, which takes an honest peer three round trips
_CONNECTIONS = 512  # inbound; about 60 KiB each when idle
_OF_ONE_PEER = 4  # inbound; both may dial at once, and a path may die unnoticed
_REMEMBERED = 1024  # peers whose addresses are dialled again
_DIALLED_AT_ONCE = 8  # addresses of one peer
_HEAD_START = 0.5  # s that direct addresses have before a relay is asked
_NO_FILES = 0.2  # s until connections are accepted again
_STOCK = 1 << 25  # bytes by which windows may grow beyond 256 KiB, all streams together

logger = logging.getLogger("decentral.transport")

OnStream = Callable[[Session, MuxedStream], None]


class Links:
    """The sessions of one transport."""

    def __init__(self, signer: Signer, timeout: float, on_stream: OnStream) -> None:
        self._signer, self._timeout, self._on_stream = signer, timeout, on_stream
        self._stock = Stock(_STOCK)
        self._sessions: dict[PeerId, list[Session]] = {}
        self._inbound: dict[Session, None] = {}  # longest connected first
        self._strangers: dict[anyio.CancelScope, None] = {}
        self._remembered: dict[PeerId, tuple[str, ...]] = {}
        self._dialling: dict[PeerId, anyio.Event] = {}
        self._group: anyio.abc.TaskGroup | None = None

    def start(self, group: anyio.abc.TaskGroup) -> None:
        """Run sessions in ``group`` from now on."""
        self._group = group

    def has(self, peer: PeerId) -> bool:
        """Whether there is a connection."""
        return self._usable(peer) is not None

    async def session(self, peer: PeerId) -> Session:
        """A connection to ``peer``, dialled when there is none. PeerUnreachable."""
        found = self._usable(peer)
        if found is None:
            if peer not in self._remembered:
                raise PeerUnreachable(f"{peer_name(peer)}: no connection, and no address is known; ask others for one")
            await self.connect(peer, self._remembered[peer])
            found = self._usable(peer)
        if found is None:
            raise PeerUnreachable(f"{peer_name(peer)}: it ended the connection at once; try again or ask another peer")
        return found

    async def connect(self, peer: PeerId, addresses: Sequence[str]) -> None:
        """Have a connection to ``peer``; its addresses are remembered. PeerUnreachable."""
        await anyio.lowlevel.checkpoint()
        if peer == self._signer.peer:
            raise PeerUnreachable(f"{peer_name(peer)}: that is this peer itself")
        self._remember(peer, addresses)
        await self._reach(peer, addresses)

    async def _reach(self, peer: PeerId, addresses: Sequence[str]) -> None:
        while peer in self._dialling:
            await self._dialling[peer].wait()
        if self.has(peer):
            return
        self._dialling[peer] = anyio.Event()
        try:
            await self._dial(peer, addresses)
        finally:
            self._dialling.pop(peer).set()

    async def listen(self, listener: anyio.abc.SocketListener, group: anyio.abc.TaskGroup) -> None:
        """Accept for ever: with too many files open, connections wait until some are closed."""
        while True:
            try:
                group.start_soon(self._accept, await listener.accept())
            except OSError as error:
                logger.warning("connections cannot be accepted now: %s", error)
                await anyio.sleep(_NO_FILES)

    async def _accept(self, socket: anyio.abc.SocketStream) -> None:
        """One connection that came in, until it ends."""
        await self.admit(socket)

    def take_in(self, socket: Socket, expected: PeerId) -> None:
        """Serve a connection that a relay brought from ``expected``."""
        if self._group is not None:
            self._group.start_soon(self.admit, socket, expected)

    async def admit(self, socket: Socket, expected: PeerId | None = None) -> None:
        """Shake hands with who is at the other end, the ``expected`` one where a relay named it, and serve it."""
        scope = anyio.CancelScope(deadline=anyio.current_time() + self._timeout)
        self._strangers[scope] = None
        if len(self._strangers) > _STRANGERS:
            next(iter(self._strangers)).cancel()
        session = None
        try:
            with scope:
                secured = await secure_inbound(socket, self._signer)
                if expected not in (None, secured.peer):
                    raise PayloadError(f"{peer_name(secured.peer)} came under another name; drop the connection")
                await answer(secured, (PROTOCOL,))
                session = self._adopt(secured, dialled=False)
        except DecentralError as error:
            logger.debug("inbound connection: %s", error)
        finally:
            self._strangers.pop(scope, None)
            if session is None:
                await close_now(socket)
        if session is not None:
            await self._run(session)

    async def finish(self, timeout: float) -> None:
        """Let what is queued leave, then end every session; ``timeout`` s at most."""
        self._group = None
        for scope in tuple(self._strangers):
            scope.cancel()
        with anyio.CancelScope(shield=True):
            async with anyio.create_task_group() as group:
                for session in [s for sessions in self._sessions.values() for s in sessions]:
                    group.start_soon(session.finish, timeout)

    # ---- dialling ----

    async def _dial(self, peer: PeerId, addresses: Sequence[str]) -> None:
        """All addresses at once; the first that shakes hands is kept."""
        useful = (address for address in addresses if endpoint(address) or relay_of(address))
        chosen = list(dict.fromkeys(useful))[:_DIALLED_AT_ONCE]
        reasons: list[str] = []
        with anyio.move_on_after(self._timeout):
            async with anyio.create_task_group() as group:
                for address in chosen:
                    group.start_soon(self._try, peer, address, group.cancel_scope, reasons)
        if not self.has(peer):
            why = "; ".join(reasons[:2]) or f"none of its {len(addresses)} addresses answers over TCP"
            raise PeerUnreachable(f"{peer_name(peer)}: no path to it now: {why}; try again or ask another peer")

    async def _try(self, peer: PeerId, address: str, scope: anyio.CancelScope, reasons: list[str]) -> None:
        relayed = endpoint(address) is None
        try:
            if relayed:
                await anyio.sleep(_HEAD_START)  # who can be reached directly is
            async with self._upgraded(peer, address) as secured:
                session = self._adopt(secured, dialled=True)
        except (OSError, DecentralError) as error:
            reasons.append(f"{address}: {error}")
            return
        assert self._group is not None, "dialling after the end is refused"
        self._group.start_soon(self._run, session)
        scope.cancel()

    @asynccontextmanager
    async def _upgraded(self, peer: PeerId, address: str) -> AsyncIterator[Secured]:
        """A connection whose both ends are proven; closed when what is done with it fails."""
        if self._group is None:
            raise PeerUnreachable(f"{peer_name(peer)}: this peer is leaving")
        socket = await self._socket(peer, address)
        done = False
        try:
            secured = await secure_outbound(socket, self._signer, peer)
            await propose(secured, PROTOCOL)
            yield secured
            done = True
        finally:
            if not done:
                await close_now(socket)

    async def _socket(self, peer: PeerId, address: str) -> Socket:
        end, relay = endpoint(address), relay_of(address)
        if end is not None:
            return await anyio.connect_tcp(*end)
        assert relay is not None, "chosen before"
        return await self._through(relay[0], relay[1], peer)

    async def _through(self, relay: PeerId, where: str, peer: PeerId) -> Socket:
        """A stream to ``peer`` through a relay, which is dialled first where that is needed."""
        if relay == peer or endpoint(where) is None:
            raise PeerUnreachable(f"{peer_name(relay)}: no relay for {peer_name(peer)}")
        await self._reach(relay, (where,))  # not remembered: whoever names a relay may be lying about where it is
        muxed = (await self.session(relay)).open()
        joined = False
        try:
            stream = NativeStream(relay, muxed)
            await propose(stream, HOP)
            await pass_through(stream, peer)
            joined = True
        finally:
            if not joined:
                muxed.reset()
        return RelayedSocket(muxed)

    # ---- sessions ----

    def _adopt(self, secured: Secured, *, dialled: bool) -> Session:
        if self._group is None:
            raise PeerUnreachable("this peer is leaving")
        session = Session(
            secured, dialled=dialled, stock=self._stock, on_stream=lambda stream: self._on_stream(session, stream)
        )
        self._sessions.setdefault(secured.peer, []).append(session)
        if not dialled:
            self._inbound[session] = None
            self._thin_out(secured.peer)
        return session

    def _thin_out(self, peer: PeerId) -> None:
        """Too many of one peer: its oldest goes. Too many of all: the first idle one, or else the newest."""
        mine = [session for session in self._sessions[peer] if session in self._inbound]
        goes = None
        if len(mine) > _OF_ONE_PEER:
            goes = mine[0]
        elif len(self._inbound) > _CONNECTIONS:
            goes = next((session for session in self._inbound if session.idle and session not in mine), mine[-1])
        if goes is not None:
            del self._inbound[goes]  # now: it takes a moment to end, and must not be chosen for the next one, too
            goes.abort()

    async def _run(self, session: Session) -> None:
        try:
            await session.run()
        except Exception:
            # A peer may have found a bug of ours. Say so with the traceback; the other peers' connections go on.
            logger.exception("the connection to %s failed", peer_name(session.peer))
        finally:
            self._inbound.pop(session, None)
            sessions = self._sessions.get(session.peer, [])
            sessions.remove(session)
            if not sessions:
                self._sessions.pop(session.peer, None)

    def _usable(self, peer: PeerId) -> Session | None:
        """The newest connection: an older one may have died unnoticed."""
        return next((s for s in reversed(self._sessions.get(peer, [])) if s.usable), None)

    def _remember(self, peer: PeerId, addresses: Sequence[str]) -> None:
        self._remembered.pop(peer, None)
        if len(self._remembered) >= _REMEMBERED:
            del self._remembered[next(iter(self._remembered))]
        self._remembered[peer] = tuple(addresses)
