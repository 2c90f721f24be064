"""Inbound streams whose protocol is not known yet, bounded: what one costs is spent before anybody is asked for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container

import anyio

from decentral.transport.protocols.multistream import Ends, answer
from decentral.wire.keys import PeerId

_OF_ALL, _OF_ONE_PEER = 256, 128  # of all, beyond which only members of the run open more; of one peer


class Negotiations:
    """Those of one transport. ``comes_first``: whether a peer is a member of the run."""

    def __init__(self, comes_first: Callable[[PeerId], bool], timeout: float) -> None:
        self._comes_first, self._timeout = comes_first, timeout
        self._under_way: Counter[PeerId] = Counter()

    def __len__(self) -> int:
        return self._under_way.total()

    def begin(self, peer: PeerId) -> bool:
        """Count one more of ``peer``; False when there are too many, and the stream is to be reset."""
        full = self._under_way.total() >= _OF_ALL and not self._comes_first(peer)
        if full or self._under_way[peer] >= _OF_ONE_PEER:
            return False
        self._under_way[peer] += 1
        return True

    async def protocol_of(self, ends: Ends, peer: PeerId, known: Container[str]) -> str:
        """What a stream that has begun is for, one of those ``known``. DecentralError, TimeoutError."""
        try:
            with anyio.fail_after(self._timeout):
                return await answer(ends, known)
        finally:
            self._under_way[peer] -= 1
            if not self._under_way[peer]:
                del self._under_way[peer]
