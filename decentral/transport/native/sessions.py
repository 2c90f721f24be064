"""Connections to peers: those that stand, found by peer id and bounded in number, and how a socket becomes one of them.

When too many came in, the one that has been idle longest is dropped; those in use stay. Those of members of the run
stay, idle or not, and others' make room for them.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import anyio
import anyio.abc
from anyio.abc import SocketAttribute, SocketListener, SocketStream, TaskGroup

from decentral.errors import DecentralError, PayloadError, PeerUnreachable
from decentral.transport.native.tcp import End, SocketEnds, ends_of, far_end
from decentral.transport.protocols.circuit import RelayedSocket, network_of
from decentral.transport.protocols.messages import answer, propose
from decentral.transport.protocols.noise import Secured, Socket, close_now, secure_inbound, secure_outbound
from decentral.transport.protocols.yamux import PROTOCOL, MuxedStream, Session, Stock
from decentral.wire.keys import PeerId, Signer, peer_name

logger = logging.getLogger("decentral.transport")


_CONNECTIONS = 512  # inbound; about 60 KiB each when idle
_OF_ONE_PEER = 4  # inbound; both may dial at once, and a path may die unnoticed
_STOCK = 1 << 25  # bytes by which windows may grow beyond 256 KiB, all streams together

OnStream = Callable[[Session, MuxedStream], None]
OnRelayed = Callable[[Session, bool], None]  # and whether it was dialled from here


def _nobody(peer: PeerId) -> bool:
    return False


def _no_matter(peer: PeerId) -> None:
    return None


def _leave_it(session: Session, dialled: bool) -> None:
    return None


@dataclass(frozen=True, slots=True)
class SessionEvents:
    """The questions and news of sessions for the transport that has them."""

    on_stream: OnStream  # the other side opened a stream
    stays: Callable[[PeerId], bool] = _nobody  # whether its connection stays, idle or not
    on_gone: Callable[[PeerId], None] = _no_matter  # a peer's last connection ended
    on_relayed: OnRelayed = _leave_it  # a connection through a relay stands


class Sessions:
    """The sessions of one transport."""

    def __init__(
        self,
        events: SessionEvents,
        *,
        connections: int | None = None,
        of_one_network: int | None = None,
        stock: int | None = None,
    ) -> None:
        self.group: anyio.abc.TaskGroup | None = None  # that they run in; None: no new ones are taken
        self._events = events
        self._stock = Stock(_STOCK if stock is None else stock)
        self._most = _CONNECTIONS if connections is None else connections
        self._of_one_network = of_one_network
        self._of: dict[PeerId, list[Session]] = {}
        self._sockets: dict[Session, SocketEnds] = {}
        self._relayed: dict[Session, PeerId] = {}  # through which relay
        self._inbound: dict[Session, None] = {}  # longest connected first

    # ---- which there are ----

    @property
    def num_peers(self) -> int:
        """Peers with a connection."""
        return len(self._of)

    def of(self, peer: PeerId) -> tuple[Session, ...]:
        """Return the connections to ``peer``, oldest first, those included that are about to end."""
        return tuple(self._of.get(peer, ()))

    def standing(self, peer: PeerId) -> Session | None:
        """Return the connection that a stream would be opened on now, if there is one."""
        return next((session for session in self._by_preference(peer) if session.usable), None)

    def has(self, peer: PeerId) -> bool:
        """Tell whether there is a connection."""
        return self.standing(peer) is not None

    def is_direct(self, peer: PeerId) -> bool:
        """Tell whether there is a connection without a relay in between."""
        found = self.standing(peer)
        return found is not None and found not in self._relayed

    def relay_of(self, session: Session) -> PeerId | None:
        """Return the relay that carries it; None for a direct one."""
        return self._relayed.get(session)

    def has_dialled_through_relay(self, peer: PeerId) -> bool:
        """Tell whether one of the relayed connections to ``peer`` was dialled from here."""
        return any(session.dialled and session in self._relayed for session in self.of(peer))

    # ---- where they lead ----

    def paths(self) -> dict[PeerId, tuple[str, ...]]:
        """Return the other ends of the connections there are, those that streams are opened on first."""
        ordered = {peer: self._by_preference(peer) for peer in self._of}
        return {peer: tuple(self._sockets[session].remote for session in found) for peer, found in ordered.items()}

    def ends(self, session: Session) -> SocketEnds:
        """Return where a connection that stands leads."""
        return self._sockets.get(session) or SocketEnds("/p2p-circuit")

    def local_port(self, peer: PeerId) -> int:
        """Return this side's port of the newest connection to ``peer``; 0 when there is none, or it is relayed."""
        sessions = self.of(peer)
        return self._sockets[sessions[-1]].local_port if sessions else 0

    def host_of(self, peer: PeerId) -> str | None:
        """Return the host at the other end of a peer's connection; None when there is a relay in between."""
        found = self.standing(peer)
        return None if found is None else self._sockets[found].host

    def num_from(self, network: str) -> int:
        """Count the connections whose other end is in ``network``, as ``network_of`` names it."""
        return sum(1 for ends in self._sockets.values() if ends.host is not None and network_of(ends.host) == network)

    # ---- coming and going ----

    def adopt(self, secured: Secured, socket: Socket, *, dialled: bool) -> Session:
        """Run a connection whose other end is proven.

        PeerUnreachable when this peer is leaving, PayloadError when too many came in from its network already.
        """
        if self.group is None:
            raise PeerUnreachable("this peer is leaving")
        ends = ends_of(socket)
        if not dialled:
            self._check_network(ends.host)
        session = Session(
            secured,
            dialled=dialled,
            stock=self._stock,
            on_stream=lambda stream: self._events.on_stream(session, stream),
        )
        self._of.setdefault(secured.peer, []).append(session)
        self._sockets[session] = ends
        if isinstance(socket, RelayedSocket):
            self._relayed[session] = socket.relay
        if not dialled:
            self._inbound[session] = None
            self._thin_out(secured.peer)
        if session in self._relayed:
            self._events.on_relayed(session, dialled)
        self.group.start_soon(self._run, session)
        return session

    async def finish(self, timeout: float) -> None:
        """Take no new ones, let what is queued leave, then end them; twice ``timeout`` s at most."""
        self.group = None
        everyone = list(self._sockets)
        relayed = [session for session in everyone if self._sockets[session].host is None]
        for some in (relayed, everyone):  # what leaves through a relay leaves over the connection to that relay
            async with anyio.create_task_group() as group:
                for session in some:
                    group.start_soon(session.finish, timeout)

    def _check_network(self, host: str | None) -> None:
        """Refuse one of too many from one network, where there is such a bound: their names cost nothing to make."""
        if self._of_one_network is None or host is None:
            return
        network = network_of(host)
        near = self.num_from(network)
        if near >= self._of_one_network:
            raise PayloadError(f"{near} connections came from {network}; the new one is refused")

    def _thin_out(self, peer: PeerId) -> None:
        """End a connection too many. Of one peer its oldest goes; of all the first idle one, or else the newest.

        For one that stays any other goes.
        """
        mine = [session for session in self._of[peer] if session in self._inbound]
        goes = None
        if len(mine) > _OF_ONE_PEER:
            goes = mine[0]
        elif len(self._inbound) > self._most:
            others = [one for one in self._inbound if one not in mine and not self._events.stays(one.peer)]
            last = others[0] if others and self._events.stays(peer) else mine[-1]
            goes = next((one for one in others if one.idle), last)
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
            self._forget(session)

    def _forget(self, session: Session) -> None:
        self._inbound.pop(session, None)
        del self._sockets[session]
        self._relayed.pop(session, None)
        sessions = self._of[session.peer]
        sessions.remove(session)
        if not sessions:
            del self._of[session.peer]
            self._events.on_gone(session.peer)

    def _by_preference(self, peer: PeerId) -> list[Session]:
        """Return direct connections before relayed ones, newer before older: an older one may have died unnoticed."""
        return sorted(reversed(self.of(peer)), key=self._relayed.__contains__)


