"""Many streams over one connection, each with a window that a slow reader holds shut. Knows no protocol names.

Crosses the wire: 12 bytes with every piece of at most 65,507, and 12 bytes back per half window that was read.

Who reads never waits for who writes, so two peers that send to each other at once cannot block each other. What is
queued is bounded: four parts of 64 KiB of all streams together and 32 of at most 8 KiB, because ``write`` waits its
turn; and a peer that has us pile up answers that it does not read loses the connection. Votes, commits and short
answers do not wait behind frames: up to 8 KiB go before the next piece, and pieces are as long as leave in a quarter of
a second. A window starts at the 256 KiB of the specification; one whose reader keeps pace grows, from a stock that all
connections share.

Source: hashicorp/yamux, spec.md; libp2p/specs, yamux/README.md (stream ids, windows).
"""

from __future__ import annotations

import logging
import math
import struct
from collections import deque
from collections.abc import Callable
from enum import IntFlag

import anyio
import anyio.abc
import anyio.lowlevel

from decentral.errors import PayloadError, PeerUnreachable, StreamClosed
from decentral.flow.waiting import Changes
from decentral.transport.base import Traffic
from decentral.transport.protocols.messages import receive_agreement
from decentral.transport.protocols.noise import Secured
from decentral.wire.keys import PeerId, peer_name

logger = logging.getLogger("decentral.transport")


PROTOCOL = "/yamux/1.0.0"
_HEADER = struct.Struct("!BBHII")  # version, type, flags, stream, length
_DATA, _WINDOW, _PING, _GO_AWAY = range(4)
_LARGEST = 65507  # bytes of a piece: with its header one Noise message
_SMALLEST, _TURN = 1 << 12, 0.25  # bytes of a piece at least, and s in which it should leave
_QUEUED = 4  # parts of 64 KiB of all streams together that wait for the socket
_FEW, _QUEUED_FEW = 1 << 13, 32  # bytes that go before the next piece (the commit of 40 peers), and how many such wait
_MOST_ANSWERS = 4096  # frames of 12 bytes that wait; a peer that makes more of them does not read
# streams of the other side at a time; those above the peer's budget are refused after their protocol is known
_INBOUND = 128
_LINGERING = 64  # streams closed here and not yet there
_DISCARDED = 1 << 24  # bytes in one piece for a stream that is gone; go-yamux's largest window
_PING_EVERY, _SILENT = 15.0, 40.0  # s: a dead path is found, and the NAT in between kept open
_LATELY = 20.0  # s since bytes came, at most, on a path that lives: a ping is answered within five


