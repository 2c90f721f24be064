"""The serving half of a relay: it gives places to peers that nobody can dial, and joins to them who asks for them.

Source: libp2p/specs, relay/circuit-v2.md.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field

import anyio

from decentral.errors import DecentralError, PayloadError, StreamClosed
from decentral.transport.base import Stream
from decentral.transport.native.links import Links
from decentral.transport.protocols.circuit import (
    STOP,
    HopStatus,
    Refused,
    RelayLimits,
    Reservation,
    encode_grant,
    encode_join,
    encode_refusal,
    network_of,
    offer,
    read_message,
    read_question,
    write_message,
)
from decentral.transport.protocols.messages import propose
from decentral.transport.protocols.yamux import NativeStream
from decentral.transport.throttle import Gate
from decentral.wire.keys import PeerId, peer_name

logger = logging.getLogger("decentral.transport")


# ---- the relay ----
#
# It holds a place per peer, two streams per joined pair, and nothing else; all of it is bounded (``RelayLimits``), and
# everything above a bound is refused by the word that the specification has for it. It sees who talks to whom, when,
# and how much; what they say is encrypted between them.


@dataclass(frozen=True, slots=True)
class _Held:
    """A place: from which network it is held, and until when (s, the loop's clock)."""

    network: str
    until: float


@dataclass(slots=True)
class RelayCounts:
    """The deeds of a relay so far."""

    nbytes: int = 0  # passed on, both directions
    joined: int = 0  # pairs
    granted: int = 0  # places, each renewal counted
    refused: Counter[HopStatus] = field(default_factory=Counter)


class Relay:
    """Answers the questions of a relay, over the connections of one transport."""

    def __init__(self, links: Links, limits: RelayLimits) -> None:
        self.limits = limits
        self.counts = RelayCounts()
        self._sessions, self._dialler = links.sessions, links.dialler
        self._addresses, self._timeout = links.addresses, links.options.dial_timeout
        self._gate = None if limits.rate is None else Gate(limits.rate)
        self._places: dict[PeerId, _Held] = {}
        self._pairs: Counter[tuple[PeerId, PeerId]] = Counter()

    def has_place(self, peer: PeerId) -> bool:
        """Tell whether ``peer`` can be reached through here."""
        held = self._places.get(peer)
        return held is not None and held.until > anyio.current_time()

    def drop_place(self, peer: PeerId) -> None:
        """Drop the place of ``peer``, whose last connection ended."""
        self._places.pop(peer, None)

    @property
    def peers(self) -> int:
        """Peers with a connection, with a place and without."""
        return self._sessions.num_peers

    @property
    def places(self) -> int:
        """Places held now."""
        self._drop_expired()
        return len(self._places)

    @property
    def connections(self) -> int:
        """Pairs that are joined now, or being so."""
        return self._pairs.total()

    async def attend(self, stream: Stream) -> None:
        """Answer one question; when it was for a connection, carry it until it ends."""
        assert isinstance(stream, NativeStream), "served by the native transport only"
        try:
            wanted = await self._receive_question(stream)
            if wanted is None:
                await self._say(stream, self.give_place(stream.peer))
            else:
                await self._connect(stream, wanted)
        except Refused as refusal:
            logger.debug("%s: %s", peer_name(stream.peer), refusal)
            await self._refuse(stream, refusal.status)
        except PayloadError as error:
            logger.debug("%s: %s", peer_name(stream.peer), error)
            await self._refuse(stream, HopStatus.MALFORMED_MESSAGE)

    async def _receive_question(self, stream: NativeStream) -> PeerId | None:
        try:
            with anyio.fail_after(self._timeout):
                return read_question(await read_message(stream))
        except TimeoutError:
            raise StreamClosed(f"{peer_name(stream.peer)}: asked nothing within {self._timeout:g} s") from None

    # ---- places ----

    def give_place(self, peer: PeerId) -> bytes:
        """Give a place, or a longer one to a peer that has one; return the answer."""
        host = self._sessions.host_of(peer)
        if host is None:
            raise Refused(HopStatus.PERMISSION_DENIED, "a place is for who came here directly")
        network = network_of(host)
        self._drop_expired()
        others = [held.network for one, held in self._places.items() if one != peer]
        if len(others) >= self.limits.places:
            raise Refused(HopStatus.RESERVATION_REFUSED, f"all {self.limits.places} places are taken")
        if others.count(network) >= self.limits.places_per_network:
            raise Refused(HopStatus.RESERVATION_REFUSED, f"{network} holds {self.limits.places_per_network} places")
        self._places[peer] = _Held(network, anyio.current_time() + self.limits.place_seconds)
        self.counts.granted += 1
        here = [address for address in self._addresses() if "/p2p-circuit" not in address]
        return encode_grant(self._terms_told(int(time.time()) + self.limits.place_seconds), here)

    def _terms_told(self, expires: int = 0) -> Reservation:
        return Reservation(expires, self.limits.nbytes, self.limits.seconds)

    def _drop_expired(self) -> None:
        now = anyio.current_time()
        for peer in [peer for peer, held in self._places.items() if held.until <= now]:
            del self._places[peer]

    # ---- connections ----

    async def _connect(self, source: NativeStream, peer: PeerId) -> None:
        if peer == source.peer:
            raise Refused(HopStatus.PERMISSION_DENIED, "that is the asking peer itself")
        if not self.has_place(peer):
            raise Refused(HopStatus.NO_RESERVATION, f"{peer_name(peer)} has no place here")
        with self._room(source.peer, peer):
            async with self._brought(source.peer, peer) as target:
                await self._say(source, encode_join(self._terms_told()))
                self.counts.joined += 1
                limits = self.limits
                await join(source, target, SpliceTerms(limits.seconds, limits.nbytes, self._gate, self._count))

    @contextmanager
    def _room(self, source: PeerId, target: PeerId) -> Iterator[None]:
        """Hold one connection between two peers."""
        limits, pair = self.limits, (source, target)
        if self.connections >= limits.connections:
            raise Refused(HopStatus.RESOURCE_LIMIT_EXCEEDED, f"{self.connections} connections are relayed")
        if self._pairs[pair] >= limits.connections_per_pair:
            raise Refused(HopStatus.RESOURCE_LIMIT_EXCEEDED, f"these two have {self._pairs[pair]} connections")
        for peer in pair:
            if sum(count for ends, count in self._pairs.items() if peer in ends) >= limits.connections_per_peer:
                raise Refused(HopStatus.RESOURCE_LIMIT_EXCEEDED, f"{peer_name(peer)} has too many connections")
        self._pairs[pair] += 1
        try:
            yield
        finally:
            self._pairs[pair] -= 1
            if not self._pairs[pair]:
                del self._pairs[pair]

    @asynccontextmanager
    async def _brought(self, source: PeerId, peer: PeerId) -> AsyncIterator[NativeStream]:
        """Yield a stream to ``peer`` that it takes for a connection of ``source``."""
        target = None
        try:
            try:
                target = NativeStream(peer, (await self._dialler.session(peer)).open())
                with anyio.fail_after(self._timeout):
                    await propose(target, STOP)
                    await offer(target, source, self._terms_told())
            except (DecentralError, TimeoutError) as error:
                raise Refused(HopStatus.CONNECTION_FAILED, str(error)) from None
            yield target
        finally:
            if target is not None:
                target.reset()

    def _count(self, nbytes: int) -> None:
        self.counts.nbytes += nbytes

    # ---- answers ----

    async def _say(self, stream: NativeStream, answer: bytes) -> None:
        """Answer; a peer that takes nothing does not hold us up."""
        try:
            with anyio.fail_after(self._timeout):
                await write_message(stream, answer)
        except TimeoutError:
            raise StreamClosed(f"{peer_name(stream.peer)}: takes no answer") from None

    async def _refuse(self, stream: NativeStream, status: HopStatus) -> None:
        self.counts.refused[status] += 1
        await self._say(stream, encode_refusal(status))


# ---- two streams joined into one ----
#
# Bytes that come on either leave on the other, no faster than they are taken there.
#
# At most one piece of 64 KiB each way is in hand; what waits to be read lies in the streams' windows, which nobody
# widens while the other side does not keep pace. The end of one direction is passed on after its last byte and leaves
# the other one open. A reset is passed on as an end, too: one that overtakes what was sent before would lose it.

_PIECE = 65507  # bytes: one frame of yamux, which with its header is one message of Noise
_PARTING = 5.0  # s that one side has to read the end, once the other one is gone


@dataclass(frozen=True, slots=True)
class SpliceTerms:
    """The terms that a joined pair keeps to."""

    seconds: float | None  # that it lasts
    nbytes: int | None  # that each direction carries
    gate: Gate | None  # through which all pairs' bytes go, by turns of those who send
    on_bytes: Callable[[int], None]  # told of what was passed on


async def join(one: NativeStream, other: NativeStream, terms: SpliceTerms) -> None:
    """Carry bytes both ways until both have ended, either is gone, or the terms are used up."""
    one.muxed.most_unread = other.muxed.most_unread = None
    try:
        with anyio.move_on_after(terms.seconds):
            async with anyio.create_task_group() as group:
                group.start_soon(_carry, one, other, terms)
                group.start_soon(_carry, other, one, terms)
    finally:
        one.reset()
        other.reset()


async def _carry(source: NativeStream, target: NativeStream, terms: SpliceTerms) -> None:
    """Carry one direction. When it is over, the whole pair soon is, unless the source still listens."""
    try:
        await _pass_on(source, target, terms)
    except StreamClosed:
        return  # the target is gone; what it had sent before is on its way in the other direction
    target.muxed.end()
    await source.muxed.until_ended()
    with anyio.move_on_after(_PARTING):
        await target.muxed.until_ended()
    target.reset()


async def _pass_on(source: NativeStream, target: NativeStream, terms: SpliceTerms) -> None:
    most = _PIECE if terms.gate is None else min(_PIECE, terms.gate.schedule.piece)
    passed = 0
    while piece := await source.muxed.receive(most):
        passed += len(piece)
        if terms.nbytes is not None and passed > terms.nbytes:
            target.reset()
            source.reset()
            return
        if terms.gate is not None:
            await _turn(terms.gate, source, len(piece))
        await target.muxed.send(piece, terms.on_bytes)


async def _turn(gate: Gate, source: NativeStream, nbytes: int) -> None:
    turn = gate.ask(source.peer, nbytes)
    if not turn.granted:
        await gate.wait(turn)
