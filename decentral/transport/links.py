"""Connections to peers: dialled and accepted, found by peer id, and bounded in number.

A stranger costs a TCP connection and nothing else until it has proven who it is; when too many are at it, the one that
takes longest is dropped, and so is, among those that have, the one that has been idle longest. Peers in use stay.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import anyio
import anyio.abc
import anyio.lowlevel

from decentral.errors import DecentralError, PayloadError, PeerUnreachable
from decentral.transport.circuit import HOP, RelayedSocket, pass_through, relay_of
from decentral.transport.multistream import answer, propose
from decentral.transport.muxed_stream import MuxedStream, Stock
from decentral.transport.native_stream import NativeStream
from decentral.transport.ports import End, Ports
from decentral.transport.relay_limits import network_of
from decentral.transport.secured import Secured, Socket, close_now, secure_inbound, secure_outbound
from decentral.transport.tcp import SocketEnds, endpoint, ends_of, far_end
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
OnRelayed = Callable[[Session, bool], None]  # and whether it was dialled from here


class Links:
    """The sessions of one transport."""

    def __init__(
        self,
        signer: Signer,
        timeout: float,
        on_stream: OnStream,
        *,
        connections: int | None = None,
        stock: int | None = None,
        of_one_network: int | None = None,
    ) -> None:
        self._signer, self._timeout, self._on_stream = signer, timeout, on_stream
        self.is_guest: Callable[[PeerId], bool] = _no_guest  # whether its connection stays, idle or not
        self.on_gone: Callable[[PeerId], None] = _no_matter  # told when a peer's last connection ended
        self.on_relayed: OnRelayed = _leave_it  # told when a connection through a relay stands
        self.ports = Ports()
        self.punching: dict[End, PeerId] = {}  # ends that are dialled from here now: who comes from there is answered
        self._stock = Stock(_STOCK if stock is None else stock)
        self._most = _CONNECTIONS if connections is None else connections
        self._of_one_network = of_one_network
        self._sessions: dict[PeerId, list[Session]] = {}
        self._sockets: dict[Session, SocketEnds] = {}
        self._relayed: dict[Session, PeerId] = {}  # through which relay
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

    def paths(self) -> dict[PeerId, tuple[str, ...]]:
        """The other ends of the connections there are, those that streams are opened on first."""
        return {
            peer: tuple(self._sockets[session].remote for session in self._preferred(peer)) for peer in self._sessions
        }

    def ends(self, session: Session) -> SocketEnds:
        """Where a connection that stands leads."""
        return self._sockets.get(session) or SocketEnds("/p2p-circuit")

    def relay_of(self, session: Session) -> PeerId | None:
        """Who carries it; None for a direct one."""
        return self._relayed.get(session)

    def is_direct(self, peer: PeerId) -> bool:
        """Whether there is a connection without a relay in between."""
        found = self._usable(peer)
        return found is not None and found not in self._relayed

    def standing(self, peer: PeerId) -> Session | None:
        """The connection that a stream would be opened on now, if there is one."""
        return self._usable(peer)

    def local_port(self, peer: PeerId) -> int:
        """This side's port of the newest connection to ``peer``; 0 when there is none, or it is relayed."""
        sessions = self._sessions.get(peer)
        return self._sockets[sessions[-1]].local_port if sessions else 0

    @property
    def num_peers(self) -> int:
        """Peers with a connection."""
        return len(self._sessions)

    def host_of(self, peer: PeerId) -> str | None:
        """The host at the other end of a peer's connection; None when there is a relay in between."""
        found = self._usable(peer)
        return None if found is None else self._sockets[found].host

    def dialled_through_relay(self, peer: PeerId) -> bool:
        """Whether one of the relayed connections to ``peer`` was dialled from here."""
        return any(session.dialled and session in self._relayed for session in self._sessions.get(peer, []))

    def learn(self, peer: PeerId, addresses: Sequence[str]) -> None:
        """Remember where ``peer`` says that it can be dialled, unless that is known already."""
        if addresses and peer not in self._remembered:
            self._remember(peer, addresses[:_DIALLED_AT_ONCE])

    async def dial_directly(self, peer: PeerId, ends: Sequence[End], timeout: float) -> bool:
        """Dial although there is a connection; whether there is a direct one now."""
        with anyio.move_on_after(timeout):
            async with anyio.create_task_group() as group:
                for host, port in ends:
                    address = f"/ip{6 if ':' in host else 4}/{host}/tcp/{port}"
                    group.start_soon(self._try, peer, address, group.cancel_scope, [])
        return self.is_direct(peer)

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
        peer = self.punching.get(far_end(socket))
        if peer is None:
            await self.admit(socket)
        else:  # it dials at the same time, and counts on being answered as the one who was dialled
            await self.meet(socket, peer, dialled=True)

    def take_in(self, socket: Socket, expected: PeerId) -> None:
        """Serve a connection that a relay brought from ``expected``."""
        if self._group is not None:
            self._group.start_soon(self.admit, socket, expected)

    async def admit(self, socket: Socket, expected: PeerId | None = None) -> None:
        """Shake hands with who is at the other end, the ``expected`` one where it is known, and serve it."""
        session = await self._answered(socket, expected)
        if session is not None:
            await self._run(session)

    async def meet(self, socket: Socket, peer: PeerId, *, dialled: bool) -> bool:
        """Shake hands with ``peer``, who dialled at the same time; whether it came to a connection.

        Both must know who counts as the one that ``dialled``: the connection itself does not say.
        """
        if dialled:
            try:
                with anyio.fail_after(self._timeout):
                    session: Session | None = await self._greeted(socket, peer)
            except (DecentralError, TimeoutError) as error:
                logger.debug("%s: %s", peer_name(peer), error)
                session = None
        else:
            session = await self._answered(socket, peer)
        if session is not None and self._group is not None:
            self._group.start_soon(self._run, session)
        return session is not None

    async def _answered(self, socket: Socket, expected: PeerId | None) -> Session | None:
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
                self._check_network(socket)
                session = self._adopt(secured, socket, dialled=False)
        except DecentralError as error:
            logger.debug("inbound connection: %s", error)
        finally:
            self._strangers.pop(scope, None)
            if session is None:
                await close_now(socket)
        return session

    def _check_network(self, socket: Socket) -> None:
        """Refuse one of too many from one network, where there is such a bound: their names cost nothing to make."""
        host = ends_of(socket).host
        if self._of_one_network is None or host is None:
            return
        network = network_of(host)
        near = sum(1 for ends in self._sockets.values() if ends.host is not None and network_of(ends.host) == network)
        if near >= self._of_one_network:
            raise PayloadError(f"{near} connections came from {network}; the new one is refused")

    async def finish(self, timeout: float) -> None:
        """Let what is queued leave, then end every session; ``timeout`` s at most, twice that with relayed ones."""
        self._group = None
        for scope in tuple(self._strangers):
            scope.cancel()
        with anyio.CancelScope(shield=True):
            everyone = [session for sessions in self._sessions.values() for session in sessions]
            relayed = [session for session in everyone if self._sockets[session].host is None]
            for some in (relayed, everyone):  # what leaves through a relay leaves over the connection to that relay
                async with anyio.create_task_group() as group:
                    for session in some:
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
            session = await self._dialled(peer, address)
        except (OSError, DecentralError) as error:
            reasons.append(f"{address}: {error}")
            return
        assert self._group is not None, "dialling after the end is refused"
        self._group.start_soon(self._run, session)
        scope.cancel()

    async def _dialled(self, peer: PeerId, address: str) -> Session:
        if self._group is None:
            raise PeerUnreachable(f"{peer_name(peer)}: this peer is leaving")
        try:
            return await self._greeted(await self._socket(peer, address), peer)
        except PayloadError:
            end = endpoint(address)
            if end is None or self.ports.own_end(end[0]) is None:
                raise
        # Both dialled from the port that they listen on, at the same time: one connection, on which nobody answers.
        return await self._greeted(await anyio.connect_tcp(*end), peer)

    async def _greeted(self, socket: Socket, peer: PeerId) -> Session:
        """A connection whose both ends are proven; the socket is closed when it does not come to that."""
        session = None
        try:
            secured = await secure_outbound(socket, self._signer, peer)
            await propose(secured, PROTOCOL)
            session = self._adopt(secured, socket, dialled=True)
            return session
        finally:
            if session is None:
                await close_now(socket)

    async def _socket(self, peer: PeerId, address: str) -> Socket:
        end, relay = endpoint(address), relay_of(address)
        if end is not None:
            return await self.ports.dial(*end)
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
        return RelayedSocket(muxed, relay)

    # ---- sessions ----

    def _adopt(self, secured: Secured, socket: Socket, *, dialled: bool) -> Session:
        if self._group is None:
            raise PeerUnreachable("this peer is leaving")
        session = Session(
            secured, dialled=dialled, stock=self._stock, on_stream=lambda stream: self._on_stream(session, stream)
        )
        self._sessions.setdefault(secured.peer, []).append(session)
        self._sockets[session] = ends_of(socket)
        if isinstance(socket, RelayedSocket):
            self._relayed[session] = socket.relay
        if not dialled:
            self._inbound[session] = None
            self._thin_out(secured.peer)
        if session in self._relayed:
            self.on_relayed(session, dialled)
        return session

    def _thin_out(self, peer: PeerId) -> None:
        """Too many of one peer: its oldest goes. Too many of all: the first idle one, or else the newest."""
        mine = [session for session in self._sessions[peer] if session in self._inbound]
        goes = None
        if len(mine) > _OF_ONE_PEER:
            goes = mine[0]
        elif len(self._inbound) > self._most:
            idle = (one for one in self._inbound if one.idle and one not in mine and not self.is_guest(one.peer))
            goes = next(idle, mine[-1])
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
            del self._sockets[session]
            self._relayed.pop(session, None)
            if not sessions:
                self._sessions.pop(session.peer, None)
                self.on_gone(session.peer)

    def _usable(self, peer: PeerId) -> Session | None:
        return next((session for session in self._preferred(peer) if session.usable), None)

    def _preferred(self, peer: PeerId) -> list[Session]:
        """Direct connections before relayed ones, newer before older: an older one may have died unnoticed."""
        return sorted(reversed(self._sessions.get(peer, [])), key=self._relayed.__contains__)

    def _remember(self, peer: PeerId, addresses: Sequence[str]) -> None:
        self._remembered.pop(peer, None)
        if len(self._remembered) >= _REMEMBERED:
            del self._remembered[next(iter(self._remembered))]
        self._remembered[peer] = tuple(addresses)


def _no_guest(peer: PeerId) -> bool:
    return False


def _no_matter(peer: PeerId) -> None:
    return None


def _leave_it(session: Session, dialled: bool) -> None:
    return None
