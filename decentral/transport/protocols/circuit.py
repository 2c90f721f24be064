"""The words of a relay: how a peer asks it to keep a place, to dial a peer that has one, and is dialled; how the relay
answers, and what it gives at most. The relay sees only ciphertext.

Source: libp2p/specs, relay/circuit-v2.md.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum

import anyio

from decentral.errors import ConfigError, PayloadError, PeerUnreachable, StreamClosed, TransportError
from decentral.flow.budget import Limits
from decentral.transport.protocols.messages import (
    Ends,
    bytes_field,
    bytes_fields,
    multiaddr_to_bytes,
    number_field,
    number_fields,
    peer_from_id,
    peer_to_id,
    read_varint,
    varint,
)
from decentral.transport.protocols.yamux import MuxedStream
from decentral.wire.keys import PeerId, peer_from_name, peer_name

# ---- asking a relay, and being dialled ----
#
# Crosses the wire: a question and an answer of about 100 bytes for a place, once in half its life; two of each for a
# connection, which is then shaken hands over and multiplexed as a TCP one is.

HOP, STOP = "/libp2p/circuit/relay/0.2.0/hop", "/libp2p/circuit/relay/0.2.0/stop"
RESERVE, CONNECT, HOP_STATUS = range(3)  # types of the messages to a relay
STOP_CONNECT, STOP_STATUS = range(2)  # and of its own
_RELAYED = re.compile(r"(/.+)/p2p/([^/]+)/p2p-circuit(?:/p2p/[^/]+)?")


@dataclass(frozen=True, slots=True)
class Reservation:
    """The terms of a place that a relay grants."""

    expires: int  # s since 1970, by its clock
    nbytes: int | None  # that one connection may carry; None: no limit
    seconds: int | None  # that one connection may last


def relay_of(address: str) -> tuple[PeerId, str] | None:
    """Return the relay in an address that leads through one, and where the relay is; else None."""
    match = _RELAYED.fullmatch(address)
    if match is None or "/p2p-circuit" in match[1]:
        return None
    try:
        return peer_from_name(match[2]), f"{match[1]}/p2p/{match[2]}"
    except PayloadError:
        return None


async def reserve(ends: Ends) -> Reservation:
    """Keep a place at the relay. TransportError when it has none."""
    await write_message(ends, number_field(1, RESERVE))
    message = await read_message(ends)
    _check_answer(number_fields(message), HOP_STATUS, 5)
    place = number_fields(_last(bytes_fields(message), 3))
    limit = number_fields(_last(bytes_fields(message), 4))
    return Reservation(place.get(1, 0), limit.get(2) or None, limit.get(1) or None)


async def pass_through(ends: Ends, peer: PeerId) -> None:
    """Have the relay join this stream to ``peer``. PeerUnreachable when it does not."""
    await write_message(ends, number_field(1, CONNECT) + bytes_field(2, bytes_field(1, peer_to_id(peer))))
    try:
        _check_answer(number_fields(await read_message(ends)), HOP_STATUS, 5)
    except TransportError as error:
        raise PeerUnreachable(f"{peer_name(peer)}: {error}") from None


async def admit(ends: Ends) -> PeerId:
    """Take what a relay brings; return who the relay says it is, which the handshake has yet to prove."""
    message = await read_message(ends)
    if number_fields(message).get(1, STOP_CONNECT) != STOP_CONNECT:
        raise PayloadError("relay: brings no connection; drop the stream")
    peer = peer_from_id(_last(bytes_fields(_last(bytes_fields(message), 2)), 1))
    await write_message(ends, number_field(1, STOP_STATUS) + number_field(4, HopStatus.OK))
    return peer


def _check_answer(numbers: dict[int, int], kind: int, field: int) -> None:
    if numbers.get(1, 0) != kind or numbers.get(field) != HopStatus.OK:
        raise TransportError(f"the relay says no ({numbers.get(field, 0)}); try another relay")


def _last(fields: dict[int, list[bytes]], number: int) -> bytes:
    return fields.get(number, [b""])[-1]


class RelayedSocket:
    """A stream as the socket that a handshake is made over."""

    def __init__(self, muxed: MuxedStream, relay: PeerId) -> None:
        self.relay = relay
        self._muxed = muxed

    async def send(self, data: bytes) -> None:
        """Send all of ``data``."""
        try:
            await self._muxed.send(data)
        except StreamClosed:
            raise anyio.BrokenResourceError from None

    async def receive(self, max_bytes: int = 65536) -> bytes:
        """Return what came next."""
        data = await self._muxed.receive(max_bytes)
        if not data:
            raise anyio.EndOfStream
        return data

    async def send_eof(self) -> None:
        """Say that nothing more comes, and read on: what is under way would be lost by a reset that overtakes it."""
        self._muxed.end()

    async def aclose(self) -> None:
        """Close at once."""
        self._muxed.reset()


# ---- the relay's answers ----
#
# No sockets, but for one question of ours.
#
# Crosses the wire: an answer of about 40 bytes and the relay's addresses for a place, of 15 for a connection. No
# voucher is signed: go-libp2p takes a place without one, and so do we.


class HopStatus(IntEnum):
    """The answers of a relay."""

    OK = 100
    RESERVATION_REFUSED = 200
    RESOURCE_LIMIT_EXCEEDED = 201
    PERMISSION_DENIED = 202
    CONNECTION_FAILED = 203
    NO_RESERVATION = 204
    MALFORMED_MESSAGE = 400
    UNEXPECTED_MESSAGE = 401


class Refused(TransportError):
    """A refusal of the relay, and which one."""

    def __init__(self, status: HopStatus, why: str) -> None:
        super().__init__(f"{status.name.lower()}: {why}")
        self.status = status


def read_question(message: bytes) -> PeerId | None:
    """Return whom to connect to, or None: a place is wanted.

    Refused for what is no question, PayloadError for no message.
    """
    kind = number_fields(message).get(1, RESERVE)
    if kind == RESERVE:
        return None
    if kind != CONNECT:
        raise Refused(HopStatus.UNEXPECTED_MESSAGE, f"a message of type {kind} is no question")
    peers = bytes_fields(message).get(2, [])
    ids = bytes_fields(peers[-1]).get(1, []) if peers else []
    if not ids:
        raise PayloadError("relay: asked to connect to nobody; drop the stream")
    return peer_from_id(ids[-1])


def encode_grant(place: Reservation, addresses: Iterable[str]) -> bytes:
    """Return the answer that gives a place; ``addresses`` are the relay's, with its name."""
    packed = b"".join(bytes_field(2, multiaddr_to_bytes(address)) for address in addresses)
    reservation = number_field(1, place.expires) + packed
    return _answer(HopStatus.OK, bytes_field(3, reservation) + _limit(4, place))


