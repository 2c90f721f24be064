"""Dialling: a session to a peer, a stream on it, and places at relays through which this peer is dialled."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import anyio
import anyio.abc
import anyio.lowlevel

from decentral.errors import ConfigError, DecentralError, PayloadError, PeerUnreachable, StreamClosed, TransportError
from decentral.transport.base import AddressBook, Traffic
from decentral.transport.native.sessions import Handshakes, Sessions
from decentral.transport.native.tcp import End, Ports, endpoint
from decentral.transport.protocols.circuit import (
    HOP,
    LEAST_NBYTES,
    RelayedSocket,
    Reservation,
    pass_through,
    relay_of,
    reserve,
)
from decentral.transport.protocols.messages import propose, send_proposal
from decentral.transport.protocols.noise import Socket
from decentral.transport.protocols.yamux import NativeStream, Session
from decentral.wire.keys import PeerId, peer_from_name, peer_name

logger = logging.getLogger("decentral.transport")

# ---- a session to a peer ----
#
# The session is the one that stands, or a new one, dialled at all addresses of the peer at once. Direct addresses have
# a head start over those through a relay, and a relay over the next. What is known of a peer's addresses is
# remembered, so that it is dialled again when its connection is gone.

_DIALLED_AT_ONCE = 8  # addresses of one peer
_HEAD_START = 0.5  # s that direct addresses have before a relay is asked
_TURN = 1.5  # s that a relay has before the next one is asked: ten round trips of 150 ms


class Dialler:
    """Dials for the peer ``me``, each other peer once at a time."""

    def __init__(self, me: PeerId, timeout: float, ports: Ports, sessions: Sessions, handshakes: Handshakes) -> None:
        self._me, self._timeout = me, timeout
        self.ports, self._sessions, self._handshakes = ports, sessions, handshakes
        self._known = AddressBook()
        self._dialling: dict[PeerId, anyio.Event] = {}

    def learn(self, peer: PeerId, addresses: Sequence[str]) -> None:
        """Remember where ``peer`` says that it can be dialled, unless that is known already."""
        if addresses and self._known.find(peer) is None:
            self._known.remember(peer, addresses[:_DIALLED_AT_ONCE])

    async def session(self, peer: PeerId) -> Session:
        """Return a connection to ``peer``, dialled when there is none. PeerUnreachable."""
        found = self._sessions.standing(peer)
        if found is None:
            addresses = self._known.find(peer)
            if addresses is None:
                raise PeerUnreachable(f"{peer_name(peer)}: no connection, and no address is known; ask others for one")
            await self.connect(peer, addresses)
            found = self._sessions.standing(peer)
        if found is None:
            raise PeerUnreachable(f"{peer_name(peer)}: it ended the connection at once; try again or ask another peer")
        return found

    async def connect(self, peer: PeerId, addresses: Sequence[str]) -> None:
        """Have a connection to ``peer``; its addresses are remembered. PeerUnreachable."""
        await anyio.lowlevel.checkpoint()
        if peer == self._me:
            raise PeerUnreachable(f"{peer_name(peer)}: that is this peer itself")
        self._known.remember(peer, addresses)
        await self._reach(peer, addresses)

    async def dial_directly(self, peer: PeerId, ends: Sequence[End], timeout: float) -> bool:
        """Dial although there is a connection; tell whether there is a direct one now."""
        with anyio.move_on_after(timeout):
            async with anyio.create_task_group() as group:
                for host, port in ends:
                    address = f"/ip{6 if ':' in host else 4}/{host}/tcp/{port}"
                    group.start_soon(self._try, peer, address, group.cancel_scope, [])
        return self._sessions.is_direct(peer)

    # ---- all addresses of a peer ----

    async def _reach(self, peer: PeerId, addresses: Sequence[str]) -> None:
        while peer in self._dialling:
            await self._dialling[peer].wait()
        if self._sessions.has(peer):
            return
        self._dialling[peer] = anyio.Event()
        try:
            await self._dial(peer, addresses)
        finally:
            self._dialling.pop(peer).set()

    async def _dial(self, peer: PeerId, addresses: Sequence[str]) -> None:
        """Dial them all; the first that shakes hands is kept."""
        useful = (address for address in addresses if endpoint(address) or relay_of(address))
        chosen = list(dict.fromkeys(useful))[:_DIALLED_AT_ONCE]
        reasons: list[str] = []
        with anyio.move_on_after(self._timeout):
            async with anyio.create_task_group() as group:
                direct = list(filter(endpoint, chosen))
                for address in direct:
                    group.start_soon(self._try, peer, address, group.cancel_scope, reasons)
                await anyio.sleep(_HEAD_START if direct else 0)  # who can be reached directly is
                for address in filter(relay_of, chosen):
                    await self._turn(group, peer, address, reasons)
        if not self._sessions.has(peer):
            why = "; ".join(reasons[:2]) or f"none of its {len(addresses)} addresses answers over TCP"
            raise PeerUnreachable(f"{peer_name(peer)}: no path to it now: {why}; try again or ask another peer")

    async def _turn(self, group: anyio.abc.TaskGroup, peer: PeerId, address: str, reasons: list[str]) -> None:
        """Ask one relay and wait a while for it.

        Two that bring the peer at once would cost the direct connection: a daemon tries to punch once on each that
        comes in, and finds the ones that are not kept closed (7 of 36 stayed relayed).
        """
        failed = anyio.Event()

        async def through_it() -> None:
            await self._try(peer, address, group.cancel_scope, reasons)
            failed.set()

        group.start_soon(through_it)
        with anyio.move_on_after(_TURN):
            await failed.wait()

    async def _try(self, peer: PeerId, address: str, scope: anyio.CancelScope, reasons: list[str]) -> None:
        try:
            await self._dial_address(peer, address)
        except (OSError, DecentralError) as error:
            reasons.append(f"{address}: {error}")
            return
        scope.cancel()

    # ---- one address ----

    async def _dial_address(self, peer: PeerId, address: str) -> Session:
        if self._sessions.group is None:
            raise PeerUnreachable(f"{peer_name(peer)}: this peer is leaving")
        try:
            return await self._handshakes.greet(await self._socket(peer, address), peer)
        except PayloadError:
            end = endpoint(address)
            if end is None or self.ports.own_end(end[0]) is None:
                raise
        # Both dialled from the port that they listen on, at the same time: one connection, on which nobody answers.
        return await self._handshakes.greet(await anyio.connect_tcp(*end), peer)

    async def _socket(self, peer: PeerId, address: str) -> Socket:
        end, relay = endpoint(address), relay_of(address)
        if end is not None:
            return await self.ports.dial(*end)
        assert relay is not None, "chosen before"
        return await self._through(relay[0], relay[1], peer)

    async def _through(self, relay: PeerId, where: str, peer: PeerId) -> Socket:
        """Open a stream to ``peer`` through a relay, which is dialled first where that is needed."""
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


# ---- a stream for one protocol ----
#
# It goes over the connection there is, or over a new one when that is found dead.


class Opener:
    """Opens the streams of one transport, and counts what they carry in ``traffic``."""

    def __init__(self, dialler: Dialler, sessions: Sessions, traffic: Traffic, timeout: float) -> None:
        self._dialler, self._sessions, self._traffic, self._timeout = dialler, sessions, traffic, timeout

    async def open(self, peer: PeerId, protocol: str) -> NativeStream:
        """Open a stream to ``peer``."""
        fresh = not self._sessions.has(peer)
        try:
            return await self._open(peer, protocol)
        except StreamClosed as error:
            if fresh:
                raise unreachable(peer, error) from None
        try:  # the connection was dying when it was asked
            return await self._open(peer, protocol)
        except StreamClosed as error:
            raise unreachable(peer, error) from None

    async def _open(self, peer: PeerId, protocol: str) -> NativeStream:
        session = await self._dialler.session(peer)
        stream = NativeStream(peer, session.open())
        proposed = False
        try:
            with anyio.fail_after(self._timeout):
                if session.agrees(protocol):  # then asking again would be a round trip of nothing else
                    await send_proposal(stream, protocol)
                    stream.proposed = protocol
                else:
                    await propose(stream, protocol)
                    session.agreed.add(protocol)
            proposed = True
        except TimeoutError:
            raise PeerUnreachable(f"{peer_name(peer)}: {protocol} was not answered in time; try again") from None
        except PeerUnreachable as error:
            raise PeerUnreachable(f"{peer_name(peer)}: {error}") from None
        except StreamClosed:
            raise
        except DecentralError as error:
            raise unreachable(peer, error) from None
        finally:
            if not proposed:
                stream.reset()
        stream.traffic = self._traffic
        return stream


def unreachable(peer: PeerId, error: DecentralError) -> PeerUnreachable:
    """Return the error that there is no path, and why."""
    return PeerUnreachable(f"{peer_name(peer)}: no path to it now: {error}; try again or ask another peer")


# ---- places at relays ----
#
# They are kept so that peers behind a NAT can be dialled: asked for, renewed, and asked for again when lost.
#
# A relay that lets a connection carry less than one large frame is passed over: rounds would break off in the middle.

_SHORTEST, _LONGEST = 15.0, 1800.0  # s between renewals: half of what was granted, by a clock that may be wrong
_LOOK = 1.0  # s between looks whether the relay is still there
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 60.0  # s between attempts


class Places:
    """The relays that this peer can be reached through."""

    def __init__(self, sessions: Sessions, dialler: Dialler, relays: Sequence[str], timeout: float) -> None:
        self.relays = {_relay_at(address): address for address in relays}
        self._sessions, self._dialler, self._timeout = sessions, dialler, timeout
        self._kept: dict[PeerId, str] = {}

    def addresses(self) -> tuple[str, ...]:
        """Return where this peer can be dialled, without its own ``/p2p/<name>``."""
        return tuple(f"{where}/p2p-circuit" for where in tuple(self._kept.values()))

    async def keep(self, relay: PeerId) -> None:
        """Hold a place at one relay until cancelled."""
        pause = _FIRST_PAUSE
        while True:
            try:
                place = await self._reserve(relay)
                self._kept[relay], pause = self.relays[relay], _FIRST_PAUSE
                await self._while_it_lasts(relay, place)
            except (DecentralError, TimeoutError) as error:
                level = logging.WARNING if pause == _FIRST_PAUSE else logging.INFO  # once, not at every try
                logger.log(level, "no place at relay %s, next try in %.0f s: %s", peer_name(relay), pause, error)
                self._kept.pop(relay, None)
                await anyio.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)

    async def _reserve(self, relay: PeerId) -> Reservation:
        place = await self.ask(relay, (self.relays[relay],))
        if too_little(place):
            raise TransportError(
                f"it carries {place.nbytes} bytes a connection, {LEAST_NBYTES} are needed; use another relay"
            )
        return place

    async def ask(self, relay: PeerId, where: Sequence[str]) -> Reservation:
        """Ask the relay at ``where`` for a place, without keeping it.

        TransportError when it gives none, TimeoutError when it says nothing.
        """
        await self._dialler.connect(relay, where)
        stream = NativeStream(relay, (await self._dialler.session(relay)).open())
        try:
            with anyio.fail_after(self._timeout):
                await propose(stream, HOP)
                return await reserve(stream)
        finally:
            stream.reset()

    async def _while_it_lasts(self, relay: PeerId, place: Reservation) -> None:
        """Wait until it is time to renew, or the connection is gone and the place with it."""
        lasts = min(max((place.expires - time.time()) / 2, _SHORTEST), _LONGEST)
        with anyio.move_on_after(lasts):
            while self._sessions.has(relay):
                await anyio.sleep(_LOOK)
            self._kept.pop(relay, None)


def too_little(place: Reservation) -> bool:
    """Tell whether one frame may not pass: relays of the public network grant 128 KiB a connection, ours 4 GiB."""
    return place.nbytes is not None and place.nbytes < LEAST_NBYTES


def _relay_at(address: str) -> PeerId:
    where, _, name = address.rpartition("/p2p/")
    if endpoint(where) is None:
        raise ConfigError(f"relay {address!r}: want /ip4/HOST/tcp/PORT/p2p/NAME, as the relay prints it")
    return peer_from_name(name)
