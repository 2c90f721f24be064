"""Dialling: a session to a peer, and a stream on it.

The session is the one that stands, or a new one, dialled at all addresses of the peer at once. Direct addresses have a
head start over those through a relay, and a relay over the next. What is known of a peer's addresses is remembered, so
that it is dialled again when its connection is gone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import anyio
import anyio.abc
import anyio.lowlevel

from decentral.errors import DecentralError, PayloadError, PeerUnreachable, StreamClosed
from decentral.transport.base import AddressBook, Traffic
from decentral.transport.native.sessions import Handshakes, SessionEvents, Sessions
from decentral.transport.native.tcp import End, Ports, Socket, endpoint
from decentral.transport.protocols.messages import propose
from decentral.transport.protocols.yamux import NativeStream, Session
from decentral.transport.relay.circuit import HOP, RelayedSocket, RelayLimits, pass_through, relay_of
from decentral.wire.keys import PeerId, Signer, peer_name

_DIALLED_AT_ONCE = 8  # addresses of one peer
_HEAD_START = 0.5  # s that direct addresses have before a relay is asked
_TURN = 1.5  # s that a relay has before the next one is asked: ten round trips of 150 ms


class Greeter(Protocol):
    """Who shakes hands over a socket that was dialled."""

    async def greet(self, socket: Socket, peer: PeerId) -> Session:
        """Shake hands with ``peer``. The socket is closed when it does not come to a session."""
        ...


class Dialler:
    """Dials for the peer ``me``, each other peer once at a time."""

    def __init__(self, me: PeerId, timeout: float, ports: Ports, sessions: Sessions, handshakes: Greeter) -> None:
        self._me, self._timeout = me, timeout
        self.ports, self._sessions, self._handshakes = ports, sessions, handshakes
        self._known = AddressBook()
        self._dialling: dict[PeerId, anyio.Event] = {}

    def learn(self, peer: PeerId, addresses: Sequence[str]) -> None:
        """Remember where ``peer`` says that it can be dialled, unless that is known already."""
        if addresses and self._known.find(peer) is None:
            self._known.remember(peer, addresses[:_DIALLED_AT_ONCE])

    async def session(self, peer: PeerId) -> Session:
        """A connection to ``peer``, dialled when there is none. PeerUnreachable."""
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
        """Dial although there is a connection; whether there is a direct one now."""
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
        """The first that shakes hands is kept."""
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
            await self._dialled(peer, address)
        except (OSError, DecentralError) as error:
            reasons.append(f"{address}: {error}")
            return
        scope.cancel()

    # ---- one address ----

    async def _dialled(self, peer: PeerId, address: str) -> Session:
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


# ---- a stream for one protocol ----
#
# It goes over the connection there is, or over a new one when that is found dead.


class Opener:
    """Opens the streams of one transport, and counts what they carry in ``traffic``."""

    def __init__(self, dialler: Dialler, sessions: Sessions, traffic: Traffic, timeout: float) -> None:
        self._dialler, self._sessions, self._traffic, self._timeout = dialler, sessions, traffic, timeout

    async def open(self, peer: PeerId, protocol: str) -> NativeStream:
        """See Transport."""
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
                await propose(stream, protocol)
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
    """That there is no path, and why."""
    return PeerUnreachable(f"{peer_name(peer)}: no path to it now: {error}; try again or ask another peer")


# ---- a transport's connections, put together ----
#
# Sockets become sessions by handshakes, dialled or accepted: ``sessions`` knows what stands, ``handshakes`` let
# strangers become sessions, ``dialler`` goes out to peers, and all leave from the ``ports`` that are listened on.


class Links:
    """The parts of one transport. ``limits``: those of a relay, which has strangers for guests; None for a peer."""

    def __init__(
        self, signer: Signer, timeout: float, events: SessionEvents, limits: RelayLimits | None = None
    ) -> None:
        self.ports = Ports()
        if limits is None:
            self.sessions = Sessions(events)
            self.handshakes = Handshakes(signer, timeout, self.sessions)
        else:
            self.sessions = Sessions(events, connections=limits.peers, stock=limits.windows)
            self.handshakes = Handshakes(signer, timeout, self.sessions, of_one_network=limits.peers_per_network)
        self.dialler = Dialler(signer.peer, timeout, self.ports, self.sessions, self.handshakes)

    async def finish(self, timeout: float) -> None:
        """Let what is queued leave, then end every session; ``timeout`` s at most, twice that with relayed ones."""
        self.handshakes.dismiss()
        with anyio.CancelScope(shield=True):
            await self.sessions.finish(timeout)
