"""A lease: one peer's signed word that it is here, where to find it and how far it is.

Crosses the wire, mostly as a value in the DHT: about 200 bytes plus the addresses. It expires unless
renewed. Anybody may carry it, nobody can alter it. The sequence number rises with every renewal, so an
old lease never replaces a new one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

from decentral.errors import PayloadError
from decentral.wire.codecs import U8, U32, U64, Hash, Many, Peer, Signature, Text
from decentral.wire.keys import SIGNATURE_NBYTES, Signer, verify
from decentral.wire.layout import layout_of

MAX_ADDRESSES = 16
MAX_ADDRESS = 256  # characters

ADDRESS = Text(MAX_ADDRESS)


PRIVATE = 1  # flag of ``state``: others reach this peer through relays only


@dataclass(frozen=True, slots=True)
class Lease:
    """Made by ``seal_lease``; one that was read is signed by ``peer``."""

    run: Hash
    peer: Peer
    sequence: U64
    ttl: U32  # seconds from when it was made
    addresses: Annotated[tuple[str, ...], Many(ADDRESS, MAX_ADDRESSES)]  # multiaddrs, best first
    epoch: U64
    round: U64
    digest: Hash  # of the anchor
    state: U8  # flags, PRIVATE the only one so far; others are passed on and mean nothing
    uplink: U64  # bit/s, measured; 0: not yet
    version: Annotated[str, Text(32)]  # of the library
    signature: Signature = bytes(SIGNATURE_NBYTES)

    def check(self) -> str | None:
        """The rule across fields that this lease breaks."""
        return None if verify(self.peer, self.signature, _text(self)) else "not signed by the peer it names"


def seal_lease(lease: Lease, signer: Signer) -> Lease:
    """The same lease, signed. Raises PayloadError when it is another peer's, or a field breaks its rule."""
    if lease.peer != signer.peer:
        raise PayloadError("seal_lease: lease.peer is not the signer's peer; a peer signs its own lease only")
    return replace(lease, signature=signer.sign(_text(lease)))


def _text(lease: Lease) -> bytes:
    """What the signature covers: every field before it, named so that no other signed text begins alike."""
    return b"decentral lease 1\0" + layout_of(Lease).fields_to_bytes(lease)[:-SIGNATURE_NBYTES]
