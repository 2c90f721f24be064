"""Streams over libp2p without a daemon: TCP, Noise and yamux in this process. For systems the daemon is not built for.

Runs on asyncio and on trio. Speaks with daemons and with other implementations of libp2p; has neither QUIC nor a DHT.
What strangers may hold is bounded at every step: connections that have not proven who they are, connections, streams,
windows, and above them the bytes of bodies (``budget``).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Container, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import anyio
import anyio.abc

from decentral.errors import DecentralError, PayloadError
from decentral.flow.budget import Budget, Limits
from decentral.transport.base import Handler, Services, Traffic, Uncapped, attend, check_listen, dialable, everywhere
from decentral.transport.holepunch import DCUTR, Puncher
from decentral.transport.native.dialling import Links, Opener
from decentral.transport.native.sessions import SessionEvents
from decentral.transport.native.tcp import bound_addresses, check_tcp, listeners
from decentral.transport.protocols.identify import IDENTIFY, tell
from decentral.transport.protocols.messages import Ends, answer
from decentral.transport.protocols.yamux import MuxedStream, NativeStream, Session
from decentral.transport.relay.circuit import HOP, STOP, RelayedSocket, RelayLimits, Reservation, admit
from decentral.transport.relay.reservations import Places, ask_place
from decentral.transport.relay.service import Relay
from decentral.wire.keys import PeerId, Signer, peer_name

_OF_A_QUESTION = 1 << 14  # bytes that a stream brings to a mere relay before it is joined: proposals and 4 KiB
_PARTING = 1.0  # s for what is queued to leave when the transport is left

logger = logging.getLogger("decentral.transport")


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeOptions:
    """How this peer takes part in the network."""

    announce: tuple[str, ...] = ()  # addresses to tell others instead of those found
    relays: tuple[str, ...] = ()  # through which this peer can be dialled; to dial through others' it needs none
    relay: RelayLimits | None = None  # what this peer relays for others; None: nothing
    punch: bool = True  # leave from the port that is listened on, and exchange relayed connections for direct ones
    dial_timeout: float = 10.0  # s, for open, connect and every handshake


class NativeTransport(Uncapped):
    """One peer on libp2p. See Transport.

    ``listen`` defaults to all interfaces; TCP only. Entering raises ListenError when an address is taken, ConfigError
    when one is malformed.
    """

    def __init__(
        self,
        signer: Signer,
        *,
        listen: Sequence[str] | None = None,
        options: NativeOptions | None = None,
        limits: Limits | None = None,
    ) -> None:
        self.peer = signer.peer
        self.traffic = Traffic()
        self.budget = Budget(limits)
        self.options = options or NativeOptions()
        self.listen_on = tuple(listen) if listen is not None else everywhere()
        self._services = Services()
        events = SessionEvents(self._on_stream, self._stays, self._on_gone, self._on_relayed)
        self.links = Links(signer, self.options.dial_timeout, events, self.options.relay)
        self.relay = self._make_relay()
        self._places = Places(self.links.sessions, self.links.dialler, self.options.relays, self.options.dial_timeout)
        self.puncher = self._make_puncher()
        self._found: tuple[str, ...] = ()
        self._opener = Opener(self.links.dialler, self.links.sessions, self.traffic, self.options.dial_timeout)
        self._negotiations = Negotiations(self.budget.comes_first, self.options.dial_timeout)
        self._stack: AsyncExitStack | None = None
        self._handlers: anyio.abc.TaskGroup | None = None

    def _make_relay(self) -> Relay | None:
        limits = self.options.relay
        if limits is None:
            return None
        relay = Relay(self.links, self.addresses, limits, self.options.dial_timeout)
        self.serve(HOP, relay.attend)
        return relay

    def _stays(self, peer: PeerId) -> bool:
        return self.budget.comes_first(peer) or (self.relay is not None and self.relay.has_place(peer))

    def _make_puncher(self) -> Puncher | None:
        """A relay needs none: who is reached through another one is no relay."""
        if not self.options.punch or self.options.relay is not None:
            return None
        links = self.links
        return Puncher(self.peer, links.sessions, links.dialler, links.handshakes.meetings, self.options.dial_timeout)

    def serve(self, protocol: str, handler: Handler) -> None:
        """See Transport."""
        self._services.add(protocol, handler)

    async def __aenter__(self) -> Self:
        check_tcp(self.listen_on)
        check_listen(self.listen_on)
        self._services.fixed = True
        async with AsyncExitStack() as stack:
            sockets = await listeners(self.listen_on)
            for socket in sockets:
                stack.push_async_callback(socket.aclose)
            group = await stack.enter_async_context(anyio.create_task_group())
            stack.callback(group.cancel_scope.cancel)
            self._found = self.options.announce or bound_addresses(sockets)
            stack.push_async_callback(self.links.finish, _PARTING)
            self._handlers = await stack.enter_async_context(anyio.create_task_group())
            stack.callback(self._handlers.cancel_scope.cancel)
            if self.puncher is not None:
                self.links.ports.share(sockets)
            self.links.sessions.group = group
            for socket in sockets:
                group.start_soon(self.links.handshakes.listen, socket, group)
            for relay in self._places.relays:
                self._handlers.start_soon(self._places.keep, relay)  # no new place while the connections are finished
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        assert self._stack is not None, "entered before it is left"
        self._handlers = None
        await self._stack.__aexit__(None, None, None)  # the body's error leaves as it is
        return None

    async def paths(self) -> dict[PeerId, tuple[str, ...]]:
        """See Transport."""
        return self.links.sessions.paths()

    @property
    def bound(self) -> tuple[str, ...]:
        """Where its sockets listen, on which interfaces, or what is announced instead."""
        return self._found

    async def granted(self, relay: PeerId, where: Sequence[str]) -> Reservation:
        """What the relay at ``where`` grants, without keeping it. TransportError, TimeoutError."""
        return await ask_place(self.links.dialler, relay, where, self.options.dial_timeout)

    def local_port(self, peer: PeerId) -> int:
        """This side's port of the connection to ``peer``: a NAT that shows others another one does not preserve it."""
        return self.links.sessions.local_port(peer)

    def addresses(self) -> tuple[str, ...]:
        """See Transport."""
        return dialable((*self._found, *self._places.addresses()), peer_name(self.peer))

    async def connect(self, peer: PeerId, addresses: Sequence[str]) -> None:
        """See Transport. The addresses are remembered for when the connection is gone."""
        await self.links.dialler.connect(peer, addresses)

    async def open(self, peer: PeerId, protocol: str) -> NativeStream:
        """See Transport."""
        return await self._opener.open(peer, protocol)

    # ---- connections ----

    def _on_gone(self, peer: PeerId) -> None:
        if self.relay is not None:
            self.relay.drop_place(peer)

    def _on_relayed(self, session: Session, dialled: bool) -> None:
        if self.puncher is not None and self._handlers is not None:
            self._handlers.start_soon(self.puncher.upgrade, session, dialled)

    # ---- inbound ----

    def _on_stream(self, session: Session, muxed: MuxedStream) -> None:
        if self._handlers is None or not self._negotiations.begin(session.peer):
            muxed.reset()
            return
        if self._services.handlers.keys() == {HOP}:
            muxed.most_unread = _OF_A_QUESTION
        self._handlers.start_soon(self._attend, NativeStream(session.peer, muxed), session)

    async def _attend(self, stream: NativeStream, session: Session) -> None:
        handed_on = False
        try:
            protocol = await self._negotiations.protocol_of(stream, stream.peer, self._answered)
            if protocol == STOP:
                handed_on = await self._brought(stream)
                return
            if protocol == IDENTIFY:
                await self._tell(stream, session)
                return
            if protocol == DCUTR and self.puncher is not None:
                await self.puncher.attend(stream, session)
                return
            with self.budget.inbound(stream.peer):
                stream.traffic = self.traffic
                await attend(stream, protocol, self._services.handlers[protocol])
        except (DecentralError, TimeoutError) as error:
            logger.debug("inbound stream of %s refused: %s", peer_name(stream.peer), error)
        finally:
            if not handed_on:
                with anyio.CancelScope(shield=True):
                    await stream.aclose()

    async def _tell(self, stream: NativeStream, session: Session) -> None:
        sessions = self.links.sessions
        seen = "" if sessions.relay_of(session) else sessions.ends(session).remote
        await tell(stream, self.peer, self.addresses(), self._answered, seen)

    async def _brought(self, stream: NativeStream) -> bool:
        """A relay brings a connection; whether it lives on."""
        if stream.peer not in self._places.relays:
            raise PayloadError("brings a connection and is no relay of ours; drop the stream")
        with anyio.fail_after(self.options.dial_timeout):
            peer = await admit(stream)
        self.links.handshakes.take_in(RelayedSocket(stream.muxed, stream.peer), peer)
        return True

    @property
    def _answered(self) -> tuple[str, ...]:
        """The protocols that are."""
        own = (IDENTIFY, STOP) if self.puncher is None else (IDENTIFY, STOP, DCUTR)
        return own + tuple(self._services.handlers)


