"""A direct connection instead of a relayed one: tried in the background, while streams go through the relay (DCUtR).

Who was reached through the relay dials the other side's public addresses, if it has any; else both dial at the same
time from the ports they listen on, so that each NAT takes what comes in for an answer. Once a direct connection stands
new streams use it, and the relayed one is closed when no stream is left on it.

Others can make this peer dial: at most four addresses of each, as public as the relay is (``plausible``), eight peers
at a time, and only peers that share a relayed connection with it.

Of the two who dial at once, the one that dialled through the relay plays the one that dials, as the specification has
it and js-libp2p does. go-libp2p has it the other way round (its issue 3171), so the second attempt swaps the roles.

Source: libp2p/specs, relay/DCUtR.md.
"""

from __future__ import annotations

import ipaddress
import logging
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from enum import IntEnum

import anyio
import anyio.lowlevel

from decentral.errors import DecentralError, PayloadError, StreamClosed, TransportError
from decentral.transport.native.dialling import Dialler
from decentral.transport.native.sessions import Meetings, Sessions
from decentral.transport.native.tcp import TAKEN, End, Ports, SocketEnds, endpoint
from decentral.transport.protocols.circuit import read_message, relay_of, write_message
from decentral.transport.protocols.identify import Told, ask
from decentral.transport.protocols.messages import (
    Ends,
    bytes_field,
    bytes_fields,
    convert_known,
    multiaddr_to_bytes,
    multiaddr_to_text,
    number_field,
    number_fields,
    propose,
)
from decentral.transport.protocols.yamux import NativeStream, Session
from decentral.wire.keys import PeerId, peer_name

PAUSES = (0.5, 3.0)  # s before each attempt: a handshake and an identify take less, a daemon learns its address later
GRACE = 10.0  # s for which a direct connection has proven itself before the relayed one may go
_REACHING = 2.0  # s for an address without a NAT in front of it
_DIALLING = 4.0  # s: the first SYN may be dropped by the other NAT, the second comes after 1 s, the third after 3 s
_AGAIN = 0.2  # s after a refusal: a NAT that answers strangers with a RST
_LOOK = 1.0  # s between looks whether the relayed connection is still needed
_GLANCE = 0.05  # s between looks whether the other side came through
_PARTING = 1.0  # s for what is queued to leave
_AT_ONCE = 8  # peers that are dialled in either role
_MOST_ASKED, _ASKED_WITHIN = 4, 60.0  # times that one peer may ask within so many s; go-libp2p tries three times

logger = logging.getLogger("decentral.transport")