class Session:
    """The streams of one connection. ``run`` it in a task; it ends with the connection."""

    def __init__(
        self, secured: Secured, *, dialled: bool, stock: Stock, on_stream: Callable[[MuxedStream], None]
    ) -> None:
        self.peer = secured.peer
        self.dialled, self.ended = dialled, False
        self.stock, self.outgoing = stock, _Outgoing()
        self.leaving = False  # of either side: no new streams
        self.heard = -math.inf  # when bytes came last
        self.agreed = set[str]()  # the protocols that the other side has agreed to speak
        self._secured, self._on_stream = secured, on_stream
        self._next, self._theirs = (1, 0) if dialled else (2, 1)  # ours count on by two; theirs are odd or even
        self._streams: dict[int, MuxedStream] = {}
        self._inbound = 0
        self._lingering: dict[int, None] = {}
        self._over = anyio.Event()
        self._scope = anyio.CancelScope()

    @property
    def usable(self) -> bool:
        """Tell whether new streams may be opened."""
        return not (self.ended or self.leaving)

    def agrees(self, protocol: str) -> bool:
        """Tell whether the other side is there, and has agreed to speak ``protocol`` before."""
        return protocol in self.agreed and anyio.current_time() - self.heard < _LATELY

    @property
    def idle(self) -> bool:
        """Tell whether no stream is left on it."""
        return not self._streams

    @property
    def streams(self) -> tuple[MuxedStream, ...]:
        """The streams that have not ended."""
        return tuple(self._streams.values())

    @property
    def num_streams(self) -> int:
        """The number of streams that have not ended."""
        return len(self._streams)

    def stream(self, number: int) -> MuxedStream | None:
        """Return the stream of that number, if it has not ended."""
        return self._streams.get(number)

    def open(self) -> MuxedStream:
        """Return a new stream. The other side hears of it with the first bytes."""
        if not self.usable:
            raise StreamClosed("the connection ended; dial again")
        stream = self._add(self._next)
        self._next += 2
        self.answer(_WINDOW, Flags.SYN, stream.number)
        return stream

    def accept(self, number: int) -> None:
        """Take a stream that the other side opens, or refuse it. PayloadError for a number that it may not use."""
        if number in self._streams or number % 2 != self._theirs or not number:
            raise PayloadError(f"yamux: stream {number} cannot be opened from there; drop the connection")
        if self._inbound >= _INBOUND or self.leaving:
            self.answer(_WINDOW, Flags.RST, number)
            return
        self._inbound += 1
        stream = self._add(number)
        self.answer(_WINDOW, Flags.ACK, number)
        self._on_stream(stream)

    async def run(self) -> None:
        """Move bytes until the connection ends, however it does; then every stream has ended."""
        self.heard = anyio.current_time()
        try:
            with self._scope:
                async with anyio.create_task_group() as group:
                    group.start_soon(self.outgoing.write_forever, self._secured)
                    group.start_soon(self._ping_forever)
                    await _Incoming(self).read_forever(self._secured)
                    group.cancel_scope.cancel()
        finally:
            self._end()
            with anyio.CancelScope(shield=True):
                await self._secured.aclose()

    def abort(self) -> None:
        """End it at once."""
        self.leaving = True
        self._scope.cancel()

    async def until_over(self) -> None:
        """Wait until it has ended."""
        await self._over.wait()

    async def finish(self, timeout: float) -> None:
        """Let what is queued leave, then say that nothing more comes and let the other side close."""
        self.answer(_GO_AWAY, 0, 0)
        self.leaving = self.outgoing.finishing = True
        with anyio.move_on_after(timeout):
            await self.until_over()

    def answer(self, kind: int, flags: int, number: int, length: int = 0) -> None:
        """Queue a frame without data. The connection ends when the other side has us pile up more than it reads."""
        if not self.outgoing.answer(kind, flags, number, length):
            self.abort()

    # ---- the end of a stream ----

    def linger(self, stream: MuxedStream) -> None:
        """Keep a stream that is not read any more until the other side ends it, too."""
        self._lingering[stream.number] = None
        while len(self._lingering) > _LINGERING:
            self.reset(self._streams[next(iter(self._lingering))])

    def reset(self, stream: MuxedStream) -> None:
        """End both directions now."""
        if self._streams.get(stream.number) is stream:
            self.answer(_WINDOW, Flags.RST, stream.number)
            self.forget(stream)

    def forget(self, stream: MuxedStream) -> None:
        """Drop a stream of which both directions have ended."""
        if self._streams.pop(stream.number, None) is not None:
            self._lingering.pop(stream.number, None)
            self._inbound -= stream.number % 2 == self._theirs
            stream.gone()

    def _add(self, number: int) -> MuxedStream:
        stream = self._streams[number] = MuxedStream(self, number, self.stock, FIRST_WINDOW)
        return stream

    async def _ping_forever(self) -> None:
        """Find a path that died by its silence: TCP alone would wait for a quarter of an hour."""
        while anyio.current_time() - self.heard < _SILENT:
            self.answer(_PING, Flags.SYN, 0)
            await anyio.sleep(_PING_EVERY)
        self.abort()

    def _end(self) -> None:
        self.ended = True
        for stream in self.streams:
            self.forget(stream)
        self.outgoing.give_up()
        self._over.set()


