"""One direction of a simulated stream: a bounded queue of pieces, each with the time it may be read."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import anyio
import anyio.lowlevel

from decentral.errors import StreamClosed

WINDOW = 1 << 20  # bytes in flight per stream; where the daemon's senders were measured to block
_PIECE = 1 << 16  # bytes


@dataclass(slots=True)
class Link:
    """A way between peers that takes one piece after the other."""

    latency: float = 0.0  # s, one way
    bandwidth: float | None = None  # bytes/s; None: no limit
    free_at: float = 0.0  # s, on the loop's clock: when the last piece will have left

    def arrival(self, nbytes: int, now: float) -> float:
        """Put ``nbytes`` on the link; returns when the last of them arrives."""
        self.free_at = max(self.free_at, now) + (nbytes / self.bandwidth if self.bandwidth else 0.0)
        return self.free_at + self.latency


class Pipe:
    """Bytes one way. Both sides wait on one event, renewed at every change."""

    def __init__(self, link: Link, jitter: Callable[[], float]) -> None:
        self._link, self._jitter = link, jitter
        self._pieces: deque[tuple[float, memoryview]] = deque()
        self._held = 0
        self._last = 0.0
        self._changed = anyio.Event()
        self._ended = self._refused = self._severed = False

    @property
    def over(self) -> bool:
        """Whether nothing can come through any more."""
        return self._severed or self._refused or (self._ended and not self._pieces)

    async def write(self, data: bytes | memoryview) -> None:
        """Queue a copy of ``data``, waiting while a window of it is unread."""
        await anyio.lowlevel.checkpoint()
        view = memoryview(data).cast("B")
        for start in range(0, len(view), _PIECE):
            while self._held >= WINDOW and not self._dead:
                await self._changed.wait()
            if self._dead:
                raise StreamClosed(f"{start} of {len(view)} bytes were taken before the other side ended the stream")
            self._put(bytes(view[start : start + _PIECE]))

    async def read(self, nbytes: int, on_bytes: Callable[[int], None] | None = None) -> bytes:
        """The next ``nbytes``; StreamClosed when the pipe ends before."""
        await anyio.lowlevel.checkpoint()
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
        self._wake()

    def refuse(self) -> None:
        """The reader is gone: further writes fail and what is queued is dropped."""
        self._refused = True
        self._pieces.clear()
        self._wake()

    def sever(self) -> None:
        """The link broke: both sides fail and what is queued is lost."""
        self._severed = True
        self._pieces.clear()
        self._wake()

    @property
    def _dead(self) -> bool:
        return self._severed or self._refused or self._ended

    def _put(self, piece: bytes) -> None:
        arrival = self._link.arrival(len(piece), anyio.current_time()) + self._jitter()
        self._last = max(self._last, arrival)  # jitter never reorders a stream
        self._pieces.append((self._last, memoryview(piece)))
        self._held += len(piece)
        self._wake()

    def _take(self, most: int) -> memoryview:
        ready, piece = self._pieces.popleft()
        if len(piece) > most:
            self._pieces.appendleft((ready, piece[most:]))
        self._held -= min(len(piece), most)
        self._wake()
        return piece[:most]

    async def _wait_for_a_piece(self, come: int, nbytes: int) -> None:
        while not self._pieces or self._pieces[0][0] > anyio.current_time():
            if self._severed or self._refused or (self._ended and not self._pieces):
                raise StreamClosed(f"{come} of {nbytes} bytes came before the stream ended")
            wake_at = self._pieces[0][0] if self._pieces else float("inf")
            with anyio.CancelScope(deadline=wake_at):
                await self._changed.wait()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()