class Puncher:
    """Has a hole punched for every relayed connection of one transport that it is given."""

    def __init__(self, me: PeerId, sessions: Sessions, dialler: Dialler, meetings: Meetings, timeout: float) -> None:
        self._me, self._timeout = me, timeout
        self._sessions, self._dialler, self._meetings, self._ports = sessions, dialler, meetings, dialler.ports
        self._observed = Observed(sessions, dialler.ports, timeout)
        self._slots = anyio.Semaphore(_AT_ONCE)
        self._under_way: dict[PeerId, tuple[anyio.CancelScope, bool]] = {}  # and whether the other side asked for it
        self._asked: dict[PeerId, list[float]] = {}
        self._rounds: dict[Session, int] = {}  # in which both sides said CONNECT

    @property
    def num_under_way(self) -> int:
        """Peers with which a hole is being punched."""
        return len(self._under_way)

    async def upgrade(self, session: Session, dialled: bool) -> None:
        """Do all that is done for one relayed connection, until it ends; ``dialled``: from here."""
        relay = self._sessions.relay_of(session)
        if relay is None:
            return
        try:
            if dialled:
                await self._observed.at(relay)  # so that it is known when the other side asks
            else:
                await self._pursue(session, relay)
            await self._until_idle(session)
        finally:
            self._rounds.pop(session, None)

    # ---- who was reached through the relay ----

    async def _pursue(self, session: Session, relay: PeerId) -> None:
        for pause in PAUSES:
            await anyio.sleep(pause)
            if not session.usable or self._sessions.is_direct(session.peer) or self._other_side_begins(session.peer):
                return
            async with self._slots:
                try:
                    await self._attempt(session, relay)
                except (DecentralError, TimeoutError, OSError) as error:
                    logger.debug("%s: no direct connection: %s", peer_name(session.peer), error)

    def _other_side_begins(self, peer: PeerId) -> bool:
        """Tell whether the other side begins.

        Where both dialled through a relay the greater id does, so that only one does.
        """
        return self._me < peer and self._sessions.has_dialled_through_relay(peer)

    async def _attempt(self, session: Session, relay: PeerId) -> None:
        mine = await self._observed.at(relay)
        told = await self._identify(session)
        if await self._reach_directly(session, relay, told):
            return
        if not mine:
            raise TransportError("the relay does not say what this peer looks like from outside")
        async with self._only(session.peer, asked=False):
            theirs, half = await self._agree(session, mine)
            ends, dialled = plausible(theirs, self._sessions.host_of(relay)), self._is_second(session)
            with self._meetings.expecting(session.peer, ends if dialled else ()):
                await anyio.sleep(half)
                await self._dial(session.peer, ends, dialled=dialled)

    async def _identify(self, session: Session) -> Told:
        stream = NativeStream(session.peer, session.open())
        try:
            with anyio.fail_after(self._timeout):
                return await ask(stream)
        finally:
            stream.reset()

    async def _reach_directly(self, session: Session, relay: PeerId, told: Told) -> bool:
        """Dial the other side at what it says are its addresses, and tell whether it worked: no NAT is in its way."""
        self._dialler.learn(session.peer, self._worth_knowing(told.addresses, relay))
        ends = plausible(told.addresses, self._sessions.host_of(relay))
        return bool(ends) and await self._dialler.dial_directly(session.peer, ends, _REACHING)

    def _worth_knowing(self, addresses: Sequence[str], relay: PeerId) -> list[str]:
        """Return the addresses through a relay, for when the direct connection dies."""
        host = self._sessions.host_of(relay)
        return [one for one in addresses if (way := relay_of(one)) and plausible([way[1]], host)]

    async def _agree(self, session: Session, mine: Sequence[str]) -> tuple[tuple[str, ...], float]:
        """Agree with the other side, which dials at once then; return its addresses and half the round trip."""
        stream, done = NativeStream(session.peer, session.open()), False
        try:
            with anyio.fail_after(self._timeout):
                await propose(stream, DCUTR)
                began = anyio.current_time()
                await send_punch(stream, PunchMessage.CONNECT, mine)
                theirs = await receive_punch(stream, PunchMessage.CONNECT)
                half = (anyio.current_time() - began) / 2
                await send_punch(stream, PunchMessage.SYNC)
                done = True
                await stream.aclose()
        finally:
            if not done:
                stream.reset()
        return theirs, half

    # ---- who dialled through the relay ----

    async def attend(self, stream: NativeStream, session: Session) -> None:
        """Punch as the other side wants it. PayloadError when it may not, TimeoutError when it says nothing."""
        relay, peer = self._sessions.relay_of(session), session.peer
        self._check(session, relay)
        assert relay is not None, "checked"
        mine, host = await self._observed.at(relay), self._sessions.host_of(relay)
        async with self._only(peer, asked=True):
            with anyio.fail_after(self._timeout):
                ends = plausible(await receive_punch(stream, PunchMessage.CONNECT), host)
            dialled = not self._is_second(session)
            with self._meetings.expecting(peer, ends if dialled else ()):
                with anyio.fail_after(self._timeout):
                    await send_punch(stream, PunchMessage.CONNECT, mine)
                    await receive_punch(stream, PunchMessage.SYNC)
                await stream.aclose()
                await self._dial(peer, ends, dialled=dialled)

    def _check(self, session: Session, relay: PeerId | None) -> None:
        now, peer = anyio.current_time(), session.peer
        self._asked = {one: times for one, times in self._asked.items() if now - times[-1] < _ASKED_WITHIN}
        times = [time for time in self._asked.get(peer, []) if now - time < _ASKED_WITHIN]
        if relay is None or not session.dialled:
            raise PayloadError("dcutr: over a connection that was not dialled through a relay; drop the stream")
        if len(times) >= _MOST_ASKED or self.num_under_way >= _AT_ONCE:
            raise PayloadError(f"dcutr: asked {len(times)} times, {self.num_under_way} under way; drop the stream")
        self._asked[peer] = [*times, now]

    # ---- both ----

    def _is_second(self, session: Session) -> bool:
        """Count one more round; tell whether the roles are swapped in it. Both sides count alike."""
        self._rounds[session] = self._rounds.get(session, 0) + 1
        return self._rounds[session] % 2 == 0

    async def _dial(self, peer: PeerId, ends: Sequence[End], *, dialled: bool) -> None:
        """Dial all ends, until there is a direct connection, or no hope of one, or it takes too long."""
        failed: list[End] = []
        with anyio.move_on_after(_DIALLING):
            async with anyio.create_task_group() as group:
                for end in ends:
                    group.start_soon(self._knock, peer, end, dialled, failed)
                while not self._sessions.is_direct(peer) and len(failed) < len(ends):
                    await anyio.sleep(_GLANCE)
                group.cancel_scope.cancel()

    async def _knock(self, peer: PeerId, end: End, dialled: bool, failed: list[End]) -> None:
        while True:
            try:
                socket = await self._ports.leave(*end)
            except OSError as error:
                if error.errno in TAKEN:
                    return  # the other side was first, and is being let in
                await anyio.sleep(_AGAIN)
                continue
            if not await self._meetings.meet(socket, peer, dialled=dialled):
                failed.append(end)
            return

    @asynccontextmanager
    async def _only(self, peer: PeerId, *, asked: bool) -> AsyncIterator[None]:
        """Hold the only attempt with a peer.

        A peer that asks anew has given up its last one: so do we, who would dial on.
        """
        while earlier := self._under_way.get(peer):
            scope, was_asked = earlier
            if not (asked and was_asked):
                raise StreamClosed(f"{peer_name(peer)}: a hole is being punched already")
            scope.cancel()
            await anyio.lowlevel.checkpoint()  # a few turns of the loop: nothing holds up its end
        with anyio.CancelScope() as scope:
            self._under_way[peer] = (scope, asked)
            try:
                yield
            finally:
                del self._under_way[peer]

    async def _until_idle(self, session: Session) -> None:
        """Close the relayed connection once a direct one has stood for a while and no stream is left on it."""
        stands = 0.0
        while session.usable:
            await anyio.sleep(_LOOK)
            stands = stands + _LOOK if self._sessions.is_direct(session.peer) else 0.0
            if stands >= GRACE and session.idle:
                await session.finish(_PARTING)


