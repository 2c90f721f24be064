"""Through a relay: ask it to keep a place, dial a peer that has one, and be dialled. The relay sees only ciphertext.

Crosses the wire: a question and an answer of about 100 bytes for a place, once in half its life; two of each for a
connection, which is then shaken hands over and multiplexed as a TCP one is.

Source: libp2p/specs, relay/circuit-v2.md.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import anyio

from decentral.errors import PayloadError, PeerUnreachable, StreamClosed, TransportError
from decentral.transport.protocols.multistream import Ends
from decentral.transport.protocols.muxed_stream import MuxedStream
from decentral.transport.protocols.peer_ids import peer_from_id, peer_to_id
from decentral.transport.protocols.protobuf import bytes_field, bytes_fields, number_field, number_fields
from decentral.transport.protocols.varint import read_varint, varint
from decentral.wire.keys import PeerId, peer_from_name, peer_name

HOP, STOP = "/libp2p/circuit/relay/0.2.0/hop", "/libp2p/circuit/relay/0.2.0/stop"
RESERVE, CONNECT, HOP_STATUS = range(3)  # types of the messages to a relay
STOP_CONNECT, STOP_STATUS = range(2)  # and of its own
OK = 100
_LONGEST = 4096  # bytes of a message, as the specification asks
_RELAYED = re.compile(r"(/.+)/p2p/([^/]+)/p2p-circuit(?:/p2p/[^/]+)?")


@dataclass(frozen=True, slots=True)
class Reservation:
    """What a relay granted."""

    expires: int  # s since 1970, by its clock
    nbytes: int | None  # that one connection may carry; None: no limit
    seconds: int | None  # that one connection may last


def relay_of(address: str) -> tuple[PeerId, str] | None:
    """The relay in an address that leads through one, and where the relay is; else None."""
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
    _check(number_fields(message), HOP_STATUS, 5)
    place = number_fields(_last(bytes_fields(message), 3))
    limit = number_fields(_last(bytes_fields(message), 4))
    return Reservation(place.get(1, 0), limit.get(2) or None, limit.get(1) or None)


async def pass_through(ends: Ends, peer: PeerId) -> None:
    """Have the relay join this stream to ``peer``. PeerUnreachable when it does not."""
    await write_message(ends, number_field(1, CONNECT) + bytes_field(2, bytes_field(1, peer_to_id(peer))))
    try:
        _check(number_fields(await read_message(ends)), HOP_STATUS, 5)
    except TransportError as error:
        raise PeerUnreachable(f"{peer_name(peer)}: {error}") from None


async def admit(ends: Ends) -> PeerId:
    """Take what a relay brings; returns who the relay says it is, which the handshake has yet to prove."""
    message = await read_message(ends)
    if number_fields(message).get(1, STOP_CONNECT) != STOP_CONNECT:
        raise PayloadError("relay: brings no connection; drop the stream")
    peer = peer_from_id(_last(bytes_fields(_last(bytes_fields(message), 2)), 1))
    await write_message(ends, number_field(1, STOP_STATUS) + number_field(4, OK))
    return peer


class RelayedSocket:
    """A stream as the socket that a handshake is made over."""

    def __init__(self, muxed: MuxedStream, relay: PeerId) -> None:
        self.relay = relay
        self._muxed = muxed

    async def send(self, data: bytes) -> None:
        """Send all of ``data``."""
        try:
            await self._muxed.send(data, _ignore)
        except StreamClosed:
            raise anyio.BrokenResourceError from None

    async def receive(self, max_bytes: int = 65536) -> bytes:
        """What came next."""
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


def _ignore(nbytes: int) -> None:
    return None


def _check(numbers: dict[int, int], kind: int, field: int) -> None:
    if numbers.get(1, 0) != kind or numbers.get(field) != OK:
        raise TransportError(f"the relay says no ({numbers.get(field, 0)}); try another relay")


def _last(fields: dict[int, list[bytes]], number: int) -> bytes:
    return fields.get(number, [b""])[-1]


async def write_message(ends: Ends, message: bytes) -> None:
    """Send one message with its length before it."""
    await ends.send(varint(len(message)) + message)


async def read_message(ends: Ends, longest: int = _LONGEST) -> bytes:
    """The next message, of at most ``longest`` bytes, which is below 16,384."""
    prefix = await ends.receive_exactly(1)
    if prefix[-1] >= 0x80:
        prefix += await ends.receive_exactly(1)
    nbytes = read_varint(prefix)[0] if prefix[-1] < 0x80 else longest + 1
    if nbytes > longest:
        raise PayloadError(f"a message of more than {longest} bytes; drop the stream")
    return await ends.receive_exactly(nbytes)
