"""Many bodies in one direction on one stream, each answered when it is handled.

Crosses the wire: as in ``requests``, a little-endian u32 length before each body, and length 0 as the answer to each;
length 0 ends the sequence. Bodies on streams of their own would share the way and arrive together; in one stream they
arrive one after the other, and no more of them is under way than the window allows.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from decentral.transport.base import Stream, Transport
from decentral.transport.requests import HANDLED, Watch, open_stream, pushing, receive_body, receive_length, send_body
from decentral.transport.watchdog import Watchdog
from decentral.transport.window import Flight, Window
from decentral.wire.keys import PeerId

Send = Callable[[bytes], Awaitable[None]]
Take = Callable[[PeerId, bytes], Awaitable[None]]


@asynccontextmanager
async def sequence(
    transport: Transport,
    peer: PeerId,
    protocol: str,
    timeout: float,
    window: Window,
    on_handled: Callable[[int], None] = lambda nbytes: None,
) -> AsyncIterator[Send]:
    """What it yields sends one body when ``window`` allows it; leaving the block waits until all are handled.

    ``timeout``: seconds until there is a path. ``on_handled`` is told of the bytes of each body that the peer says it
    has handled, in order. Raises PeerUnreachable, and StreamClosed when the peer refused one or says nothing.
    """
    async with pushing(transport, protocol):
        with Flight(window, lambda: _answer(stream, protocol), on_handled) as flight:
            stream = await open_stream(transport, peer, protocol, timeout)

            async def send(body: bytes) -> None:
                await flight.begin(len(body))
                await send_body(stream, protocol, body)

            try:
                yield send
                await flight.land()
                await send_body(stream, protocol, b"")
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
        await send_body(stream, protocol, b"")
        return True

    async def attend(stream: Stream) -> None:
        while await one(stream):
            pass

    transport.serve(protocol, attend)


async def _answer(stream: Stream, protocol: str) -> None:
    with Watchdog(stream, protocol, HANDLED):
        await receive_length(stream, protocol, 0)
