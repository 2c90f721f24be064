"""The question of libp2p peers that meet: key, addresses, protocols, and how they look from the other side (identify).

Without an answer the daemon would not know what is served here, and propose every protocol anew. Asked is only who may
tell something new: a relay, and a peer that came through one.

Source: libp2p/specs, identify/README.md.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from decentral.errors import PayloadError
from decentral.transport.protocols.circuit import read_message
from decentral.transport.protocols.messages import (
    ED25519,
    Ends,
    bytes_field,
    bytes_fields,
    convert_known,
    multiaddr_to_bytes,
    multiaddr_to_text,
    propose,
    varint,
)
from decentral.transport.protocols.yamux import NativeStream
from decentral.wire.keys import PeerId

IDENTIFY = "/ipfs/id/1.0.0"
_LONGEST = 8192  # bytes of an answer, as the specification asks
_MOST_FIELDS = 512  # that fit into it, and are one protocol or address each
_MOST_ADDRESSES = 16  # that are looked at


@dataclass(frozen=True, slots=True)
class Told:
    """The answer of a peer about itself, and about who asks. None of it is proven."""

    addresses: tuple[str, ...]
    observed: str | None  # the asker's end of the connection


async def tell(
    stream: NativeStream, peer: PeerId, addresses: Iterable[str], protocols: Iterable[str], observed: str
) -> None:
    """Answer one question and close; ``observed`` is the other end of the connection, or empty."""
    message = bytes_field(1, ED25519 + peer)
    for address in addresses:
        message += bytes_field(2, _bare(address))
    for protocol in protocols:
        message += bytes_field(3, protocol.encode())
    if observed:
        message += bytes_field(4, _pack(observed))
    message += bytes_field(5, b"ipfs/0.1.0") + bytes_field(6, b"decentral")
    await stream.send(varint(len(message)) + message)
    await stream.aclose()


async def ask(ends: Ends) -> Told:
    """Ask the other side. StreamClosed, PeerUnreachable, PayloadError."""
    await propose(ends, IDENTIFY)
    fields = bytes_fields(await read_message(ends, _LONGEST), _MOST_FIELDS)
    addresses = convert_known(multiaddr_to_text, fields.get(2, [])[:_MOST_ADDRESSES])
    observed = convert_known(multiaddr_to_text, fields.get(4, [])[-1:])
    return Told(tuple(addresses), observed[0] if observed else None)


def _bare(address: str) -> bytes:
    """Return an address without ``/p2p/<name>``, which the connection has proven."""
    return _pack(address.rpartition("/p2p/")[0])


def _pack(address: str) -> bytes:
    try:
        return multiaddr_to_bytes(address)
    except PayloadError:
        return b""
