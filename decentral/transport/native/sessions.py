"""The connections that stand: found by peer id, and bounded in number.

When too many came in, the one that has been idle longest is dropped; those in use stay. Those of members of the run
stay, idle or not, and others' make room for them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import anyio
import anyio.abc

from decentral.errors import PeerUnreachable
from decentral.transport.native.secured import Secured, Socket
from decentral.transport.native.tcp import SocketEnds, ends_of
from decentral.transport.protocols.muxed_stream import MuxedStream, Stock
from decentral.transport.protocols.yamux import Session
from decentral.transport.relay.circuit import RelayedSocket
from decentral.transport.relay.limits import network_of
from decentral.wire.keys import PeerId, peer_name

_CONNECTIONS = 512  # inbound; about 60 KiB each when idle
_OF_ONE_PEER = 4  # inbound; both may dial at once, and a path may die unnoticed
_STOCK = 1 << 25  # bytes by which windows may grow beyond 256 KiB, all streams together

logger = logging.getLogger("decentral.transport")

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
    """What the transport that has these sessions is told of them, and asked about them."""

    on_stream: OnStream  # the other side opened a stream
    stays: Callable[[PeerId], bool] = _nobody  # whether its connection stays, idle or not
    on_gone: Callable[[PeerId], None] = _no_matter  # a peer's last connection ended
    on_relayed: OnRelayed = _leave_it  # a connection through a relay stands


class Sessions:
    """The sessions of one transport."""

    def __init__(self, events: SessionEvents, *, connections: int | None = None, stock: int | None = None) -> None:
        self.group: anyio.abc.TaskGroup | None = None  # that they run in; None: no new ones are taken
        self._events = events
        self._stock = Stock(_STOCK if stock is None else stock)
        self._most = _CONNECTIONS if connections is None else connections
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
        """The connections to ``peer``, oldest first, those included that are about to end."""
        return tuple(self._of.get(peer, ()))

    def standing(self, peer: PeerId) -> Session | None:
        """The connection that a stream would be opened on now, if there is one."""
        return next((session for session in self._preferred(peer) if session.usable), None)

    def has(self, peer: PeerId) -> bool:
        """Whether there is a connection."""
        return self.standing(peer) is not None

    def is_direct(self, peer: PeerId) -> bool:
        """Whether there is a connection without a relay in between."""
        found = self.standing(peer)
        return found is not None and found not in self._relayed

    def relay_of(self, session: Session) -> PeerId | None:
        """Who carries it; None for a direct one."""
        return self._relayed.get(session)

    def dialled_through_relay(self, peer: PeerId) -> bool:
        """Whether one of the relayed connections to ``peer`` was dialled from here."""
        return any(session.dialled and session in self._relayed for session in self.of(peer))

    # ---- where they lead ----

    def paths(self) -> dict[PeerId, tuple[str, ...]]:
        """The other ends of the connections there are, those that streams are opened on first."""
        return {peer: tuple(self._sockets[session].remote for session in self._preferred(peer)) for peer in self._of}

    def ends(self, session: Session) -> SocketEnds:
        """Where a connection that stands leads."""
        return self._sockets.get(session) or SocketEnds("/p2p-circuit")

    def local_port(self, peer: PeerId) -> int:
        """This side's port of the newest connection to ``peer``; 0 when there is none, or it is relayed."""
        sessions = self.of(peer)
        return self._sockets[sessions[-1]].local_port if sessions else 0

    def host_of(self, peer: PeerId) -> str | None:
        """The host at the other end of a peer's connection; None when there is a relay in between."""
        found = self.standing(peer)
        return None if found is None else self._sockets[found].host

    def num_from(self, network: str) -> int:
        """Connections whose other end is in ``network``, as ``network_of`` names it."""
        return sum(1 for ends in self._sockets.values() if ends.host is not None and network_of(ends.host) == network)

    # ---- coming and going ----

    def adopt(self, secured: Secured, socket: Socket, *, dialled: bool) -> Session:
        """Run a connection whose other end is proven. PeerUnreachable when this peer is leaving."""
        if self.group is None:
            raise PeerUnreachable("this peer is leaving")
        session = Session(
            secured,
            dialled=dialled,
            stock=self._stock,
            on_stream=lambda stream: self._events.on_stream(session, stream),
        )
        self._of.setdefault(secured.peer, []).append(session)
        self._sockets[session] = ends_of(socket)
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

    def _thin_out(self, peer: PeerId) -> None:
        """Too many of one peer: its oldest goes. Too many of all: the first idle one, or else the newest.

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

    def _preferred(self, peer: PeerId) -> list[Session]:
        """Direct connections before relayed ones, newer before older: an older one may have died unnoticed."""
        return sorted(reversed(self.of(peer)), key=self._relayed.__contains__)
