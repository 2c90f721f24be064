"""What libp2p peers ask of each other when they meet: key, addresses and protocols. Answered, never asked.

Without an answer the daemon would not know what is served here, and propose every protocol anew.

Source: libp2p/specs, identify/README.md.
"""

from __future__ import annotations

from collections.abc import Iterable

from decentral.errors import PayloadError
from decentral.transport.multiaddr import to_bytes
from decentral.transport.native_stream import NativeStream
from decentral.transport.protobuf import bytes_field
from decentral.transport.varint import varint
from decentral.wire.keys import PeerId

IDENTIFY = "/ipfs/id/1.0.0"
_KEY = bytes.fromhex("08011220")  # protobuf of a public key: Ed25519, 32 bytes


async def tell(stream: NativeStream, peer: PeerId, addresses: Iterable[str], protocols: Iterable[str]) -> None:
    """Answer one question and close."""
    message = bytes_field(1, _KEY + peer)
    for address in addresses:
        message += bytes_field(2, _bare(address))
    for protocol in protocols:
        message += bytes_field(3, protocol.encode())
    message += bytes_field(5, b"ipfs/0.1.0") + bytes_field(6, b"decentral")
    await stream.send(varint(len(message)) + message)
    await stream.aclose()


def _bare(address: str) -> bytes:
    """Without ``/p2p/<name>``, which the connection has proven."""
    try:
        return to_bytes(address.rpartition("/p2p/")[0])
    except PayloadError:
        return b""
