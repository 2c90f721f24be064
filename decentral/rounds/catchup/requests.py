"""Peers that this one should catch up with: said by any part that notices, done by ``CatchUp``, one at a time."""

from __future__ import annotations

import anyio

from decentral.wire.keys import PeerId


class CatchUpRequests:
    """Room for one: the last asked wins, as whoever is ahead is noticed again at the next look."""

    def __init__(self) -> None:
        self._peer: PeerId | None = None
        self._asked = anyio.Event()

    def ask(self, peer: PeerId) -> None:
        """Catch up with ``peer`` soon."""
        self._peer = peer
        self._asked.set()

    async def next(self) -> PeerId | None:
        """Wait for a request and take it; None when it was dropped meanwhile."""
        await self._asked.wait()
        self._asked = anyio.Event()
        peer, self._peer = self._peer, None
        return peer

    def drop(self) -> None:
        """Forget what was asked meanwhile: a peer that is ahead still is asked for again at the next tick."""
        self._peer = None