# ---- streams whose protocol is not known yet ----
#
# They are bounded: what one costs is spent before anybody is asked for it.

_OF_ALL, _OF_ONE_PEER = 256, 128  # of all, beyond which only members of the run open more; of one peer


class Negotiations:
    """The inbound ones of one transport. ``comes_first``: whether a peer is a member of the run."""

    def __init__(self, comes_first: Callable[[PeerId], bool], timeout: float) -> None:
        self._comes_first, self._timeout = comes_first, timeout
        self._under_way: Counter[PeerId] = Counter()

    def __len__(self) -> int:
        return self._under_way.total()

    def begin(self, peer: PeerId) -> bool:
        """Count one more of ``peer``; False when there are too many, and the stream is to be reset."""
        full = self._under_way.total() >= _OF_ALL and not self._comes_first(peer)
        if full or self._under_way[peer] >= _OF_ONE_PEER:
            return False
        self._under_way[peer] += 1
        return True

    async def protocol_of(self, ends: Ends, peer: PeerId, known: Container[str]) -> str:
        """What a stream that has begun is for, one of those ``known``. DecentralError, TimeoutError."""
        try:
            with anyio.fail_after(self._timeout):
                return await answer(ends, known)
        finally:
            self._under_way[peer] -= 1
            if not self._under_way[peer]:
                del self._under_way[peer]
