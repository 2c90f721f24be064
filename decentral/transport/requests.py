"""Bodies of bytes on streams: one out and at most one back, or many in a row.

Crosses the wire: a little-endian u32 length before each body. Nothing is allocated for a length until it was
compared with the limit, and then only as the bytes come. A stream is opened for the first of them and kept for the next
between members of a run (`KeptStreams`); on it each is answered before another is sent.

Time-outs are for waiting: for a path, and for an answer to begin. Bytes that move are never timed out, bytes that do
not are cut by the ``Watchdog``.

Who answers closes last: a daemon may lose the last bytes of what closes first (transport/daemon/control.py).
"""

from __future__ import annotations

import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, nullcontext, suppress
from types import TracebackType

import anyio

from decentral.errors import PayloadError, PeerUnreachable, StreamClosed, TransportError
from decentral.flow.budget import PIECE, Budget, Pace
from decentral.flow.pacing import Ack, InFlight, Window
from decentral.transport.base import UNREAD, Letter, Letters, OnBytes, Respond, Stream, Transport, Watch
from decentral.wire.keys import PeerId, peer_name

PREFIX_NBYTES = 4
_RECEIVED_AT_ONCE = 1 << 20  # bytes asked of the stream at a time
_SMALLEST = 1 << 14  # bytes of the first piece sent
_LARGEST = 1 << 18  # bytes sent at a time: the daemon's measured best
_SETTLED = 1.0  # s for which is waited for the end of an exchange that nobody waits for, so that its stream can be kept
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
    if (stream := _find_kept(transport, peer, protocol, body)) is not None:
        try:
            return await _ask(transport, stream, protocol, body, limit, timeout)
        except _StoodStill:
            raise
        except StreamClosed:  # it had ended meanwhile
            pass
    stream = await open_stream(transport, peer, protocol, timeout)
    return await _ask(transport, stream, protocol, body, limit, timeout)


def _find_kept(transport: Transport, peer: PeerId, protocol: str, body: bytes) -> Stream | None:
    """Find an open stream for a small body: it may have ended, and a large one would be sent twice then."""
    return transport.kept.take(peer, protocol) if len(body) <= _SMALLEST else None


async def _ask(transport: Transport, stream: Stream, protocol: str, body: bytes, limit: int, timeout: float) -> bytes:
    try:
        await send_body(stream, protocol, body)
        with _Deadline(stream.peer, protocol, timeout):
            nbytes = await receive_length(stream, protocol, limit)
        answer = await receive_body(stream, protocol, nbytes, ignore_count)
    except BaseException:
        await stream.aclose()
        raise
    await transport.kept.put(stream, protocol)
    return answer


