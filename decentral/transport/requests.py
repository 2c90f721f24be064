"""One body out, at most one body back, each on its own stream.

Crosses the wire: a little-endian u32 length before each body. Nothing is allocated for a length until it was
compared with the limit, and then only as the bytes come. A stream costs the daemon about 0.12 ms on loopback.

Time-outs are for waiting: for a path, and for an answer to begin. Bytes that move are never timed out, bytes that do
not are cut by the watchdog.

Who answers closes last: a daemon may lose the last bytes of what closes first (transport/daemon/stream.py).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext, suppress
from types import TracebackType

import anyio

from decentral.errors import PayloadError, PeerUnreachable, TransportError
from decentral.transport.base import UNREAD, Stream, Transport
from decentral.transport.letters import Letter, Letters, Respond, Watch
from decentral.transport.watchdog import SENDING_STALL, OnBytes, Watchdog
from decentral.wire.keys import PeerId, peer_name

PREFIX_NBYTES = 4
_RECEIVED_AT_ONCE = 1 << 20  # bytes asked of the stream at a time
_SMALLEST = 1 << 14  # bytes of the first piece sent
_LARGEST = 1 << 18  # bytes sent at a time: the daemon's measured best
HANDLED = 60.0  # s for which is waited to hear that a body was handled: buffers on the way may hold most of it
_QUICK, _SLOW = 0.25, 2.0  # s a piece may take before the next is no larger, or smaller: progress stays visible


async def request(
    transport: Transport, peer: PeerId, protocol: str, body: bytes, *, limit: int, timeout: float
) -> bytes:
    """Send ``body`` and wait for the answer of at most ``limit`` bytes.

    ``timeout``: seconds until there is a path, and again until the answer begins. PeerUnreachable when it does not,
    StreamClosed when the peer refused or bytes stood still, PayloadError when the answer is longer than the limit.
    """
    letters = transport.letters
    if letters is not None and letters.carry(protocol, len(body)):
        letter = await _post(letters, peer, protocol, body, timeout)
        try:
            with _Deadline(peer, protocol, timeout):
                return await letter.answer(limit)
        finally:
            await letter.close()
    stream = await open_stream(transport, peer, protocol, timeout)
    try:
        await send_body(stream, protocol, body)
        with _Deadline(peer, protocol, timeout):
            nbytes = await receive_length(stream, protocol, limit)
        return await receive_body(stream, protocol, nbytes, unwatched)
    finally:
        await stream.aclose()


async def notify(
    transport: Transport,
    peer: PeerId,
    protocol: str,
    body: bytes,
    timeout: float,
    *,
    on_handled: Callable[[], None] | None = None,
) -> None:
    """Send ``body`` and wait for no answer; ``timeout`` seconds until there is a path. Returning means sent, not read.

    ``on_handled`` is called when the peer says that it has handled the body; for that, it is waited a while.
    Raises as ``request`` does.
    """
    letters = transport.letters
    if letters is not None and letters.carry(protocol, len(body)):
        letter = await _post(letters, peer, protocol, body, timeout)
        try:
            with suppress(TransportError, PayloadError), anyio.move_on_after(HANDLED):
                if on_handled is not None:
                    await letter.answer(0)
                    on_handled()
        finally:
            await letter.close()
        return
    stream = await send(transport, peer, protocol, body, timeout)
    if on_handled is None:
        await stream.aclose()
        return
    with anyio.move_on_after(HANDLED):
        if await handled(stream, protocol):
            on_handled()


async def send(transport: Transport, peer: PeerId, protocol: str, body: bytes, timeout: float) -> Stream:
    """Send ``body``, as ``notify`` does; its stream, to be closed, or waited on until the body is ``handled``."""
    async with transport.pushing(protocol):
        stream = await open_stream(transport, peer, protocol, timeout)
        try:
            await send_body(stream, protocol, body)
        except BaseException:
            await stream.aclose()
            raise
    return stream


async def handled(stream: Stream, protocol: str) -> bool:
    """Wait until the peer says that it has handled the body that was sent, and close; False when it never will."""
    try:
        await receive_length(stream, protocol, 0)
    except (TransportError, PayloadError):
        return False
    finally:
        await stream.aclose()
    return True


def serve_requests(
    transport: Transport, protocol: str, handler: Respond, *, limit: int, watch: Watch | None = None
) -> None:
    """Answer each body of at most ``limit`` bytes with what ``handler(peer, body)`` returns.

    ``watch(peer)`` is held while a body comes and is handled, and what it yields is told how many bytes came.

    An error of the package raised by the handler ends the stream without an answer. Whoever notifies does not
    wait for the answer; it is dropped.
    """

    async def attend(stream: Stream) -> None:
        with Watchdog(stream, protocol):
            nbytes = await receive_length(stream, protocol, limit)
        async with transport.budget.bytes_of(stream.peer, nbytes):
            with nullcontext(unwatched) if watch is None else watch(stream.peer) as on_bytes:
                answer = await handler(stream.peer, await receive_body(stream, protocol, nbytes, on_bytes))
            await send_body(stream, protocol, answer)
        await ended(stream)

    transport.serve(protocol, attend)
    if transport.letters is not None:
        transport.letters.serve(protocol, handler, limit, watch)


async def ended(stream: Stream) -> None:
    """Wait until the other side, who has read the answer then, ends the stream."""
    with suppress(TransportError), anyio.move_on_after(UNREAD):
        await stream.receive_exactly(1)


async def _post(letters: Letters, peer: PeerId, protocol: str, body: bytes, timeout: float) -> Letter:
    with _Deadline(peer, protocol, timeout):
        letter = await letters.post(peer, protocol, body)
    return letter


async def open_stream(transport: Transport, peer: PeerId, protocol: str, timeout: float) -> Stream:
    """A stream to ``peer``. Raises PeerUnreachable when there is none within ``timeout`` seconds."""
    with _Deadline(peer, protocol, timeout):
        stream = await transport.open(peer, protocol)
    return stream


class _Deadline:
    """PeerUnreachable when the block it holds takes longer than ``timeout`` seconds."""

    __slots__ = ("_peer", "_protocol", "_scope", "_timeout")

    def __init__(self, peer: PeerId, protocol: str, timeout: float) -> None:
        self._peer, self._protocol, self._timeout = peer, protocol, timeout

    def __enter__(self) -> None:
        self._scope = anyio.CancelScope(deadline=anyio.current_time() + self._timeout)
        self._scope.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        swallowed = self._scope.__exit__(kind, error, trace)
        if self._scope.cancelled_caught:
            raise PeerUnreachable(
                f"{peer_name(self._peer)}: {self._protocol} was not done within {self._timeout:g} s; "
                "ask another peer or try again"
            ) from None
        return swallowed


async def send_body(stream: Stream, protocol: str, body: bytes) -> None:
    """Small pieces while they go slowly, so that the watchdog sees them move; large ones where that is faster."""
    if len(body) >= 1 << 32:
        raise PayloadError(f"a body of {len(body)} bytes: a length prefix holds less than 4 GiB; cut it in parts")
    prefix = len(body).to_bytes(PREFIX_NBYTES, "little")
    view, at, piece = memoryview(body), _SMALLEST, _SMALLEST
    with Watchdog(stream, protocol, SENDING_STALL) as on_bytes:
        await stream.send(prefix + body[:_SMALLEST])  # together: most bodies are one packet
        on_bytes(min(_SMALLEST, len(body)))
        while at < len(body):
            began = anyio.current_time()
            await stream.send(view[at : at + piece])
            on_bytes(min(piece, len(body) - at))
            at += piece
            took = anyio.current_time() - began
            if took < _QUICK:
                piece = min(2 * piece, _LARGEST)
            elif took > _SLOW:
                piece = max(piece // 2, _SMALLEST)


async def receive_length(stream: Stream, protocol: str, limit: int) -> int:
    """Bytes of the body that comes next. Raises PayloadError for more than ``limit``."""
    nbytes = int.from_bytes(await stream.receive_exactly(PREFIX_NBYTES), "little")
    if nbytes > limit:
        sender = peer_name(stream.peer)
        raise PayloadError(f"{protocol} from {sender}: {nbytes} bytes announced, at most {limit} taken; drop it")
    return nbytes


def unwatched(count: int) -> None:
    """Nobody wants to know."""


async def receive_body(stream: Stream, protocol: str, nbytes: int, watch: OnBytes) -> bytes:
    """So many bytes, cut when they stand still; ``watch`` is told how many came."""
    if not nbytes:  # most answers
        return b""
    pieces = []
    with Watchdog(stream, protocol) as moved:

        def on_bytes(count: int) -> None:
            moved(count)
            watch(count)

        for start in range(0, nbytes, _RECEIVED_AT_ONCE):
            pieces.append(await stream.receive_exactly(min(_RECEIVED_AT_ONCE, nbytes - start), on_bytes))
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)
