"""Cuts a transfer in which nothing moves, or too little over all; never one that is merely long.

A frame of 100 MB takes 160 s over 5 Mbit/s and is fine. Ten seconds in which no byte comes are not: the path is dead.
A byte every nine seconds is not either: it would hold a stream, and the memory of a body, for as long as it likes.

Time that this peer's own cap on bandwidth takes is left out: who is slow then is not the other side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType

import anyio

from decentral.errors import StreamClosed
from decentral.transport.base import Stream
from decentral.wire.keys import peer_name

STALL = 10.0  # s without a byte: a lost packet costs TCP about one, a change of route seldom more than five
# s without a byte taken: a reader lets the daemon's sender go on every 460 kB or so, as the muxer tells of room in
# large steps (measured: at 32 kB/s 14 to 22 s), and that the path is dead is seen by who waits for the bytes
SENDING_STALL = 30.0
GRACE = 30.0  # s before the least rate counts: slow start, a short outage
LEAST_RATE = 4096  # bytes/s over all: a fifth of what one of 64 pushes at once gets of a 10 Mbit/s uplink

OnBytes = Callable[[int], None]


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
            raise StreamClosed(
                f"{peer_name(self._stream.peer)}: {self._what} stood still for {self._stall:g} s, or crept, after "
                f"{self._moved} bytes in {anyio.current_time() - self._began:.0f} s; ask another peer or try again"
            ) from None
        return swallowed

    def hold(self) -> None:
        """What comes now is this peer's own doing."""
        self._held_at = anyio.current_time()
        self._scope.deadline = float("inf")

    def go_on(self) -> None:
        """As if no time had passed since ``hold``."""
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
        """Its watchdogs stand still in this block."""
        watchdogs = tuple(self.watchdogs)
        for watchdog in watchdogs:
            watchdog.hold()
        try:
            yield
        finally:
            for watchdog in watchdogs:
                watchdog.go_on()