async def notify(
    transport: Transport,
    peer: PeerId,
    protocol: str,
    body: bytes,
    timeout: float,
    *,
    on_handled: Callable[[], None] | None = None,
) -> None:
    """Send ``body`` and wait for no answer; ``timeout`` seconds until there is a path. Returning means sent, not read:
    a second is waited at most, so that the stream can be kept.

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
    kept, handled = _find_kept(transport, peer, protocol, body), False
    patience = HANDLED if on_handled is not None else _SETTLED if transport.kept.keeps(peer) else 0.0
    if kept is not None:
        try:
            stream = await send(transport, peer, protocol, body, timeout, kept)
            handled = await _is_handled(transport, stream, protocol, patience)
        except _StoodStill:
            raise
        except StreamClosed:  # it had ended meanwhile
            kept = None
    if kept is None:
        stream = await send(transport, peer, protocol, body, timeout)
        with suppress(StreamClosed):  # refused: who sent it has done its part
            handled = await _is_handled(transport, stream, protocol, patience)
    if handled and on_handled is not None:
        on_handled()


async def send(
    transport: Transport, peer: PeerId, protocol: str, body: bytes, timeout: float, kept: Stream | None = None
) -> Stream:
    """Send ``body``, as ``notify`` does; its stream, to be closed or waited on: `wait_until_handled`.

    ``kept``: one that is open already.
    """
    async with transport.pushing(protocol):
        stream = kept or await open_stream(transport, peer, protocol, timeout)
        try:
            await send_body(stream, protocol, body)
        except BaseException:
            await stream.aclose()
            raise
    return stream


async def _is_handled(transport: Transport, stream: Stream, protocol: str, patience: float) -> bool:
    """Wait ``patience`` s to hear that what was sent was handled; the stream is kept then, and closed else."""
    handled = False
    try:
        if patience:
            with anyio.move_on_after(patience), suppress(PayloadError):
                await receive_length(stream, protocol, 0)
                handled = True
    finally:
        if not handled:
            await stream.aclose()
    if handled:
        await transport.kept.put(stream, protocol)
    return handled


async def wait_until_handled(stream: Stream, protocol: str) -> bool:
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

    async def attend_one(stream: Stream, nbytes: int) -> int | None:
        async with transport.budget.bytes_of(stream.peer, nbytes):
            with nullcontext(ignore_count) if watch is None else watch(stream.peer) as on_bytes:
                answer = await handler(stream.peer, await receive_body(stream, protocol, nbytes, on_bytes))
        async with transport.budget.answering(stream.peer, len(answer)) as pace:
            await send_body(stream, protocol, answer, pace)
            if not transport.budget.comes_first(stream.peer):
                await wait_for_end(stream)
                return None
        return await _wait_for_next(transport.budget, stream, protocol, limit)

    async def attend(stream: Stream) -> None:
        with Watchdog(stream, protocol):
            nbytes: int | None = await receive_length(stream, protocol, limit)
        while nbytes is not None:
            nbytes = await attend_one(stream, nbytes)

    transport.serve(protocol, attend)
    if transport.letters is not None:
        transport.letters.serve(protocol, handler, limit, watch)


async def _wait_for_next(budget: Budget, stream: Stream, protocol: str, limit: int) -> int | None:
    """Wait for another body on the stream of a member, and return its length; None when there is none."""
    with budget.resting(stream.peer, UNREAD), suppress(StreamClosed):
        return await receive_length(stream, protocol, limit)
    return None


async def wait_for_end(stream: Stream) -> None:
    """Wait until the other side, who has read the answer then, ends the stream."""
    with suppress(TransportError), anyio.move_on_after(UNREAD):
        await stream.receive_exactly(1)


async def _post(letters: Letters, peer: PeerId, protocol: str, body: bytes, timeout: float) -> Letter:
    with _Deadline(peer, protocol, timeout):
        letter = await letters.post(peer, protocol, body)
    return letter


async def open_stream(transport: Transport, peer: PeerId, protocol: str, timeout: float) -> Stream:
    """Open a stream to ``peer``. Raises PeerUnreachable when there is none within ``timeout`` seconds."""
    with _Deadline(peer, protocol, timeout):
        stream = await transport.open(peer, protocol)
    return stream


class _Deadline:
    """A deadline: PeerUnreachable when the block it holds takes longer than ``timeout`` seconds."""

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


async def send_body(stream: Stream, protocol: str, body: bytes, pace: Pace | None = None) -> None:
    """Send small pieces while they go slowly, so that the watchdog sees them move; large ones where that is faster.

    With a ``pace``, which each piece waits for, they stay small.
    """
    if len(body) >= 1 << 32:
        raise PayloadError(f"a body of {len(body)} bytes: a length prefix holds less than 4 GiB; cut it in parts")
    prefix = len(body).to_bytes(PREFIX_NBYTES, "little")
    largest = _LARGEST if pace is None else PIECE
    view, at, piece = memoryview(body), _SMALLEST, _SMALLEST
    with Watchdog(stream, protocol, SENDING_STALL) as on_bytes:
        if pace is not None:
            await pace(min(_SMALLEST, len(body)))
        await stream.send(prefix + body[:_SMALLEST])  # together: most bodies are one packet
        on_bytes(min(_SMALLEST, len(body)))
        while at < len(body):
            if pace is not None:
                await pace(min(piece, len(body) - at))
            began = anyio.current_time()
            await stream.send(view[at : at + piece])
            on_bytes(min(piece, len(body) - at))
            at += piece
            took = anyio.current_time() - began
            if took < _QUICK:
                piece = min(2 * piece, largest)
            elif took > _SLOW:
                piece = max(piece // 2, _SMALLEST)


async def receive_length(stream: Stream, protocol: str, limit: int) -> int:
    """Receive how many bytes the next body has. Raises PayloadError for more than ``limit``."""
    nbytes = int.from_bytes(await stream.receive_exactly(PREFIX_NBYTES), "little")
    if nbytes > limit:
        sender = peer_name(stream.peer)
        raise PayloadError(f"{protocol} from {sender}: {nbytes} bytes announced, at most {limit} taken; drop it")
    return nbytes


def ignore_count(count: int) -> None:
    """Do nothing: nobody wants to know."""


async def receive_body(stream: Stream, protocol: str, nbytes: int, watch: OnBytes) -> bytes:
    """Receive so many bytes, cut when they stand still; ``watch`` is told how many came."""
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


# ---- many bodies on one stream ----
#
# All in one direction, each answered when it is handled.
#
# Crosses the wire: a length before each body, as with one; the answer to each is a body of 8 bytes, u64 microseconds
# since the stream was open over there; length 0 ends the sequence. Bodies on streams of their own would share the way
# and arrive together; in one stream they arrive one after the other, and no more of them is under way than the window
# allows.

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
    """Yield a function that sends one body when ``window`` allows it; leaving the block waits until all are handled.

    ``timeout``: seconds until there is a path. ``on_handled`` is told of each body that the peer says it has
    handled, in order. Raises PeerUnreachable, and StreamClosed when the peer refused one or says nothing.
    """
    async with transport.pushing(protocol):
        with InFlight(window, lambda: _receive_stamp(stream, protocol), on_handled) as flight:
            stream = await open_stream(transport, peer, protocol, timeout)

            async def send_next(body: bytes) -> None:
                await flight.begin(len(body))
                await send_body(stream, protocol, body)

            try:
                yield send_next
                await flight.land()
                await send_body(stream, protocol, b"")
            finally:
                await stream.aclose()


def serve_sequences(transport: Transport, protocol: str, take: Take, *, limit: int, watch: Watch) -> None:
    """Hand each body of at most ``limit`` bytes to ``take(peer, body)``, in order.

    ``watch(peer)`` is held while bodies come, and what it yields is told how many bytes came. An error of the package
    raised by ``take`` ends the stream.
    """

    async def take_one(stream: Stream, opened: float) -> bool:
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
        while await take_one(stream, opened):
            pass

    transport.serve(protocol, attend)


async def _receive_stamp(stream: Stream, protocol: str) -> float:
    """Receive the seconds since the stream was open over there, as the answer to a body says."""
    with Watchdog(stream, protocol, HANDLED):
        nbytes = await receive_length(stream, protocol, _STAMP.size)
    if nbytes != _STAMP.size:
        raise PayloadError(f"{protocol}: an answer of {nbytes} bytes, want {_STAMP.size}; drop it")
    return float(_STAMP.unpack(await receive_body(stream, protocol, nbytes, ignore_count))[0]) / 1e6


# ---- the watchdog ----
#
# It cuts a transfer in which nothing moves, or too little over all; never one that is merely long. A frame of 100 MB
# takes 160 s over 5 Mbit/s and is fine. Ten seconds in which no byte comes are not: the path is dead. A byte every nine
# seconds is not either: it would hold a stream, and the memory of a body, for as long as it likes.
#
# Time that this peer's own cap on bandwidth takes is left out: who is slow then is not the other side.

STALL = 10.0  # s without a byte: a lost packet costs TCP about one, a change of route seldom more than five
# s without a byte taken: a reader lets the daemon's sender go on every 460 kB or so, as the muxer tells of room in
# large steps (measured: at 32 kB/s 14 to 22 s), and that the path is dead is seen by who waits for the bytes
SENDING_STALL = 30.0
GRACE = 30.0  # s before the least rate counts: slow start, a short outage
LEAST_RATE = 4096  # bytes/s over all: a fifth of what one of 64 pushes at once gets of a 10 Mbit/s uplink


class _StoodStill(StreamClosed):
    """A transfer was cut: trying it once more would take as long again."""


class Watchdog:
    """Cut the block it holds with StreamClosed when no byte moved for ``stall`` seconds, or fewer than ``LEAST_RATE``
    a second after ``GRACE``. Call what it yields with every number of bytes that moved.
    """

    __slots__ = ("_began", "_held_at", "_moved", "_scope", "_stall", "_stream", "_what")

    def __init__(self, stream: Stream, what: str, stall: float = STALL) -> None:
        self._stream, self._what, self._stall, self._moved = stream, what, stall, 0
        self._held_at: float | None = None

    def __enter__(self) -> OnBytes:
        self._began = anyio.current_time()
        self._scope = anyio.CancelScope(deadline=self._began + self._stall)
        self._scope.__enter__()
        if isinstance(self._stream, Holdable):
            self._stream.watchdogs.append(self)
        return self._on_bytes

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        if isinstance(self._stream, Holdable):
            self._stream.watchdogs.remove(self)
        swallowed = self._scope.__exit__(kind, error, trace)
        if self._scope.cancelled_caught:
            raise _StoodStill(
                f"{peer_name(self._stream.peer)}: {self._what} stood still for {self._stall:g} s, or crept, after "
                f"{self._moved} bytes in {anyio.current_time() - self._began:.0f} s; ask another peer or try again"
            ) from None
        return swallowed

    def hold(self) -> None:
        """Stand still: what comes now is this peer's own doing."""
        self._held_at = anyio.current_time()
        self._scope.deadline = float("inf")

    def go_on(self) -> None:
        """Go on as if no time had passed since ``hold``."""
        assert self._held_at is not None, "after hold"
        self._began += anyio.current_time() - self._held_at
        self._held_at = None
        self._on_bytes(0)

    def _on_bytes(self, count: int) -> None:
        self._moved += count
        if self._held_at is not None:
            return
        due = self._began + GRACE + self._moved / LEAST_RATE
        self._scope.deadline = min(anyio.current_time() + self._stall, due)


class Holdable:
    """A stream that this peer may hold up itself."""

    def __init__(self) -> None:
        self.watchdogs: list[Watchdog] = []

    @contextmanager
    def held(self) -> Iterator[None]:
        """Have its watchdogs stand still in this block."""
        watchdogs = tuple(self.watchdogs)
        for watchdog in watchdogs:
            watchdog.hold()
        try:
            yield
        finally:
            for watchdog in watchdogs:
                watchdog.go_on()
