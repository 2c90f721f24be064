"""Cuts a transfer in which nothing moves, or too little over all; never one that is merely long.

A frame of 100 MB takes 160 s over 5 Mbit/s and is fine. Ten seconds without a byte are not: the path is dead. A byte
every nine seconds is not either: it would hold a stream, and the memory of a body, for as long as it likes.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

import anyio

from decentral.errors import StreamClosed
from decentral.wire.keys import PeerId, peer_name

STALL = 10.0  # s without a byte: a lost packet costs TCP about one, a change of route seldom more than five
GRACE = 30.0  # s before the least rate counts: slow start, a short outage
LEAST_RATE = 4096  # bytes/s over all: a fifth of what one of 64 pushes at once gets of a 10 Mbit/s uplink

OnBytes = Callable[[int], None]


class Watchdog:
    """Cut the block it holds with StreamClosed when no byte moved for ``STALL`` seconds, or fewer than ``LEAST_RATE``
    a second after ``GRACE``. Call what it yields with every number of bytes that moved.
    """

    __slots__ = ("_began", "_moved", "_peer", "_scope", "_what")

    def __init__(self, peer: PeerId, what: str) -> None:
        self._peer, self._what, self._moved = peer, what, 0

    def __enter__(self) -> OnBytes:
        self._began = anyio.current_time()
        self._scope = anyio.CancelScope(deadline=self._began + STALL)
        self._scope.__enter__()
        return self._on_bytes

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        swallowed = self._scope.__exit__(kind, error, trace)
        if self._scope.cancelled_caught:
            raise StreamClosed(
                f"{peer_name(self._peer)}: {self._what} stood still for {STALL:g} s, or crept, after "
                f"{self._moved} bytes in {anyio.current_time() - self._began:.0f} s; ask another peer or try again"
            ) from None
        return swallowed

    def _on_bytes(self, count: int) -> None:
        self._moved += count
        due = self._began + GRACE + self._moved / LEAST_RATE
        self._scope.deadline = min(anyio.current_time() + STALL, due)
