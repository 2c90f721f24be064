"""One stream of a yamux session: the window of each direction and the bytes that wait to be read.

A stream holds at most its window unread. It starts at 256 KiB; a reader that finds nothing left is faster than the
window lets bytes come, so it doubles, up to 4 MiB, which is 80 MB/s over 50 ms. Who does not read keeps the first one.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntFlag
from typing import Protocol

import anyio
import anyio.lowlevel

from decentral.errors import PayloadError, StreamClosed
from decentral.flow.upload import Changes

FIRST_WINDOW = 1 << 18  # bytes; what both sides assume before a word was said
_WIDEST = 1 << 22  # bytes
_MOST_CREDIT = 1 << 31  # bytes that the other side may let us send; more is nonsense


class Flags(IntFlag):
    """What a frame says of its stream."""

    SYN = 1
    ACK = 2
    FIN = 4
    RST = 8


class Stock:
    """Bytes by which the windows of all connections together may exceed their first size."""

    def __init__(self, nbytes: int) -> None:
        self.left = nbytes

    def lend(self, nbytes: int) -> int:
        """All of ``nbytes`` or nothing."""
        lent = nbytes if nbytes <= self.left else 0
        self.left -= lent
        return lent


class Muxer(Protocol):
    """What a stream needs of its session."""

    async def write(self, stream: MuxedStream, data: memoryview) -> int:
        """Queue some of ``data``; returns how much."""
        ...

    def grant(self, stream: MuxedStream, nbytes: int) -> None:
        """Let the other side send more."""
        ...

    def end(self, stream: MuxedStream) -> None:
        """Nothing more comes from us."""
        ...

    def linger(self, stream: MuxedStream) -> None:
        """Nobody reads it any more; the other side has yet to end it."""
        ...

    def reset(self, stream: MuxedStream) -> None:
        """End both directions now."""
        ...

    def forget(self, stream: MuxedStream) -> None:
        """Both directions have ended."""
        ...


class MuxedStream:
    """Bytes both ways under one number."""

    def __init__(self, muxer: Muxer, number: int, stock: Stock, window: int) -> None:
        self.number = number
        self.send_window, self.receive_window = window, window
        self.most_unread: int | None = None  # bytes, where less than the window is due; with more it is reset
        self._muxer, self._stock = muxer, stock
        self._window = window  # what the other side may have under way
        self._read = 0  # bytes since the last grant
        self._unread = bytearray()
        self._ended_here = self._closed_here = self._ended_there = self._gone = False
        self._changed = Changes()

    @property
    def send_ended(self) -> bool:
        """Whether nothing more can be sent."""
        return self._ended_here or self._gone

    @property
    def ended(self) -> bool:
        """Whether both directions have ended; what came before can still be read."""
        return self._gone

    @property
    def num_unread(self) -> int:
        """Bytes that came and nobody has taken yet."""
        return len(self._unread)

    async def until_ended(self) -> None:
        """Wait until both directions have ended."""
        while not self._gone:
            await self._changed.next()

    async def send(self, data: bytes | memoryview, on_sent: Callable[[int], None]) -> None:
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
            sent = await self._muxer.write(self, view[at:])
            at += sent
            if not self.send_ended:
                on_sent(sent)

    async def receive(self, most: int) -> bytes:
        """What came, at most ``most`` bytes; nothing at the end."""
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
        self._muxer.end(self)
        self._ended_here = True
        if self._ended_there:
            self._muxer.forget(self)
        self._changed.tell()

    def close(self) -> None:
        """Send nothing more and read nothing more. Twice is no error."""
        if self._closed_here or self._gone:
            return
        if not self._ended_here:
            self._muxer.end(self)
        self._muxer.linger(self)
        self._ended_here = self._closed_here = True
        if self._ended_there:
            self._muxer.forget(self)
        elif self._unread:
            self._muxer.reset(self)  # the other side is in the middle of something that nobody wants
        self._unread.clear()
        self._changed.tell()

    def reset(self) -> None:
        """End both directions at once."""
        self._muxer.reset(self)

    # ---- from the session ----

    def arrived(self, piece: memoryview) -> None:
        """Bytes came, within the window."""
        if self._gone:
            return
        if self._ended_there:
            raise PayloadError("yamux: bytes after the end of their stream; drop the connection")
        if self.most_unread is not None and len(self._unread) + len(piece) > self.most_unread:
            self._muxer.reset(self)
        elif not self._closed_here:
            self._unread += piece
            self._changed.tell()
        elif not self.receive_window:  # a last word is passed over; who talks on is told that nobody listens
            self._muxer.reset(self)

    def widen(self, nbytes: int) -> None:
        """The other side lets us send more."""
        self.send_window += nbytes
        if self.send_window > _MOST_CREDIT:
            raise PayloadError(f"yamux: a window of {self.send_window} bytes; drop the connection")
        self._changed.tell()

    def ended_there(self) -> None:
        """The other side sends nothing more."""
        self._ended_there = True
        if self._ended_here:
            self._muxer.forget(self)
        self._changed.tell()

    def gone(self) -> None:
        """Both directions have ended; what came whole can still be read."""
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
        self._muxer.grant(self, granted)
