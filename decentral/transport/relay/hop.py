"""What a relay is asked, and what it answers: the other half of ``circuit``. No sockets, but for one question of ours.

Crosses the wire: an answer of about 40 bytes and the relay's addresses for a place, of 15 for a connection.

Source: libp2p/specs, relay/circuit-v2.md. No voucher is signed: go-libp2p takes a place without one, and so do we.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum

from decentral.errors import PayloadError, TransportError
from decentral.transport.multiaddr import to_bytes
from decentral.transport.protocols.multistream import Ends
from decentral.transport.protocols.peer_ids import peer_from_id, peer_to_id
from decentral.transport.protocols.protobuf import bytes_field, bytes_fields, number_field, number_fields
from decentral.transport.relay.circuit import (
    CONNECT,
    HOP_STATUS,
    RESERVE,
    STOP_CONNECT,
    STOP_STATUS,
    Reservation,
    read_message,
    write_message,
)
from decentral.wire.keys import PeerId


class HopStatus(IntEnum):
    """How a relay answers."""

    OK = 100
    RESERVATION_REFUSED = 200
    RESOURCE_LIMIT_EXCEEDED = 201
    PERMISSION_DENIED = 202
    CONNECTION_FAILED = 203
    NO_RESERVATION = 204
    MALFORMED_MESSAGE = 400
    UNEXPECTED_MESSAGE = 401


class Refused(TransportError):
    """The relay says no, and which no."""

    def __init__(self, status: HopStatus, why: str) -> None:
        super().__init__(f"{status.name.lower()}: {why}")
        self.status = status


def read_question(message: bytes) -> PeerId | None:
    """Whom to connect to, or None: a place is wanted. Refused for what is no question, PayloadError for no message."""
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


def granted(place: Reservation, addresses: Iterable[str]) -> bytes:
    """The answer that gives a place; ``addresses`` are the relay's, with its name."""
    packed = b"".join(bytes_field(2, to_bytes(address)) for address in addresses)
    reservation = number_field(1, place.expires) + packed
    return _answer(HopStatus.OK, bytes_field(3, reservation) + _limit(4, place))


def joined(place: Reservation) -> bytes:
    """The answer after which the stream leads to the other peer."""
    return _answer(HopStatus.OK, _limit(4, place))


def refused(status: HopStatus) -> bytes:
    """The answer that says no."""
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
    """What a connection may last and carry; without a limit no word of it: go-libp2p takes 0 for very little."""
    fields = (number_field(1, place.seconds) if place.seconds else b"") + (
        number_field(2, place.nbytes) if place.nbytes else b""
    )
    return bytes_field(number, fields) if fields else b""
