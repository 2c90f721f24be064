"""How many bytes may be on their way, unheard of, to all peers together: what the uplink carries in four seconds.

What the system's and the daemon's buffers have swallowed cannot be called back, and what follows on the same
connection waits behind it. At 2 Mbit/s a frame that was called off in round 2 arrived in round 7, and in three runs of
six no frame of that peer was ever in time. So bytes stay here until the other side has said that it
has those before.

Every stream has the same share and may always have one body under way, so a peer that takes nothing stops nobody else.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Self

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


class Flight:
    """What is under way on one stream; a context manager that is entered while the stream is open."""

    def __init__(self, window: Window, hear: Callable[[], Awaitable[object]], heard: Callable[[int], None]) -> None:
        """``hear`` waits until the oldest body was handled; ``heard`` is told of its bytes then."""
        self._window, self._hear, self._heard = window, hear, heard
        self._bodies: deque[int] = deque()
        self._nbytes = 0

    def __enter__(self) -> Self:
        self._window.streams += 1
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
        self._bodies.append(nbytes)
        self._count(nbytes)

    async def land(self) -> None:
        """Wait until all is handled."""
        while self._bodies:
            await self._land()

    async def _land(self) -> None:
        await self._hear()
        nbytes = self._bodies.popleft()
        self._count(-nbytes)
        self._heard(nbytes)

    def _count(self, nbytes: int) -> None:
        self._nbytes += nbytes
        self._window.nbytes += nbytes
