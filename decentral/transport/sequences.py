"""Many bodies in one direction on one stream, each handled when it is there; then one empty answer.

Crosses the wire: as in ``requests``, a little-endian u32 length before each body; length 0 ends the sequence. Bodies on
streams of their own would share the way and arrive together; in one stream they arrive one after the other.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from decentral.transport.base import Stream, Transport
from decentral.transport.requests import Watch, ended, open_stream, pushing, receive_body, receive_length, send_body
from decentral.transport.watchdog import Watchdog
from decentral.wire.keys import PeerId

Send = Callable[[bytes], Awaitable[None]]
Take = Callable[[PeerId, bytes], Awaitable[None]]


@asynccontextmanager
async def sequence(transport: Transport, peer: PeerId, protocol: str, timeout: float) -> AsyncIterator[Send]:
    """What it yields sends one body; leaving the block waits until the peer has handled all.

    ``timeout``: seconds until there is a path. Raises TransportError.
    """
    async with pushing(transport, protocol):
        stream = await open_stream(transport, peer, protocol, timeout)
    try:
        yield lambda body: send_body(stream, protocol, body)
        await send_body(stream, protocol, b"")
        await receive_length(stream, protocol, 0)
    finally:
        await stream.aclose()


def serve_sequences(transport: Transport, protocol: str, take: Take, *, limit: int, watch: Watch) -> None:
    """Hand each body of at most ``limit`` bytes to ``take(peer, body)``, in order.

    ``watch(peer)`` is held while bodies come, and what it yields is told how many bytes came. An error of the package
    raised by ``take`` ends the stream.
    """

    async def one(stream: Stream) -> bool:
        with Watchdog(stream, protocol):
            nbytes = await receive_length(stream, protocol, limit)
        if not nbytes:
            return False
        async with transport.budget.bytes_of(stream.peer, nbytes):
            with watch(stream.peer) as on_bytes:
                body = await receive_body(stream, protocol, nbytes, on_bytes)
            await take(stream.peer, body)
        return True

    async def attend(stream: Stream) -> None:
        while await one(stream):
            pass
        await send_body(stream, protocol, b"")
        await ended(stream)

    transport.serve(protocol, attend)