def encode_join(place: Reservation) -> bytes:
    """Return the answer after which the stream leads to the other peer."""
    return _answer(HopStatus.OK, _limit(4, place))


def encode_refusal(status: HopStatus) -> bytes:
    """Return the answer that says no."""
    return _answer(status)


async def offer(ends: Ends, peer: PeerId, place: Reservation) -> None:
    """Bring a connection of ``peer`` to one who has a place. Refused when that one does not take it."""
    who = bytes_field(2, bytes_field(1, peer_to_id(peer)))
    await write_message(ends, number_field(1, STOP_CONNECT) + who + _limit(3, place))
    answer = number_fields(await read_message(ends))
    if answer.get(1) != STOP_STATUS or answer.get(4) != HopStatus.OK:
        raise Refused(HopStatus.CONNECTION_FAILED, f"the other peer does not take it ({answer.get(4, 0)})")


def _answer(status: HopStatus, fields: bytes = b"") -> bytes:
    return number_field(1, HOP_STATUS) + fields + number_field(5, status)


def _limit(number: int, place: Reservation) -> bytes:
    """Return what a connection may last and carry; without a limit no word of it: go-libp2p takes 0 for very little."""
    fields = (number_field(1, place.seconds) if place.seconds else b"") + (
        number_field(2, place.nbytes) if place.nbytes else b""
    )
    return bytes_field(number, fields) if fields else b""


# ---- the most that a relay gives ----
#
# Places, connections, bytes, seconds, and the memory behind all of it.