class _Outgoing:
    """The frames that wait for the socket. In each batch go answers, then all with little data, then one piece of the
    rest, which comes in its turn; the end of a stream goes after its data.

    A frame of 571 kB to a peer with 2 Mbit/s, and four more to the same: the answers to what that one sent waited for
    8 s behind them, it took its line for half of what it is, and its next frame took twice as long.
    """

    def __init__(self) -> None:
        self.finishing = False  # nothing more is queued
        self._shut = False  # nothing more leaves
        self._answers: deque[bytes] = deque()
        self._few: deque[bytes] = deque()
        self._pieces: deque[tuple[MuxedStream, memoryview]] = deque()  # nothing: the end of the stream
        # first come, first served: no stream starves another
        self._slots, self._slots_of_few = anyio.Semaphore(_QUEUED), anyio.Semaphore(_QUEUED_FEW)
        self._taken_of_few = 0
        self._work = Changes()

    def answer(self, kind: int, flags: int, number: int, length: int) -> bool:
        """Queue a frame without data; False when too many wait already."""
        if len(self._answers) >= _MOST_ANSWERS:
            return False
        if not self._shut:
            self._answers.append(_HEADER.pack(0, kind, flags, number, length))
            self._work.tell()
        return True

    async def write(self, stream: MuxedStream, data: memoryview) -> int:
        """Queue as much of ``data`` as the window lets through, 64 KiB at most; return how much that was.

        One caller of a stream at a time.
        """
        is_little = len(data) <= _FEW and not stream.queued  # else it would be before what the stream sent first
        slots = self._slots_of_few if is_little else self._slots
        await slots.acquire()
        allowed = 0 if stream.send_ended else min(len(data), stream.send_window, _LARGEST)
        if not allowed:
            slots.release()
            return 0
        stream.send_window -= allowed
        if is_little:
            self._few.append(_HEADER.pack(0, _DATA, 0, stream.number, allowed) + data[:allowed])
            self._taken_of_few += 1
        else:
            self._queue(stream, bytes(data[:allowed]))
        self._work.tell()
        return allowed

    def end(self, stream: MuxedStream) -> None:
        """Queue the end of a stream, after its data."""
        if stream.queued:
            self._queue(stream, b"")
        else:
            self._few.append(_end_of(stream))
        self._work.tell()

    def give_up(self) -> None:
        """Wake streams that wait for their turn: they find that they have ended, and wake the next ones."""
        self._slots.release()
        self._slots_of_few.release()

    async def write_forever(self, secured: Secured) -> None:
        """Send what is queued, and then the end, once nothing more is."""
        try:
            while batch := await self._next_batch(secured):
                await secured.send(*batch)
            await secured.send_eof()
        except StreamClosed:
            self._shut = True  # what the other side sent before is still being read, and then its end

    async def _next_batch(self, secured: Secured) -> list[bytes]:
        """Return what goes next of what is queued; nothing once this side has finished."""
        while not self._answers and not self._few and not self._pieces:
            if self.finishing:
                self._shut = True
                return []
            await self._work.next()
        batch = [b"".join((*self._answers, *self._few))]
        self._answers.clear()
        self._few.clear()
        for _ in range(self._taken_of_few):
            self._slots_of_few.release()
        self._taken_of_few = 0
        if self._pieces:
            batch.append(self._next_piece(piece_at(secured.rate)))
        return batch

    def _queue(self, stream: MuxedStream, data: bytes) -> None:
        self._pieces.append((stream, memoryview(data)))
        stream.queued += 1

    def _next_piece(self, most: int) -> bytes:
        stream, data = self._pieces[0]
        piece, rest = data[:most], data[most:]
        if rest:
            self._pieces[0] = stream, rest
        else:
            self._pieces.popleft()
            stream.queued -= 1
        if not piece:
            return _end_of(stream)
        if not rest:
            self._slots.release()
        return _HEADER.pack(0, _DATA, 0, stream.number, len(piece)) + piece


def piece_at(rate: float | None) -> int:
    """Return the bytes of a piece that leaves in ``_TURN`` at so many bytes per second; None: not known."""
    return _LARGEST if rate is None else max(_SMALLEST, min(_LARGEST, int(rate * _TURN)))


def _end_of(stream: MuxedStream) -> bytes:
    return _HEADER.pack(0, _WINDOW, Flags.FIN, stream.number, 0)


