"""One body out, at most one body back, each on its own stream.

Crosses the wire: a little-endian u32 length before each body. Nothing is allocated for a length until it was
compared with the limit, and then only as the bytes come. A stream costs the daemon about 0.12 ms on loopback.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

import anyio

from decentral.errors import PayloadError, PeerUnreachable, StreamClosed
from decentral.transport.base import Stream, Transport
from decentral.wire.keys import PeerId, peer_name

PREFIX_NBYTES = 4
_PIECE = 1 << 20  # bytes; each must come within _STALL, so a trickling peer cannot hold a stream for long
_STALL = 30.0  # s; 1 MiB in that time is 0.28 Mbit/s, below any link that can take part

Respond = Callable[[PeerId, bytes], Awaitable[bytes]]


async def request(
    transport: Transport, peer: PeerId, protocol: str, body: bytes, *, limit: int, timeout: float
) -> bytes:
    """Send ``body`` and wait for the answer of at most ``limit`` bytes, ``timeout`` seconds in all.

    PeerUnreachable when it does not come in time, StreamClosed when the peer refused, PayloadError when the
    answer is longer than the limit.
    """
    with _deadline(peer, protocol, timeout):
        stream = await transport.open(peer, protocol)
        try:
            await _send_body(stream, body)
            return await _receive_body(stream, await _receive_length(stream, protocol, limit))
        finally:
            await stream.aclose()


async def notify(transport: Transport, peer: PeerId, protocol: str, body: bytes, timeout: float) -> None:
    """Send ``body`` and wait for no answer. Returning means sent, not read.

    Raises as ``request`` does.
    """
    with _deadline(peer, protocol, timeout):
        stream = await transport.open(peer, protocol)
        try:
            await _send_body(stream, body)
        finally:
            await stream.aclose()


def serve_requests(transport: Transport, protocol: str, handler: Respond, *, limit: int) -> None:
    """Answer each body of at most ``limit`` bytes with what ``handler(peer, body)`` returns.

    An error of the package raised by the handler ends the stream without an answer. Whoever notifies does not
    wait for the answer; it is dropped.
    """

    async def attend(stream: Stream) -> None:
        nbytes = await _receive_length(stream, protocol, limit, _STALL)
        async with transport.budget.bytes_of(stream.peer, nbytes):
            body = await _receive_body(stream, nbytes, _STALL)
            await _send_body(stream, await handler(stream.peer, body), _STALL)

    transport.serve(protocol, attend)


@contextmanager
def _deadline(peer: PeerId, protocol: str, timeout: float) -> Iterator[None]:
    try:
        with anyio.fail_after(timeout):
            yield
    except TimeoutError:
        raise PeerUnreachable(
            f"{peer_name(peer)}: {protocol} was not done within {timeout:g} s; ask another peer or try again"
        ) from None


async def _send_body(stream: Stream, body: bytes, stall: float | None = None) -> None:
    if len(body) >= 1 << 32:
        raise PayloadError(f"a body of {len(body)} bytes: a length prefix holds less than 4 GiB; cut it in parts")
    with _progress(stream, stall):
        await stream.send(len(body).to_bytes(PREFIX_NBYTES, "little"))
    view = memoryview(body)
    for start in range(0, len(body), _PIECE):
        with _progress(stream, stall):
            await stream.send(view[start : start + _PIECE])


async def _receive_length(stream: Stream, protocol: str, limit: int, stall: float | None = None) -> int:
    with _progress(stream, stall):
        nbytes = int.from_bytes(await stream.receive_exactly(PREFIX_NBYTES), "little")
    if nbytes > limit:
        sender = peer_name(stream.peer)
        raise PayloadError(f"{protocol} from {sender}: {nbytes} bytes announced, at most {limit} taken; drop it")
    return nbytes


async def _receive_body(stream: Stream, nbytes: int, stall: float | None = None) -> bytes:
    pieces = []
    for start in range(0, nbytes, _PIECE):
        with _progress(stream, stall):
            pieces.append(await stream.receive_exactly(min(_PIECE, nbytes - start)))
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


@contextmanager
def _progress(stream: Stream, stall: float | None) -> Iterator[None]:
    """Raise StreamClosed when the body of the ``with`` takes longer than ``stall`` seconds."""
    try:
        with anyio.fail_after(stall):
            yield
    except TimeoutError:
        raise StreamClosed(
            f"{peer_name(stream.peer)}: {_PIECE} bytes took longer than {stall:g} s; its stream is closed"
        ) from None