# ---- from a socket to a session ----
#
# Both ends prove who they are, whoever of them dialled. A stranger costs a TCP connection and nothing else until it has
# proven who it is.


Shake = Callable[[Socket, PeerId | None, bool], Awaitable[Session]]  # who is expected there; whether it was dialled


class Upgrade:
    """The two steps by which a socket becomes one of ``sessions``: Noise proves who is there, yamux carries streams."""

    def __init__(self, signer: Signer, sessions: Sessions) -> None:
        self._signer, self._sessions = signer, sessions

    async def shake(self, socket: Socket, peer: PeerId | None, dialled: bool) -> Session:
        """Take both steps. DecentralError."""
        return await self.multiplex(await self.secure(socket, peer, dialled), socket, dialled)

    async def secure(self, socket: Socket, peer: PeerId | None, dialled: bool) -> Secured:
        """Have the other end prove who it is: ``peer``, or anybody where that is None. DecentralError."""
        if dialled:
            return await secure_outbound(socket, self._signer, peer)
        secured = await secure_inbound(socket, self._signer)
        if peer not in (None, secured.peer):
            raise PayloadError(f"{peer_name(secured.peer)} came under another name; drop the connection")
        return secured

    async def multiplex(self, secured: Secured, socket: Socket, dialled: bool) -> Session:
        """Run streams over a connection whose other end is proven. DecentralError."""
        if dialled:
            await propose(secured, PROTOCOL)
        else:
            await answer(secured, (PROTOCOL,))
        return self._sessions.adopt(secured, socket, dialled=dialled)