class _Incoming:
    """The frames that come, taken apart and handed to the streams of ``session``."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._head = b""
        self._stream: MuxedStream | None = None  # whose data is coming
        self._missing, self._flags = 0, 0  # bytes of that data, and what the frame says after it

    async def read_forever(self, secured: Secured) -> None:
        """Read until the connection ends, or the other side breaks a rule."""
        try:
            while True:
                data = await secured.receive()
                self._session.heard = anyio.current_time()
                self._feed(data)
        except StreamClosed:
            return
        except PayloadError as error:
            logger.debug("%s: %s", peer_name(self._session.peer), error)

    def _feed(self, data: bytes) -> None:
        view, at = memoryview(data), 0
        while at < len(view):
            if self._missing:
                piece = view[at : at + self._missing]
                at += len(piece)
                self._take(piece)
                continue
            missing = _HEADER.size - len(self._head)
            self._head += view[at : at + missing]
            at += missing
            if len(self._head) == _HEADER.size:
                head, self._head = self._head, b""
                self._on_frame(*_HEADER.unpack(head))

    def _take(self, piece: memoryview) -> None:
        self._missing -= len(piece)
        if self._stream is not None:
            self._stream.take(piece)
        if not self._missing:
            self._on_flags(self._stream, self._flags)

    def _on_frame(self, version: int, kind: int, flags: int, number: int, length: int) -> None:
        session = self._session
        if version != 0 or kind > _GO_AWAY:
            raise PayloadError(f"yamux: version {version}, type {kind}; drop the connection")
        if kind == _PING:
            if flags & Flags.SYN:
                session.answer(_PING, Flags.ACK, 0, length)
        elif kind == _GO_AWAY:
            session.leaving = True  # what is under way ends first
        else:
            if flags & Flags.SYN:
                session.accept(number)
            self._on_stream_frame(kind, flags, session.stream(number), length)

    def _on_stream_frame(self, kind: int, flags: int, stream: MuxedStream | None, length: int) -> None:
        if kind == _WINDOW:
            if stream is not None:
                stream.widen(length)
            self._on_flags(stream, flags)
            return
        if length > (stream.receive_window if stream is not None else _DISCARDED):
            raise PayloadError(f"yamux: a piece of {length} bytes is more than its window; drop the connection")
        if stream is not None:
            stream.receive_window -= length
        self._stream, self._missing, self._flags = stream, length, flags
        if not length:
            self._on_flags(stream, flags)

    def _on_flags(self, stream: MuxedStream | None, flags: int) -> None:
        if stream is None or not flags & (Flags.FIN | Flags.RST):
            return
        if flags & Flags.RST:
            self._session.forget(stream)
        else:
            stream.end_there()


# ---- a stream and its windows ----
#
# A stream holds at most its window unread. It starts at 256 KiB; a reader that finds nothing left is faster than the
# window lets bytes come, so it doubles, up to 4 MiB, which is 80 MB/s over 50 ms. Who does not read keeps the first
# one.

FIRST_WINDOW = 1 << 18  # bytes; what both sides assume before a word was said
_WIDEST = 1 << 22  # bytes
_MOST_CREDIT = 1 << 31  # bytes that the other side may let us send; more is nonsense


class Flags(IntFlag):
    """The flags of a frame, about its stream."""

    SYN = 1
    ACK = 2
    FIN = 4
    RST = 8


class Stock:
    """Bytes by which the windows of all connections together may exceed their first size."""

    def __init__(self, nbytes: int) -> None:
        self.left = nbytes

    def lend(self, nbytes: int) -> int:
        """Lend all of ``nbytes`` or nothing."""
        lent = nbytes if nbytes <= self.left else 0
        self.left -= lent
        return lent


class MuxedStream:
    """Bytes both ways under one number: the window of each direction and the bytes that wait to be read."""

    def __init__(self, session: Session, number: int, stock: Stock, window: int) -> None:
        self.number = number
        self.send_window, self.receive_window = window, window
        self.queued = 0  # parts of it that wait for the socket, its end among them
        self.most_unread: int | None = None  # bytes, where less than the window is due; with more it is reset
        self._session, self._stock = session, stock
        self._window = window  # what the other side may have under way
        self._read = 0  # bytes since the last grant
        self._unread = bytearray()
        self._ended_here = self._closed_here = self._ended_there = self._gone = False
        self._changed = Changes()

    @property
    def send_ended(self) -> bool:
        """Tell whether nothing more can be sent."""
        return self._ended_here or self._gone

    @property
    def ended(self) -> bool:
        """Tell whether both directions have ended; what came before can still be read."""
        return self._gone

    @property
    def num_unread(self) -> int:
        """Bytes that came and nobody has taken yet."""
        return len(self._unread)

    async def until_ended(self) -> None:
        """Wait until both directions have ended."""
        while not self._gone:
            await self._changed.next()

    async def send(self, data: bytes | memoryview, on_sent: Callable[[int], None] = lambda nbytes: None) -> None:
        """Queue all of ``data``, waiting for the window; ``on_sent`` is told of each piece. StreamClosed."""
        await anyio.lowlevel.checkpoint()
        view = memoryview(data).cast("B")
        at = 0
        while at < len(view) or self.send_ended:
            if self.send_ended:
                raise StreamClosed(f"{at} of {len(view)} bytes were taken before the other side ended the stream")
            if not self.send_window:
                await self._changed.next()
                continue
            sent = await self._session.outgoing.write(self, view[at:])
            at += sent
            if not self.send_ended:
                on_sent(sent)

    async def receive(self, most: int) -> bytes:
        """Return what came, at most ``most`` bytes; nothing at the end."""
        while not self._unread:
            if self._ended_there or self._gone or self._closed_here:
                return b""
            await self._changed.next()
        data = bytes(memoryview(self._unread)[:most])
        del self._unread[:most]
        self._credit(len(data))
        return data

    def end(self) -> None:
        """Send nothing more, and read on: the other side may have more to say. Twice is no error."""
        if self.send_ended:
            return
        self._session.outgoing.end(self)
        self._ended_here = True
        if self._ended_there:
            self._session.forget(self)
        self._changed.tell()

    def close(self) -> None:
        """Send nothing more and read nothing more. Twice is no error."""
        if self._closed_here or self._gone:
            return
        if not self._ended_here:
            self._session.outgoing.end(self)
        self._session.linger(self)
        self._ended_here = self._closed_here = True
        if self._ended_there:
            self._session.forget(self)
        elif self._unread:
            self._session.reset(self)  # the other side is in the middle of something that nobody wants
        self._unread.clear()
        self._changed.tell()

    def reset(self) -> None:
        """End both directions at once."""
        self._session.reset(self)

    # ---- from the session ----

    def take(self, piece: memoryview) -> None:
        """Take bytes that came, within the window."""
        if self._gone:
            return
        if self._ended_there:
            raise PayloadError("yamux: bytes after the end of their stream; drop the connection")
        if self.most_unread is not None and len(self._unread) + len(piece) > self.most_unread:
            self._session.reset(self)
        elif not self._closed_here:
            self._unread += piece
            self._changed.tell()
        elif not self.receive_window:  # a last word is passed over; who talks on is told that nobody listens
            self._session.reset(self)

    def widen(self, nbytes: int) -> None:
        """Widen the window by what the other side lets us send."""
        self.send_window += nbytes
        if self.send_window > _MOST_CREDIT:
            raise PayloadError(f"yamux: a window of {self.send_window} bytes; drop the connection")
        self._changed.tell()

    def end_there(self) -> None:
        """Note that the other side sends nothing more."""
        self._ended_there = True
        if self._ended_here:
            self._session.forget(self)
        self._changed.tell()

    def gone(self) -> None:
        """Note that both directions have ended; what came whole can still be read."""
        self._gone = True
        self._stock.left += self._window - FIRST_WINDOW
        self._window = FIRST_WINDOW
        self._changed.tell()

    # ---- windows ----

    def _credit(self, nbytes: int) -> None:
        """Ask for as much as was read, in steps of half a window; for more when there is nothing left to read."""
        self._read += nbytes
        if self._ended_there or self._gone or 2 * self._read < self._window:
            return
        more = self._stock.lend(self._window) if not self._unread and self._window < _WIDEST else 0
        granted, self._read = self._read + more, 0
        self._window += more
        self.receive_window += granted
        self._session.answer(_WINDOW, 0, self.number, granted)  # lets the other side send as much


# ---- a stream as the rest of the package sees it ----
#
# Exact reads, counted bytes, and one error.

_PIECE = 1 << 18  # bytes taken from the stream at a time


class NativeStream:
    """A stream as the rest of the package sees it.

    Counts nothing while it has no ``traffic``: which protocol is spoken is no payload.
    """

    def __init__(self, peer: PeerId, muxed: MuxedStream) -> None:
        self.peer = peer
        self.traffic: Traffic | None = None
        self.muxed = muxed
        self.proposed: str | None = None  # a protocol, to which the other side's agreement is still to be received

    async def send(self, data: bytes | memoryview) -> None:
        """Send all of ``data``."""
        try:
            await self.muxed.send(data, self._sent)
        except StreamClosed as error:
            raise StreamClosed(f"{peer_name(self.peer)}: {error}") from None

    async def receive_exactly(self, nbytes: int, on_bytes: Callable[[int], None] | None = None) -> bytes:
        """Return the next ``nbytes``."""
        await anyio.lowlevel.checkpoint_if_cancelled()
        if self.proposed is not None:
            await self._receive_agreement(self.proposed)
        pieces, missing = [], nbytes
        while missing:
            piece = await self.muxed.receive(min(missing, _PIECE))
            if not piece:
                raise StreamClosed(
                    f"{peer_name(self.peer)}: {nbytes - missing} of {nbytes} bytes came before it ended the stream"
                )
            missing -= len(piece)
            pieces.append(piece)
            if self.traffic is not None:
                self.traffic.add(self.peer, received=len(piece))
            if on_bytes is not None:
                on_bytes(len(piece))
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    async def aclose(self) -> None:
        """Close; what was sent still arrives."""
        self.muxed.close()
        await anyio.lowlevel.checkpoint()

    def reset(self) -> None:
        """End both directions at once; what was sent may be lost."""
        self.muxed.reset()

    async def _receive_agreement(self, protocol: str) -> None:
        self.proposed = None
        try:
            await receive_agreement(NativeStream(self.peer, self.muxed), protocol)  # which is no payload
        except (PeerUnreachable, PayloadError) as error:
            raise StreamClosed(f"{peer_name(self.peer)}: {error}") from None

    def _sent(self, nbytes: int) -> None:
        if self.traffic is not None:
            self.traffic.add(self.peer, sent=nbytes)
