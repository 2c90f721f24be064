"""Peers and keys in py-libp2p's words. The secret stays in the signer."""

from __future__ import annotations

from libp2p.crypto.ed25519 import Ed25519PublicKey
from libp2p.crypto.keys import KeyPair, KeyType, PrivateKey, PublicKey
from libp2p.peer.id import ID

from decentral.errors import PayloadError
from decentral.transport.protocols.messages import peer_from_id, peer_to_id
from decentral.wire.keys import PeerId, Signer


class SignerKey(PrivateKey):
    """A key that signs through ``signer``."""

    def __init__(self, signer: Signer) -> None:
        self._signer = signer

    def sign(self, data: bytes) -> bytes:
        """The signature of ``data``."""
        return self._signer.sign(data)

    def get_public_key(self) -> PublicKey:
        """Its other half."""
        return public_key(self._signer.peer)

    def get_type(self) -> KeyType:
        """Ed25519."""
        return KeyType.Ed25519

    def to_bytes(self) -> bytes:
        """Nobody needs them."""
        raise PayloadError("the private key is not given out")


def key_pair(signer: Signer) -> KeyPair:
    """Both halves."""
    private = SignerKey(signer)
    return KeyPair(private, private.get_public_key())


def public_key(peer: PeerId) -> PublicKey:
    """The key that a peer id is."""
    return Ed25519PublicKey.from_bytes(peer)


def peer_id(peer: PeerId) -> ID:
    """A peer's libp2p id."""
    return ID(peer_to_id(peer))


def peer_of(found: ID) -> PeerId:
    """The peer behind a libp2p id. PayloadError for anything but an Ed25519 one."""
    return peer_from_id(found.to_bytes())
