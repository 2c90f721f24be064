"""Noise XX as libp2p speaks it: who the other side is, proven, and a cipher each way. No sockets.

Crosses the wire: three messages of 32, 200 and 168 bytes, then 16 bytes with every 65,519.
The primitives are those of the ``cryptography`` package; only their order is written here.

Source: Perrin, "The Noise Protocol Framework", revision 34, 2018 (Noise_XX_25519_ChaChaPoly_SHA256);
libp2p/specs, noise/README.md.
"""

from __future__ import annotations

import hashlib
import hmac

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from decentral.errors import PayloadError
from decentral.transport.protocols.messages import bytes_field, bytes_fields
from decentral.wire.keys import PEER_NBYTES, PeerId, Signer, verify

TAG_NBYTES = 16
LONGEST = 65535  # bytes of a message; its length is a u16
MOST_AT_ONCE = LONGEST - TAG_NBYTES  # bytes of plaintext in one message
_NAME = b"Noise_XX_25519_ChaChaPoly_SHA256"  # 32 bytes, so it is the first hash as it stands
_KEY_NBYTES = 32
_SIGNED = b"noise-libp2p-static-key:"
_ED25519 = bytes.fromhex("08011220")  # protobuf of a public key: type 1, 32 bytes


class Cipher:
    """One direction: a key and a counter. What was changed, dropped or reordered on the way is a PayloadError."""

    def __init__(self, key: bytes) -> None:
        self._aead, self._count = ChaCha20Poly1305(key), 0

    def seal(self, data: bytes | memoryview, seen: bytes = b"") -> bytes:
        """``data`` and its tag; ``seen`` is what both sides know besides."""
        return self._aead.encrypt(self._nonce(), data, seen)

    def open(self, sealed: bytes, seen: bytes = b"") -> bytes:
        """What was sealed."""
        try:
            return self._aead.decrypt(self._nonce(), sealed, seen)
        except InvalidTag:
            raise PayloadError("noise: bytes were altered on the way, or a key differs; drop the connection") from None

    def _nonce(self) -> bytes:
        nonce = bytes(4) + self._count.to_bytes(8, "little")
        self._count += 1
        return nonce


class Handshake:
    """The state both sides share while they get to know each other; call the messages in their order."""

    def __init__(self, signer: Signer) -> None:
        self._signer = signer
        self._static, self._ephemeral = X25519PrivateKey.generate(), X25519PrivateKey.generate()
        self._chain = _NAME
        self._hash = hashlib.sha256(_NAME).digest()  # an empty prologue
        self._cipher: Cipher | None = None

    # ---- who dials ----

    def hello(self) -> bytes:
        """The first message."""
        return self._write_ephemeral() + self._seal(b"")

    def finish(self, answer: bytes) -> tuple[bytes, PeerId, Cipher, Cipher]:
        """From the answer: the third message, who answered, and the ciphers to send and to receive with."""
        theirs, answer = self._read_ephemeral(answer)
        self._mix(self._ephemeral, theirs)
        static, rest = self._read_static(answer)
        self._mix(self._ephemeral, static)
        peer = self._read_payload(static, rest)
        message = self._seal(_public(self._static))
        self._mix(self._static, theirs)
        message += self._seal(self._payload())
        first, second = self._split()
        return message, peer, first, second

    # ---- who is dialled ----

    def answer(self, hello: bytes) -> bytes:
        """The second message, from the first."""
        self._theirs, rest = self._read_ephemeral(hello)
        self._open(rest)
        message = self._write_ephemeral()
        self._mix(self._ephemeral, self._theirs)
        message += self._seal(_public(self._static))
        self._mix(self._static, self._theirs)
        return message + self._seal(self._payload())

    def conclude(self, last: bytes) -> tuple[PeerId, Cipher, Cipher]:
        """From the third message: who dialled, and the ciphers to send and to receive with."""
        static, rest = self._read_static(last)
        self._mix(self._ephemeral, static)
        peer = self._read_payload(static, rest)
        first, second = self._split()
        return peer, second, first

    # ---- tokens ----

    def _write_ephemeral(self) -> bytes:
        public = _public(self._ephemeral)
        self._add(public)
        return public

    def _read_ephemeral(self, message: bytes) -> tuple[X25519PublicKey, bytes]:
        public, rest = message[:_KEY_NBYTES], message[_KEY_NBYTES:]
        self._add(public)
        return _public_key(public), rest

    def _read_static(self, message: bytes) -> tuple[X25519PublicKey, bytes]:
        cut = _KEY_NBYTES + TAG_NBYTES
        return _public_key(self._open(message[:cut])), message[cut:]

    def _payload(self) -> bytes:
        signature = self._signer.sign(_SIGNED + _public(self._static))
        return bytes_field(1, _ED25519 + self._signer.peer) + bytes_field(2, signature)

    def _read_payload(self, static: X25519PublicKey, sealed: bytes) -> PeerId:
        """Whose handshake this is: it signed the key that the ciphers come from."""
        fields = bytes_fields(self._open(sealed))
        key, signature = fields.get(1, [b""])[-1], fields.get(2, [b""])[-1]
        peer = key.removeprefix(_ED25519)
        if len(key) != len(_ED25519) + PEER_NBYTES or not key.startswith(_ED25519):
            raise PayloadError("noise: the other side's identity is no Ed25519 key; only these take part")
        if not verify(peer, signature, _SIGNED + static.public_bytes_raw()):
            raise PayloadError("noise: the other side did not sign its key; drop the connection")
        return peer

    # ---- the symmetric state ----

    def _add(self, data: bytes) -> None:
        self._hash = hashlib.sha256(self._hash + data).digest()

    def _mix(self, mine: X25519PrivateKey, theirs: X25519PublicKey) -> None:
        try:
            shared = mine.exchange(theirs)
        except ValueError:
            raise PayloadError("noise: a key of small order; drop the connection") from None
        self._chain, key = _derive(self._chain, shared)
        self._cipher = Cipher(key)

    def _seal(self, data: bytes) -> bytes:
        sealed = self._cipher.seal(data, self._hash) if self._cipher is not None else data
        self._add(sealed)
        return sealed

    def _open(self, sealed: bytes) -> bytes:
        data = self._cipher.open(sealed, self._hash) if self._cipher is not None else sealed
        self._add(sealed)
        return data

    def _split(self) -> tuple[Cipher, Cipher]:
        first, second = _derive(self._chain, b"")
        return Cipher(first), Cipher(second)


def _derive(chain: bytes, material: bytes) -> tuple[bytes, bytes]:
    secret = hmac.digest(chain, material, "sha256")
    first = hmac.digest(secret, b"\x01", "sha256")
    return first, hmac.digest(secret, first + b"\x02", "sha256")


def _public(key: X25519PrivateKey) -> bytes:
    return key.public_key().public_bytes_raw()


def _public_key(raw: bytes) -> X25519PublicKey:
    if len(raw) != _KEY_NBYTES:
        raise PayloadError(f"noise: a key of {len(raw)} bytes where {_KEY_NBYTES} are due; drop the connection")
    return X25519PublicKey.from_public_bytes(raw)
