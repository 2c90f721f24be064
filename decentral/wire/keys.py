"""Keys and signatures: a peer is its Ed25519 public key, 32 bytes, and its name is the libp2p id of that key.

Crosses the wire: 32 bytes per peer id, 64 per signature. Checking one costs about 0.1 ms.

Source: Bernstein et al., "High-speed high-security signatures", 2011 (RFC 8032); the libp2p peer id
specification for the name (identity multihash of the key's protobuf, base58btc).
"""

from __future__ import annotations

from functools import lru_cache

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from decentral.errors import PayloadError

PeerId = bytes  # the raw Ed25519 public key; sorted as bytes
Digest = bytes  # 32 bytes of blake2b

PEER_NBYTES = 32
DIGEST_NBYTES = 32
SEED_NBYTES = 32
SIGNATURE_NBYTES = 64
SECRET_NBYTES = 32

_ALPHABET = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
_NAME_PREFIX = bytes.fromhex("002408011220")  # identity multihash, 36 bytes: Ed25519, 32 bytes
_NAME_LENGTH = 52  # characters of every name with that prefix

_FIELD = 2**255 - 19
# y of the points whose order divides 8: under such a key a signature says nothing about who made it.
_SMALL_ORDER_Y = frozenset(
    {
        0,
        1,
        _FIELD - 1,
        int("05fc536d880238b13933c6d305acdfd5f098eff289f4c345b027b2c28f95e826", 16),
        int("7a03ac9277fdc74ec6cc392cfa53202a0f67100d760b3cba4fd84d3d706a17c7", 16),
    }
)


class Signer:
    """A private key that signs. It shows its peer id and never itself."""

    __slots__ = ("_key", "peer")

    def __init__(self, seed: bytes) -> None:
        """Take the 32 secret bytes of RFC 8032."""
        self._key = Ed25519PrivateKey.from_private_bytes(seed)
        self.peer: PeerId = self._key.public_key().public_bytes_raw()

    @classmethod
    def generate(cls) -> Signer:
        """A new key from the operating system's randomness."""
        return cls(Ed25519PrivateKey.generate().private_bytes_raw())

    @property
    def seed(self) -> bytes:
        """The secret itself, for the key file only."""
        return self._key.private_bytes_raw()

    def sign(self, data: bytes) -> bytes:
        """The 64 bytes that only this key can make for ``data``."""
        return self._key.sign(data)

    def secret_for(self, purpose: bytes, salt: bytes) -> bytes:
        """32 bytes that nobody without this key can tell, others for each purpose and salt (HKDF, RFC 5869)."""
        return HKDF(SHA256(), SECRET_NBYTES, salt=salt, info=purpose).derive(self._key.private_bytes_raw())

    def __repr__(self) -> str:
        return f"Signer({peer_name(self.peer)})"


@lru_cache(maxsize=1024)  # one lease comes from many peers, one vote again in the certificate
def verify(peer: PeerId, signature: bytes, data: bytes) -> bool:
    """Tell whether ``peer`` signed ``data``. Never raises, whatever the bytes are."""
    if len(peer) != PEER_NBYTES or len(signature) != SIGNATURE_NBYTES or not is_sound(peer):
        return False
    try:
        Ed25519PublicKey.from_public_bytes(peer).verify(signature, data)
    except (InvalidSignature, ValueError):
        return False
    return True


def is_sound(peer: PeerId) -> bool:
    """Tell whether the key is canonical and of large order; under another, strangers can sign too."""
    y = int.from_bytes(peer, "little") & (2**255 - 1)
    return y < _FIELD and y not in _SMALL_ORDER_Y


@lru_cache(maxsize=4096)
def peer_name(peer: PeerId) -> str:
    """The libp2p id, ``12D3KooW...``: for logs, addresses and people."""
    number = int.from_bytes(_NAME_PREFIX + peer, "big")
    digits = ""
    while number:
        number, digit = divmod(number, 58)
        digits = _ALPHABET[digit] + digits
    return "1" + digits  # base58 keeps the prefix's leading zero byte as one "1"


def peer_from_name(name: str) -> PeerId:
    """The peer behind a libp2p id. Raises PayloadError for anything but an Ed25519 one."""
    peer = _unbase58(name)[-PEER_NBYTES:] if len(name) == _NAME_LENGTH else b""
    if len(peer) != PEER_NBYTES or peer_name(peer) != name:
        shown = ascii(name[:60])
        raise PayloadError(f"peer id {shown} is not an Ed25519 libp2p id (12D3KooW + 44 more); copy it whole")
    return peer


def _unbase58(text: str) -> bytes:
    number = 0
    for character in text:
        digit = _ALPHABET.find(character)
        if digit < 0:
            return b""
        number = number * 58 + digit
    return number.to_bytes(40, "big")  # 58**52 < 2**320