class Handshakes:
    """The handshakes of one transport, in and out: each is a ``shake`` that makes one of its ``sessions``."""

    def __init__(self, shake: Shake, sessions: Sessions, timeout: float) -> None:
        self._shake, self._sessions = shake, sessions
        self.strangers = Strangers(timeout)
        self.meetings = Meetings(self.greet, self._answer, timeout)

    async def listen(self, listener: anyio.abc.SocketListener, group: anyio.abc.TaskGroup) -> None:
        """Accept for ever."""
        await accept_for_ever(listener, group, self.meetings.accept)

    def take_in(self, socket: Socket, peer: PeerId) -> None:
        """Shake hands, in the background, over a connection that a relay brought from ``peer``."""
        if self._sessions.group is not None:
            self._sessions.group.start_soon(self._answer, socket, peer)

    async def greet(self, socket: Socket, peer: PeerId) -> Session:
        """Shake hands with ``peer``, who was dialled. The socket is closed when it does not come to a session."""
        session = None
        try:
            session = await self._shake(socket, peer, True)
            return session
        finally:
            if session is None:
                await close_now(socket)

    async def _answer(self, socket: Socket, expected: PeerId | None) -> bool:
        """Shake hands with who dialled, the ``expected`` one where it is known; tell whether it came to a session."""
        session = None
        try:
            with self.strangers.take_in():
                session = await self._shake(socket, expected, False)
        except DecentralError as error:
            logger.debug("inbound connection: %s", error)
        except Exception:
            # A stranger may have found a bug: it costs the stranger its connection, and nobody else anything.
            logger.exception("an inbound connection failed")
        finally:
            if session is None:
                await close_now(socket)
        return session is not None


# ---- strangers, and accepting them ----
#
# Connections that came in and whose other end has yet to prove who it is: a few at a time, each for a while. When too
# many are at it, the one that takes longest is dropped: an honest peer needs three round trips.

_MOST_STRANGERS = 64  # connections in their handshake
_NO_FILES = 0.2  # s until connections are accepted again


