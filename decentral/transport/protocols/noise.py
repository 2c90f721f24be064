"""Noise XX as libp2p speaks it: who the other side is, proven, and a cipher each way, over any socket.

Crosses the wire: three messages of 32, 200 and 168 bytes, then 16 bytes with every 65,519.
The primitives are those of the ``cryptography`` package; only their order is written here.

Source: Perrin, "The Noise Protocol Framework", revision 34, 2018 (Noise_XX_25519_ChaChaPoly_SHA256);
libp2p/specs, noise/README.md.
"""

from __future__ import annotations

import hashlib
import hmac
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

import anyio
from anyio.abc import SocketAttribute, SocketStream
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from decentral.errors import PayloadError, PeerUnreachable, StreamClosed
from decentral.transport.protocols.messages import ED25519, answer, bytes_field, bytes_fields, propose
from decentral.wire.keys import PEER_NBYTES, PeerId, Signer, peer_name, verify

TAG_NBYTES = 16
LONGEST = 65535  # bytes of a message; its length is a u16
MOST_AT_ONCE = LONGEST - TAG_NBYTES  # bytes of plaintext in one message
_NAME = b"Noise_XX_25519_ChaChaPoly_SHA256"  # 32 bytes, so it is the first hash as it stands
_KEY_NBYTES = 32
_SIGNED = b"noise-libp2p-static-key:"


class Cipher:
    """A cipher for one direction: a key and a counter.

    What was changed, dropped or reordered on the way is a PayloadError.
    """

    def __init__(self, key: bytes) -> None:
        self._aead, self._count = ChaCha20Poly1305(key), 0

    def seal(self, data: bytes | memoryview, seen: bytes = b"") -> bytes:
        """Return ``data`` and its tag; ``seen`` is what both sides know besides."""
        return self._aead.encrypt(self._nonce(), data, seen)

    def open(self, sealed: bytes, seen: bytes = b"") -> bytes:
        """Return what was sealed."""
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
        """Return the first message."""
        return self._write_ephemeral() + self._seal(b"")

    def finish(self, answer: bytes) -> tuple[bytes, PeerId, Cipher, Cipher]:
        """Return, from the answer, the third message, who answered, and the ciphers to send and to receive with."""
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
        """Return the second message, from the first."""
        self._theirs, rest = self._read_ephemeral(hello)
        self._open(rest)
        message = self._write_ephemeral()
        self._mix(self._ephemeral, self._theirs)
        message += self._seal(_public(self._static))
        self._mix(self._static, self._theirs)
        return message + self._seal(self._payload())

    def conclude(self, last: bytes) -> tuple[PeerId, Cipher, Cipher]:
        """Return, from the third message, who dialled, and the ciphers to send and to receive with."""
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
        return bytes_field(1, ED25519 + self._signer.peer) + bytes_field(2, signature)

    def _read_payload(self, static: X25519PublicKey, sealed: bytes) -> PeerId:
        """Whose handshake this is: it signed the key that the ciphers come from."""
        fields = bytes_fields(self._open(sealed))
        key, signature = fields.get(1, [b""])[-1], fields.get(2, [b""])[-1]
        peer = key.removeprefix(ED25519)
        if len(key) != len(ED25519) + PEER_NBYTES or not key.startswith(ED25519):
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


# ---- connections with proven ends ----
#
# The Noise handshake, then encrypted messages both ways. At most 320 KiB of it are held in this process: one read, and
# one message that is not whole yet.
#
# A message is of no use before it is whole, and a thin line brings a few kilobytes at a time: where the system can, it
# wakes this process for half a long message, not for every packet. A reduce of 8 MB among four at 20 Mbit/s then takes
# 0.73 s of a peer's processor and not 1.11 (experiments/LOG.md).

NOISE = "/noise"
_READ = 1 << 18  # bytes asked of the socket at a time
_WORTH_WAKING = 1 << 15  # bytes: a receive buffer has room for several, so that the other side need not stop
_UNSENT = 1 << 15  # bytes that the system takes beyond those that are on their way
BROKEN = (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError, OSError)


class Socket(Protocol):
    """A carrier of bytes: TCP, or a stream through a relay."""

    async def send(self, data: bytes, /) -> None:
        """Send all of ``data``."""
        ...

    async def receive(self, max_bytes: int = 65536, /) -> bytes:
        """Return what came next; EndOfStream."""
        ...

    async def send_eof(self) -> None:
        """Say that nothing more comes."""
        ...

    async def aclose(self) -> None:
        """Close."""
        ...


class Plain:
    """A socket read in exact pieces. StreamClosed when it ends."""

    def __init__(self, socket: Socket) -> None:
        self._socket, self._held = socket, bytearray()
        self._wait_for_bytes = _least_to_wake_of(socket)
        self.delivery_rate = _delivery_rate_of(socket)
        _hold_little_unsent(socket)

    async def send(self, data: bytes) -> None:
        """Send all of ``data``."""
        try:
            await self._socket.send(data)
        except BROKEN:
            raise StreamClosed("the connection ended while bytes were sent; dial again") from None

    async def receive_exactly(self, nbytes: int, on_bytes: Callable[[int], None] | None = None) -> bytes:
        """Return the next ``nbytes``; the caller bounds them."""
        while len(self._held) < nbytes:
            try:
                self._wait_for_bytes(min(nbytes - len(self._held), _WORTH_WAKING))
                self._held += await self._socket.receive(_READ)
            except BROKEN:
                raise StreamClosed("the connection ended; dial again") from None
        taken = bytes(memoryview(self._held)[:nbytes])
        del self._held[:nbytes]
        return taken

    async def receive_message(self) -> bytes:
        """Return the next message: a u16 of its length, then as many bytes."""
        return await self.receive_exactly(int.from_bytes(await self.receive_exactly(2), "big"))

    async def send_message(self, message: bytes) -> None:
        """Send one message of at most 65,535 bytes."""
        await self.send(_frame(message))

    async def send_eof(self) -> None:
        """Say that nothing more comes."""
        try:
            await self._socket.send_eof()
        except (*BROKEN, NotImplementedError):
            return

    async def aclose(self) -> None:
        """Close the socket."""
        await close_now(self._socket)