_MOST_TOLD = 1 << 64  # what the message that tells it holds
LEAST_NBYTES = 1 << 24  # bytes of one connection: our own peers pass a relay over that grants less
_LEAST_SECONDS = 60
_PROCESS = 64 << 20  # bytes: Python and what it imports are 35 MiB; the rest is what streams hold before a refusal
_OF_A_PEER = 192 << 10  # bytes of a connection that sends half a message and reads nothing; an idle one takes 60 KiB
_OF_A_PAIR = 3 << 19  # bytes of a joined pair of which neither side reads; 1.15 MiB were measured with 20 of them


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayLimits:
    """Ceilings of one relay. ``None``: no ceiling of that kind."""

    places: int = 128
    places_per_network: int = 32  # an IPv4 address, a /64 of IPv6: one household, one laboratory
    place_seconds: int = 3600  # until a place must be renewed; peers do so at half time
    connections: int = 128  # pairs joined at a time
    connections_per_peer: int = 64  # of them with one peer at either end
    connections_per_pair: int = 4  # both may dial at once, and a path may die unnoticed
    nbytes: int | None = 1 << 32  # that one connection carries each way, as go-libp2p's daemons grant
    seconds: int | None = 1800  # that one connection lasts
    rate: float | None = None  # bytes/s passed on, all connections together
    peers: int = 256  # connections to peers, with a place and without
    peers_per_network: int = 128  # of them; whoever has one address must not keep all others out
    windows: int = 1 << 24  # bytes that windows of fast connections may grow by, all together

    @classmethod
    def within(cls, memory: int, *, places: int, rate: float | None = None) -> RelayLimits:
        """Return limits with as many connections as fit into ``memory`` bytes of the process, should nobody read what
        comes.
        """
        peers, windows = 2 * places + 16, memory // 16
        connections = (memory - _PROCESS - windows - peers * _OF_A_PEER) // _OF_A_PAIR
        if connections < 1:
            needed = (_PROCESS + peers * _OF_A_PEER + _OF_A_PAIR) * 16 // 15 // 10**6 + 1
            raise ConfigError(f"a relay of {places} places needs {needed} MB; allow more memory or fewer peers")
        return cls(
            places=places,
            peers=peers,
            peers_per_network=peers // 2,
            connections=connections,
            windows=windows,
            rate=rate,
        )

    @property
    def streams(self) -> Limits:
        """The limits of inbound streams that go with it: one of each connection, and some that ask."""
        return Limits(peer_streams=self.connections_per_peer + 16, total_streams=self.connections + 64)

    def __post_init__(self) -> None:
        for name in ("places", "places_per_network", "connections", "connections_per_peer", "connections_per_pair"):
            self._check(name, 1)
        self._check("peers_per_network", 1)
        self._check("place_seconds", _LEAST_SECONDS)
        self._check("peers", self.places + 1)
        if self.nbytes is not None:
            self._check("nbytes", LEAST_NBYTES)
        if self.seconds is not None:
            self._check("seconds", _LEAST_SECONDS)
        if self.nbytes is not None and self.nbytes >= _MOST_TOLD:
            raise ConfigError(f"RelayLimits(nbytes={self.nbytes}): below {_MOST_TOLD}; None for no limit")
        if self.rate is not None and not self.rate > 0:
            raise ConfigError(f"RelayLimits(rate={self.rate}): more than 0 bytes/s; None for no limit")

    def _check(self, name: str, least: int) -> None:
        if getattr(self, name) < least:
            raise ConfigError(f"RelayLimits({name}={getattr(self, name)}): at least {least}")


def network_of(host: str) -> str:
    """Return what counts as one network: an IPv4 address, or the 64 bits that an IPv6 customer gets at least."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:  # a name that was dialled from here
        return host
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((address, 64), strict=False))


# ---- messages with their length ----

_LONGEST = 4096  # bytes, as the specification asks


async def write_message(ends: Ends, message: bytes) -> None:
    """Send one message with its length before it."""
    await ends.send(varint(len(message)) + message)


async def read_message(ends: Ends, longest: int = _LONGEST) -> bytes:
    """Return the next message, of at most ``longest`` bytes, which is below 16,384."""
    prefix = await ends.receive_exactly(1)
    if prefix[-1] >= 0x80:
        prefix += await ends.receive_exactly(1)
    nbytes = read_varint(prefix)[0] if prefix[-1] < 0x80 else longest + 1
    if nbytes > longest:
        raise PayloadError(f"a message of more than {longest} bytes; drop the stream")
    return await ends.receive_exactly(nbytes)
