"""One direction of a simulated stream: a bounded queue of pieces, each with the time it may be read."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import anyio
import anyio.lowlevel

from decentral.errors import StreamClosed
from decentral.flow.schedule import SECONDS
from decentral.flow.upload import Changes

WINDOW = 1 << 20  # bytes in flight per stream; where the daemon's senders were measured to block
PIECE = 1 << 16  # bytes
# s of a line that a piece takes at most: what is written next to it waits that long. TCP begins with ten packets. With
# three pieces of half a second before the plan of a reduce, rounds at 1 Mbit/s took 13 % longer than real ones.
PIECE_SECONDS = 0.1
PACKET = 1460  # bytes, the least piece
_NEVER = float("inf")


@dataclass(frozen=True, slots=True)
class Weight:
    """How many bytes the bytes of a stream stand for: the first ``plain`` for themselves, each other for ``each``."""

    each: float = 1.0
    plain: int = 0

    def of(self, start: int, count: int) -> float:
        """What ``count`` bytes from the ``start``-th on stand for."""
        plain = min(count, max(0, self.plain - start))
        return plain + (count - plain) * self.each


AS_THEY_ARE = Weight()


@dataclass(slots=True)
class Link:
    """A way between peers that takes one piece after the other."""

    latency: float = 0.0  # s, one way
    bandwidth: float | None = None  # bytes/s; None: no limit
    free_at: float = 0.0  # s, on the loop's clock: when the last piece will have left

    @property
    def piece(self) -> float:
        """The largest piece, in bytes."""
        return PIECE if self.bandwidth is None else min(PIECE, max(PACKET, PIECE_SECONDS * self.bandwidth))

    def arrival(self, nbytes: float, now: float) -> float:
        """Put ``nbytes`` on the link; returns when the last of them arrives."""
        self.free_at = max(self.free_at, now) + (nbytes / self.bandwidth if self.bandwidth else 0.0)
        return self.free_at + self.latency


@dataclass(slots=True)
class TimedPiece:
    """Bytes on their way."""

    data: memoryview
    nbytes: float  # that it takes on the links
    reaches: float  # s: when it is at the receiver's downlink
    ready: float | None = None  # s: when it is through; None: nobody knows yet who else is ahead of it
    soonest: float = 0.0  # s: when it is through if nobody is

    @property
    def due(self) -> float:
        """When to look whether it is through."""
        return self.soonest if self.ready is None else self.ready


@dataclass(slots=True)
class Downlink:
    """What one peer can receive over all its streams: pieces pass in the order in which they reach it.

    A piece written first may reach it last, so its turn is decided when it is there and not when it is written.
    """

    bandwidth: float | None = None  # bytes/s; None: no limit
    free_at: float = 0.0  # s
    _coming: list[tuple[float, int, TimedPiece]] = field(default_factory=list)
    _count: int = 0

    def expect(self, piece: TimedPiece, now: float) -> None:
        """A piece was sent."""
        if self.bandwidth is None:
            piece.ready = piece.reaches
            return
        piece.soonest = piece.reaches + piece.nbytes / self.bandwidth
        heapq.heappush(self._coming, (piece.reaches, self._count, piece))
        self._count += 1
        self.settle(now)

    def settle(self, now: float) -> None:
        """Give every piece that has reached the downlink by now its turn."""
        while self._coming and self._coming[0][0] <= now:
            reaches, _, piece = heapq.heappop(self._coming)
            took = piece.nbytes / self.bandwidth if self.bandwidth else 0.0
            piece.ready = self.free_at = max(self.free_at, reaches) + took


class Pipe:
    """Bytes one way. Both sides wait on one event, renewed at every change that one of them may wait for."""

    def __init__(self, link: Link, downlink: Downlink, jitter: Callable[[], float], weight: Weight) -> None:
        self._link, self._downlink, self._jitter, self._weight = link, downlink, jitter, weight
        self._pieces: deque[TimedPiece] = deque()
        self.written = self.read_so_far = 0  # bytes, as they are
        self._held = 0.0
        self._last = 0.0
        self._changed = Changes()
        self._ended = self._refused = self._severed = False

    @property
    def over(self) -> bool:
        """Whether nothing can come through any more."""
        return self._severed or self._refused or (self._ended and not self._pieces)

    async def write(self, data: bytes | memoryview) -> None:
        """Queue a copy of ``data``, waiting while a window of it is unread."""
        await anyio.lowlevel.checkpoint_if_cancelled()
        view = memoryview(data).cast("B")
        size = max(1, int(self._link.piece / self._weight.each))
        for start in range(0, len(view), size):
            while self._held >= WINDOW and not self._dead:
                await self._changed.next()
            if self._dead:
                raise StreamClosed(f"{start} of {len(view)} bytes were taken before the other side ended the stream")
            self._put(bytes(view[start : start + size]))
            if self._weight.each != 1.0:
                await self._share_the_line()

    async def _share_the_line(self) -> None:
        """Frames that a line takes seconds for leave side by side, and leave room for leases and votes: real ones stay
        with their sender while so much is under way.
        """
        await anyio.sleep(max(0.0, self._link.free_at - anyio.current_time() - SECONDS))

    async def read(self, nbytes: int, on_bytes: Callable[[int], None] | None = None) -> bytes:
        """The next ``nbytes``; StreamClosed when the pipe ends before."""
        await anyio.lowlevel.checkpoint_if_cancelled()
        taken: list[memoryview] = []
        missing = nbytes
        while missing:
            await self._wait_for_a_piece(nbytes - missing, nbytes)
            piece = self._take(missing)
            missing -= len(piece)
            taken.append(piece)
            if on_bytes is not None:
                on_bytes(len(piece))
        return b"".join(taken)

    def end(self) -> None:
        """The writer is done; what is queued still arrives."""
        self._ended = True
        self._changed.tell()

    def refuse(self) -> None:
        """The reader is gone: further writes fail and what is queued is dropped."""
        self._refused = True
        self._pieces.clear()
        self._changed.tell()

    def sever(self) -> None:
        """The link broke: both sides fail and what is queued is lost."""
        self._severed = True
        self._pieces.clear()
        self._changed.tell()

    @property
    def _dead(self) -> bool:
        return self._severed or self._refused or self._ended

    def _put(self, piece: bytes) -> None:
        now = anyio.current_time()
        nbytes = self._weight.of(self.written, len(piece))
        self.written += len(piece)
        arrival = self._link.arrival(nbytes, now) + self._jitter()
        self._last = max(self._last, arrival)  # jitter never reorders a stream
        sent = TimedPiece(memoryview(piece), nbytes, self._last)
        self._downlink.expect(sent, now)
        self._pieces.append(sent)
        self._held += nbytes
        if len(self._pieces) == 1:
            self._changed.tell()

    def _take(self, most: int) -> memoryview:
        piece = self._pieces[0]
        taken, piece.data = piece.data[:most], piece.data[most:]
        if not piece.data:
            self._pieces.popleft()
        if self._held >= WINDOW:
            self._changed.tell()
        self._held -= self._weight.of(self.read_so_far, len(taken))
        self.read_so_far += len(taken)
        return taken

    async def _wait_for_a_piece(self, come: int, nbytes: int) -> None:
        while (due := self._due()) > anyio.current_time():
            if self._severed or self._refused or (self._ended and not self._pieces):
                raise StreamClosed(f"{come} of {nbytes} bytes came before the stream ended")
            if due == _NEVER:
                await self._changed.next()
                continue
            with anyio.CancelScope(deadline=due):
                await self._changed.next()

    def _due(self) -> float:
        """When to look again: the first piece is ready, or may be, or was not sent yet."""
        if not self._pieces:
            return _NEVER
        self._downlink.settle(anyio.current_time())
        return self._pieces[0].due
