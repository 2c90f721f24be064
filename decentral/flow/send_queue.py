"""Frames for one peer each, begun one after another as fast as the uplink carries them.

Begun all at once they share the uplink as TCP happens to divide it, and all wait for the last: on eight equal lines of
20 Mbit/s one peer had all its slices after 5.2 s, another after 6.8. So peer i begins with peer i + 1 and goes on with
i + 2: each receives from as few peers at a time as it sends to.

A turn comes when the uplink should have carried what was begun before, or when few are under way: a wrong estimate
makes more of them share the uplink, or fewer, and a peer that takes nothing holds nobody up.

Source: the shifted order is that of the pairwise exchange in Thakur, Rabenseifner and Gropp, "Optimization of
collective communication operations in MPICH", 2005.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import anyio

from decentral.flow.changes import Changes
from decentral.wire.keys import PeerId

FEW = 3  # frames under way that keep a line full: one begins slowly, one ends
HASTE = 1.15  # times the estimated rate, which is a lower bound and grows when more goes through


class SendQueue:
    """Of one peer. ``uplink`` tells bytes per second; None: not known, and nobody waits."""

    def __init__(self, uplink: Callable[[], float | None]) -> None:
        self._uplink = uplink
        self._queue = anyio.Lock()  # first come, first served
        self._under_way = 0
        self._free_at = 0.0
        self._fewer = Changes()

    async def begin(self, nbytes: int) -> None:
        """Wait until it is the turn of a frame of so many bytes; ``end`` when it has arrived or will not."""
        async with self._queue:
            rate = self._uplink()
            if rate:
                with anyio.move_on_after(self._free_at - anyio.current_time()):
                    while self._under_way >= FEW:
                        await self._fewer.next()
                self._free_at = anyio.current_time() + nbytes / (HASTE * rate)
            self._under_way += 1

    def end(self) -> None:
        """One that was begun is no longer under way."""
        self._under_way -= 1
        self._fewer.tell()


def shifted(peers: Iterable[PeerId], me: PeerId) -> list[PeerId]:
    """Those after ``me`` first, then those before it, and ``me`` last, if it is one of them."""
    ordered = sorted(peers)
    return [*(peer for peer in ordered if peer > me), *(peer for peer in ordered if peer <= me)]
