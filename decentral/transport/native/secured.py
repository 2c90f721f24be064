"""A TCP connection with proven ends: the Noise handshake over it, then encrypted messages both ways.

At most 320 KiB of it are held in this process: one read, and one message that is not whole yet.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import anyio

from decentral.errors import PeerUnreachable, StreamClosed
from decentral.transport.protocols.multistream import answer, propose
from decentral.transport.protocols.noise import LONGEST, MOST_AT_ONCE, Cipher, Handshake
from decentral.wire.keys import PeerId, Signer, peer_name

NOISE = "/noise"
_READ = 1 << 18  # bytes asked of the socket at a time
BROKEN = (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError, OSError)


class Socket(Protocol):
    """What carries the bytes: TCP, or a stream through a relay."""

    async def send(self, data: bytes, /) -> None:
        """Send all of ``data``."""
        ...

    async def receive(self, max_bytes: int = 65536, /) -> bytes:
        """What came next; EndOfStream."""
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

    async def send(self, data: bytes) -> None:
        """Send all of ``data``."""
        try:
            await self._socket.send(data)
        except BROKEN:
            raise StreamClosed("the connection ended while bytes were sent; dial again") from None

    async def receive_exactly(self, nbytes: int, on_bytes: Callable[[int], None] | None = None) -> bytes:
        """The next ``nbytes``; the caller bounds them."""
        while len(self._held) < nbytes:
            try:
                self._held += await self._socket.receive(_READ)
            except BROKEN:
                raise StreamClosed("the connection ended; dial again") from None
        taken = bytes(memoryview(self._held)[:nbytes])
        del self._held[:nbytes]
        return taken

    async def receive_message(self) -> bytes:
        """The next message: a u16 of its length, then as many bytes."""
        return await self.receive_exactly(int.from_bytes(await self.receive_exactly(2), "big"))

    async def send_message(self, message: bytes) -> None:
        """Send one message of at most 65,535 bytes."""
        await self.send(_framed(message))

    async def send_eof(self) -> None:
        """Say that nothing more comes."""
        try:
            await self._socket.send_eof()
        except (*BROKEN, NotImplementedError):
            return

    async def aclose(self) -> None:
        """Close the socket."""
        await close_now(self._socket)


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

    async def receive(self) -> bytes:
        """What came next, at least one byte. PayloadError when it was altered on the way."""
        held, self._held = self._held, b""
        while not held:
            held = self._receiving.open(await self._plain.receive_message())
        return held

    async def receive_exactly(self, nbytes: int, on_bytes: Callable[[int], None] | None = None) -> bytes:
        """The next ``nbytes``; the caller bounds them."""
        data = b""
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


def _framed(message: bytes) -> bytes:
    assert len(message) <= LONGEST, "cut by the caller"
    return len(message).to_bytes(2, "big") + message
