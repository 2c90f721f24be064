"""Many bodies in one direction on one stream, each answered when it is handled.

Crosses the wire: as in ``requests``, a little-endian u32 length before each body; the answer to each is a body of 8
bytes, u64 microseconds since the stream was open over there; length 0 ends the sequence. Bodies on streams of their own
would share the way and arrive together; in one stream they arrive one after the other, and no more of them is under way
than the window allows.
"""

from __future__ import annotations

import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import anyio

from decentral.errors import PayloadError
from decentral.flow.schedule import Ack, InFlight, Window
from decentral.transport.base import Stream, Transport
from decentral.transport.letters import Watch
from decentral.transport.requests import (
    HANDLED,
    open_stream,
    receive_body,
    receive_length,
    send_body,
    unwatched,
)
from decentral.transport.watchdog import Watchdog
from decentral.wire.keys import PeerId

Send = Callable[[bytes], Awaitable[None]]
Take = Callable[[PeerId, bytes], Awaitable[None]]

_STAMP = struct.Struct("<Q")


@asynccontextmanager
async def sequence(
    transport: Transport,
    peer: PeerId,
    protocol: str,
    timeout: float,
    window: Window,
    on_handled: Callable[[Ack], None] = lambda landing: None,
) -> AsyncIterator[Send]:
    """What it yields sends one body when ``window`` allows it; leaving the block waits until all are handled.

    ``timeout``: seconds until there is a path. ``on_handled`` is told of each body that the peer says it has
    handled, in order. Raises PeerUnreachable, and StreamClosed when the peer refused one or says nothing.
    """
    async with transport.pushing(protocol):
        with InFlight(window, lambda: _answer(stream, protocol), on_handled) as flight:
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

    async def one(stream: Stream, opened: float) -> bool:
        with Watchdog(stream, protocol):
            nbytes = await receive_length(stream, protocol, limit)
        if not nbytes:
            return False
        async with transport.budget.bytes_of(stream.peer, nbytes):
            with watch(stream.peer) as on_bytes:
                body = await receive_body(stream, protocol, nbytes, on_bytes)
            await take(stream.peer, body)
        await send_body(stream, protocol, _STAMP.pack(int(1e6 * (anyio.current_time() - opened))))
        return True

    async def attend(stream: Stream) -> None:
        opened = anyio.current_time()
        while await one(stream, opened):
            pass

    transport.serve(protocol, attend)


async def _answer(stream: Stream, protocol: str) -> float:
    with Watchdog(stream, protocol, HANDLED):
        nbytes = await receive_length(stream, protocol, _STAMP.size)
    if nbytes != _STAMP.size:
        raise PayloadError(f"{protocol}: an answer of {nbytes} bytes, want {_STAMP.size}; drop it")
    return float(_STAMP.unpack(await receive_body(stream, protocol, nbytes, unwatched))[0]) / 1e6
