"""libp2p's ids of peers as bytes: a multihash around the public key itself, because Ed25519 keys are short.

Source: libp2p/specs, peer-ids/peer-ids.md.
"""

from __future__ import annotations

from decentral.errors import PayloadError
from decentral.wire.keys import PEER_NBYTES, PeerId, is_sound

_ID_PREFIX = bytes.fromhex("002408011220")  # identity multihash of an Ed25519 key's protobuf


def peer_from_id(raw: bytes) -> PeerId:
    """The public key inside a libp2p id; PayloadError when it holds none or it is not Ed25519."""
    peer = bytes(raw[len(_ID_PREFIX) :])
    if not raw.startswith(_ID_PREFIX) or len(peer) != PEER_NBYTES or not is_sound(peer):
        raise PayloadError(f"libp2p id {raw[:40].hex()}: not an Ed25519 identity; only these take part")
    return peer


def peer_to_id(peer: PeerId) -> bytes:
    """The libp2p id of a public key, as bytes."""
    return _ID_PREFIX + peer