def _least_to_wake_of(carrier: Socket) -> Callable[[int], None]:
    """Return what tells the system for how many bytes this process is to be woken; nothing where it takes no such word.

    The end of the connection wakes it, too.
    """
    told = 1

    def tell(nbytes: int) -> None:
        nonlocal told
        if nbytes != told:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, nbytes)
            told = nbytes

    if not isinstance(carrier, SocketStream):
        return lambda nbytes: None
    raw = carrier.extra(SocketAttribute.raw_socket)
    try:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, told)
    except (OSError, AttributeError):
        return lambda nbytes: None
    return tell


# Where the rate at which bytes arrive stands in Linux's ``struct tcp_info``: bytes/s, u64.
_DELIVERY_RATE, _TCP_INFO_NBYTES = 160, 168


def _delivery_rate_of(carrier: Socket) -> Callable[[], float | None]:
    """Return what tells the bytes per second that arrive at the other side, as the system measures them; None: not
    known, or not yet.

    How long a socket takes to have room says less: on a busy machine most of that is the wait for a processor.
    """

    def tell() -> float | None:
        try:
            told = raw.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_NBYTES)
        except OSError:  # it was closed
            return None
        if len(told) < _TCP_INFO_NBYTES:
            return None
        return float(int.from_bytes(told[_DELIVERY_RATE:], sys.byteorder)) or None

    if not isinstance(carrier, SocketStream) or sys.platform != "linux":
        return lambda: None
    raw = carrier.extra(SocketAttribute.raw_socket)
    return tell


def _hold_little_unsent(carrier: Socket) -> None:
    """Have the system take little beyond what is on its way, where it can: votes and answers wait behind that."""
    if isinstance(carrier, SocketStream) and hasattr(socket, "TCP_NOTSENT_LOWAT"):
        with suppress(OSError):
            raw = carrier.extra(SocketAttribute.raw_socket)
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT)


class Secured:
    """A connection to ``peer``, encrypted."""

    def __init__(self, plain: Plain, peer: PeerId, sending: Cipher, receiving: Cipher) -> None:
        self.peer = peer
        self._plain, self._sending, self._receiving = plain, sending, receiving
        self._held = b""

    async def send(self, *parts: bytes) -> None:
        """Send all of them, each in messages of its own; one caller at a time."""
        sealed: list[bytes] = []
        for part in parts:
            view = memoryview(part)
            for start in range(0, len(part), MOST_AT_ONCE):
                message = self._sending.seal(view[start : start + MOST_AT_ONCE])
                sealed += (len(message).to_bytes(2, "big"), message)
        await self._plain.send(b"".join(sealed))

    @property
    def rate(self) -> float | None:
        """Return the bytes per second that arrive at the other side; None: not known."""
        return self._plain.delivery_rate()

    async def receive(self) -> bytes:
        """Return what came next, at least one byte. PayloadError when it was altered on the way."""
        held, self._held = self._held, b""
        while not held:
            held = self._receiving.open(await self._plain.receive_message())
        return held

    async def receive_exactly(self, nbytes: int, on_bytes: Callable[[int], None] | None = None) -> bytes:
        """Return the next ``nbytes``; the caller bounds them."""
        data, self._held = self._held, b""
        while len(data) < nbytes:
            data += await self.receive()
        self._held = data[nbytes:]
        return data[:nbytes]

    async def send_eof(self) -> None:
        """Say that nothing more comes."""
        await self._plain.send_eof()

    async def aclose(self) -> None:
        """Close at once."""
        await self._plain.aclose()


async def secure_outbound(socket: Socket, signer: Signer, peer: PeerId | None) -> Secured:
    """Shake hands with the peer that was dialled; None: with whoever is there. PeerUnreachable when it is another."""
    plain, handshake = Plain(socket), Handshake(signer)
    await propose(plain, NOISE)
    await plain.send_message(handshake.hello())
    last, found, sending, receiving = handshake.finish(await plain.receive_message())
    if peer is not None and found != peer:
        raise PeerUnreachable(f"{peer_name(found)} answers in its place; ask for its new addresses")
    await plain.send_message(last)
    return Secured(plain, found, sending, receiving)


async def secure_inbound(socket: Socket, signer: Signer) -> Secured:
    """Shake hands with whoever dialled."""
    plain, handshake = Plain(socket), Handshake(signer)
    await answer(plain, (NOISE,))
    await plain.send_message(handshake.answer(await plain.receive_message()))
    return Secured(plain, *handshake.conclude(await plain.receive_message()))


async def close_now(socket: Socket) -> None:
    """Close without waiting for anything, also when cancelled."""
    with anyio.CancelScope(shield=True) as scope:
        scope.cancel()
        await socket.aclose()


def _frame(message: bytes) -> bytes:
    assert len(message) <= LONGEST, "cut by the caller"
    return len(message).to_bytes(2, "big") + message