# ---- messages before both dial ----
#
# They go over the relayed connection. No sockets.
#
# Crosses the wire: CONNECT each way with the addresses that each is seen at from outside, then SYNC; 70 bytes in all.
# The time between the first two is the round trip; who sends SYNC dials after half of it, who hears it dials at once.

DCUTR = "/libp2p/dcutr"
_MOST_READ = 16  # addresses of a message that are looked at


class PunchMessage(IntEnum):
    """The kind of a message."""

    CONNECT = 100
    SYNC = 300


def punch_message(kind: PunchMessage, addresses: Iterable[str] = ()) -> bytes:
    """Return the bytes of one message."""
    return number_field(1, kind) + b"".join(bytes_field(2, multiaddr_to_bytes(address)) for address in addresses)


def read_punch(message: bytes, due: PunchMessage) -> tuple[str, ...]:
    """Return the addresses in a message of the kind that is due; what is no address is passed over. PayloadError."""
    kind = number_fields(message).get(1)
    if kind != due:
        raise PayloadError(f"dcutr: a message of type {kind} where {due.name} ({due.value}) is due; drop the stream")
    return tuple(convert_known(multiaddr_to_text, bytes_fields(message).get(2, [])[:_MOST_READ]))


async def send_punch(ends: Ends, kind: PunchMessage, addresses: Iterable[str] = ()) -> None:
    """Send one message."""
    await write_message(ends, punch_message(kind, addresses))


