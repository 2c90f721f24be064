"""How many bytes may be on their way, unheard of, to all peers together: what the uplink carries in four seconds.

What the system's and the daemon's buffers have swallowed cannot be called back, and what follows on the same
connection waits behind it. At 2 Mbit/s a frame that was called off in round 2 arrived in round 7, and in three runs of
six no frame of that peer was ever in time. So bytes stay here until the other side has said that it
has those before.

Every stream has the same share and may always have one body under way, so a peer that takes nothing stops nobody else.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import anyio

# s of the uplink; with two, a gather of eight on equal lines took 14.5 s, with four 13.2, without any such limit 13.0
SECONDS = 4.0
FIRST = 1 << 16  # bytes of each stream while nothing is known of the uplink


class Window:
    """Of one peer. ``uplink`` tells bytes per second; None: not known."""

    def __init__(self, uplink: Callable[[], float | None]) -> None:
        self._uplink = uplink
        self.streams = 0  # that are open
        self.nbytes = 0  # under way on all of them

    def allows(self, nbytes: int, under_way: int) -> bool:
        """Whether a stream with so many bytes under way may send ``nbytes``."""
        rate = self._uplink()
        if rate is None:
            return under_way + nbytes <= FIRST
        most = SECONDS * rate
        return self.nbytes + nbytes <= most and under_way + nbytes <= most / self.streams


@dataclass(frozen=True, slots=True)
class Ack:
    """A body that the other side has handled; times of this peer's clock, as early as answers so far allow."""

    nbytes: int
    opened: float  # when the stream was open over there
    at: float


class InFlight:
    """What is under way on one stream; a context manager that is entered while the stream is open.

    An answer may wait for seconds behind what the other side sends, so it brings the time that the other side's clock
    shows. Of all answers the one that came fastest tells how far the clocks are apart.
    """

    def __init__(self, window: Window, hear: Callable[[], Awaitable[float]], heard: Callable[[Ack], None]) -> None:
        """``hear`` waits until the oldest body was handled, and returns the seconds since the stream was open there."""
        self._window, self._hear, self._heard = window, hear, heard
        self._bodies: deque[tuple[int, float]] = deque()  # bytes, and when they began to leave
        self._nbytes = 0
        self._began = self._opened = 0.0

    def __enter__(self) -> Self:
        self._window.streams += 1
        self._began, self._opened = anyio.current_time(), math.inf
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._window.streams -= 1
        self._window.nbytes -= self._nbytes

    async def begin(self, nbytes: int) -> None:
        """Wait until so many bytes may leave, and count them; at once when nothing is under way here."""
        while self._bodies and not self._window.allows(nbytes, self._nbytes):
            await self._land()
        self._bodies.append((nbytes, anyio.current_time()))
        self._count(nbytes)

    async def land(self) -> None:
        """Wait until all is handled."""
        while self._bodies:
            await self._land()

    async def _land(self) -> None:
        since, now = await self._hear(), anyio.current_time()
        self._opened = min(self._opened, max(now - since, self._began))
        nbytes, sent = self._bodies.popleft()
        self._count(-nbytes)
        self._heard(Ack(nbytes, self._opened, min(max(self._opened + since, sent), now)))

    def _count(self, nbytes: int) -> None:
        self._nbytes += nbytes
        self._window.nbytes += nbytes
