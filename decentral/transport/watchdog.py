"""Cuts a transfer in which nothing moves, or too little over all; never one that is merely long.

A frame of 100 MB takes 160 s over 5 Mbit/s and is fine. Ten seconds without a byte are not: the path is dead. A byte
every nine seconds is not either: it would hold a stream, and the memory of a body, for as long as it likes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import anyio

from decentral.errors import StreamClosed
from decentral.wire.keys import PeerId, peer_name

STALL = 10.0  # s without a byte: a lost packet costs TCP about one, a change of route seldom more than five
GRACE = 30.0  # s before the least rate counts: slow start, a short outage
LEAST_RATE = 4096  # bytes/s over all: a fifth of what one of 64 pushes at once gets of a 10 Mbit/s uplink

OnBytes = Callable[[int], None]


@contextmanager
def watched(peer: PeerId, what: str) -> Iterator[OnBytes]:
    """Call what is yielded with every number of bytes that moved.

    StreamClosed when none moved for ``STALL`` seconds, or fewer than ``LEAST_RATE`` a second after ``GRACE``.
    """
    began, moved = anyio.current_time(), 0
    with anyio.CancelScope(deadline=began + STALL) as scope:

        def on_bytes(count: int) -> None:
            nonlocal moved
            moved += count
            scope.deadline = min(anyio.current_time() + STALL, began + GRACE + moved / LEAST_RATE)

        yield on_bytes
    if scope.cancelled_caught:
        raise StreamClosed(
            f"{peer_name(peer)}: {what} stood still for {STALL:g} s, or crept, after {moved} bytes in "
            f"{anyio.current_time() - began:.0f} s; ask another peer or try again"
        )