class Strangers:
    """The strangers of one transport; each has ``timeout`` s."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._scopes: dict[anyio.CancelScope, None] = {}

    def __len__(self) -> int:
        return len(self._scopes)

    @contextmanager
    def take_in(self) -> Iterator[None]:
        """Let one shake hands. What is in here is cut short when time is up, or when it has to make room."""
        scope = anyio.CancelScope(deadline=anyio.current_time() + self._timeout)
        self._scopes[scope] = None
        if len(self._scopes) > _MOST_STRANGERS:
            oldest = next(iter(self._scopes))
            del self._scopes[oldest]  # now: it takes a moment to end, and must not be chosen for the next one, too
            oldest.cancel()
        try:
            with scope:
                yield
        finally:
            self._scopes.pop(scope, None)

    def dismiss(self) -> None:
        """Drop all of them."""
        for scope in tuple(self._scopes):
            scope.cancel()


async def accept_for_ever(
    listener: SocketListener,
    group: TaskGroup,
    accept: Callable[[SocketStream], Coroutine[object, object, None]],
) -> None:
    """Have ``accept`` take each connection: with too many files open, connections wait until some are closed.

    ``accept`` closes what it was given. A task that is cancelled before its first step gives it nothing, so until then
    connections are closed here.
    """
    handed: set[SocketStream] = set()

    async def take(stream: SocketStream) -> None:
        handed.discard(stream)
        await accept(stream)

    try:
        while True:
            try:
                stream = await _accept_one(listener.extra(SocketAttribute.raw_socket))
            except OSError as error:
                logger.warning("connections cannot be accepted now: %s", error)
                await anyio.sleep(_NO_FILES)
                continue
            handed.add(stream)
            group.start_soon(take, stream)
    finally:
        for stream in handed:
            await close_now(stream)


async def _accept_one(listening: socket.socket) -> SocketStream:
    """Return the next connection. asyncio's own ``sock_accept`` drops the one that it has just taken when it is
    cancelled.
    """
    while True:
        await anyio.wait_readable(listening)
        try:
            made, _ = listening.accept()
        except BlockingIOError:  # it was reset before it could be taken
            continue
        try:
            made.setblocking(False)
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return await SocketStream.from_socket(made)
        except (OSError, ValueError):  # it is gone already: macOS says so here
            made.close()
        except BaseException:
            made.close()
            raise


# ---- two that dial each other at once ----
#
# It is one connection, of which both must know beforehand who counts as the one that dialled. The connection itself
# does not say: it comes out of this peer's own dialling, or in at its listener, as it happens.

Greet = Callable[[Socket, PeerId], Awaitable[Session]]  # as the one that dialled
Answer = Callable[[Socket, PeerId | None], Awaitable[bool]]  # as the one that was; whether it came to a session


class Meetings:
    """The meetings of one transport, which shakes hands with ``greet`` within ``timeout`` s, and with ``answer``."""

    def __init__(self, greet: Greet, answer: Answer, timeout: float) -> None:
        self._greet, self._answer, self._timeout = greet, answer, timeout
        self._expected: dict[End, PeerId] = {}

    @contextmanager
    def expecting(self, peer: PeerId, ends: Sequence[End]) -> Iterator[None]:
        """Greet a peer that comes from there meanwhile as if it had been dialled."""
        self._expected.update(dict.fromkeys(ends, peer))
        try:
            yield
        finally:
            for end in ends:
                self._expected.pop(end, None)

    async def accept(self, socket: anyio.abc.SocketStream) -> None:
        """Shake hands over a connection that came in."""
        peer = self._expected.get(far_end(socket))
        if peer is None:
            await self._answer(socket, None)
        else:  # it dials at the same time, and counts on being answered as the one who was dialled
            await self.meet(socket, peer, dialled=True)

    async def meet(self, socket: Socket, peer: PeerId, *, dialled: bool) -> bool:
        """Shake hands with ``peer``, who dialled at the same time; tell whether it came to a session."""
        if not dialled:
            return await self._answer(socket, peer)
        try:
            with anyio.fail_after(self._timeout):
                await self._greet(socket, peer)
        except (DecentralError, TimeoutError) as error:
            logger.debug("%s: %s", peer_name(peer), error)
            return False
        return True