async def receive_punch(ends: Ends, due: PunchMessage) -> tuple[str, ...]:
    """Receive the next message, of the kind that is due."""
    return read_punch(await read_message(ends), due)


# ---- addresses that may be dialled ----

MOST_ADDRESSES = 4  # of one peer that are dialled; one of each family is what it takes


def plausible(addresses: Iterable[str], relay_host: str | None) -> list[End]:
    """Return the few of a stranger's addresses that may be dialled: TCP, numeric, and as public as the relay is.

    Otherwise a peer could have us knock inside the network that we are in. Over a relay in a private network or on
    this machine, which is how swarms of one laboratory and tests meet, addresses of the same kind are taken, too.
    """
    found = dict.fromkeys(end for end in map(endpoint, addresses) if end and _may_be_dialled(end[0], relay_host))
    return list(found)[:MOST_ADDRESSES]


def _may_be_dialled(host: str, relay_host: str | None) -> bool:
    reach = _reach(host)
    return reach == "public" or (reach is not None and relay_host is not None and reach == _reach(relay_host))


def _reach(host: str) -> str | None:
    """Return how far an address reaches; None for a name and for what nobody can be dialled at."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return None
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return None  # nobody announces one; what it means depends on the system
        if address.sixtofour is not None:
            return _reach(str(address.sixtofour))
    if address.is_loopback:
        return "loopback"
    if address.is_multicast or address.is_unspecified or address.is_link_local or address.is_reserved:
        return None
    return "public" if address.is_global else "private"


# ---- this peer as relays see it ----
#
# A relay says what this peer looks like from outside: the address that another one behind a NAT would dial. It is asked
# once per connection to a relay, over identify; one answer holds as long as the connection, which keeps the NAT's
# mapping open. Nothing of it is told to others but those that want to punch.

_MOST_RELAYS = 64  # relays that are remembered


class Observed:
    """This peer as relays see it."""

    def __init__(self, sessions: Sessions, ports: Ports, timeout: float) -> None:
        self._sessions, self._ports, self._timeout = sessions, ports, timeout
        self._known: dict[PeerId, tuple[Session, str | None]] = {}

    async def at(self, relay: PeerId) -> tuple[str, ...]:
        """Return where the listening port can be dialled, as the relay sees it: one address, or none when it cannot
        tell.
        """
        session = self._sessions.standing(relay)
        if session is None:
            return ()
        known = self._known.get(relay)
        if known is None or known[0] is not session:
            known = session, await self._ask_relay(session)
            self._remember(relay, known)
        return (known[1],) if known[1] else ()

    async def _ask_relay(self, session: Session) -> str | None:
        stream = NativeStream(session.peer, session.open())
        try:
            with anyio.fail_after(self._timeout):
                told = await ask(stream)
        except (DecentralError, TimeoutError):
            return None
        finally:
            stream.reset()
        return self._reachable_at(told.observed or "", self._sessions.ends(session))

    def _reachable_at(self, seen: str, ends: SocketEnds) -> str | None:
        """Return ``seen`` with the port that is listened on; None: not plausible, or that port is not known."""
        found, own = plausible([seen], ends.host), self._ports.own_end(ends.host or "")
        if not found or own is None:
            return None
        host, port = found[0]
        if ends.local_port != own[1]:
            if port != ends.local_port:
                return None  # this NAT gives every connection another port
            port = own[1]  # it kept the port of this connection, so it will keep that one
        return f"/ip{6 if ':' in host else 4}/{host}/tcp/{port}"

    def _remember(self, relay: PeerId, known: tuple[Session, str | None]) -> None:
        self._known.pop(relay, None)
        if len(self._known) >= _MOST_RELAYS:
            del self._known[next(iter(self._known))]
        self._known[relay] = known
