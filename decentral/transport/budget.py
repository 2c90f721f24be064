"""How much of this process strangers may hold: inbound streams, and bodies that came or are on their way.

A reservation waits while its peer, or all peers together, hold too much; as a stream holds at most one
reservation, made for the whole body before its first byte is read, somebody can always finish. A body larger
than the budget passes once nothing else is held: its size was bounded by the protocol that takes it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

import anyio

from decentral.errors import ConfigError, TransportError
from decentral.wire.keys import PeerId, peer_name


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Ceilings for one peer and for all peers together."""

    peer_streams: int = 64  # inbound streams one peer may have open; a round needs fewer than ten
    total_streams: int = 512  # a file descriptor each, and up to 384 KiB of read buffer
    peer_nbytes: int = 1 << 26  # one body always passes, however large
    total_nbytes: int = 1 << 30

    def __post_init__(self) -> None:
        for name in ("peer_streams", "total_streams", "peer_nbytes", "total_nbytes"):
            if getattr(self, name) < 1:
                raise ConfigError(
                    f"Limits({name}={getattr(self, name)}): must be at least 1; leave it out for the default"
                )


class Budget:
    """What each peer holds now, against the limits. One per transport."""

    def __init__(self, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self._streams: Counter[PeerId] = Counter()
        self._nbytes: Counter[PeerId] = Counter()
        self._freed: anyio.Event | None = None  # made by who waits

    @contextmanager
    def inbound(self, peer: PeerId) -> Iterator[None]:
        """Hold one inbound stream of ``peer``; TransportError when it, or everybody, has too many open."""
        if self._streams[peer] >= self.limits.peer_streams or self._streams.total() >= self.limits.total_streams:
            raise TransportError(
                f"{peer_name(peer)}: {self._streams[peer]} inbound streams of it are open, "
                f"{self._streams.total()} in all; the new one is refused"
            )
        self._streams[peer] += 1
        try:
            yield
        finally:
            _give_back(self._streams, peer, 1)

    @asynccontextmanager
    async def bytes_of(self, peer: PeerId, nbytes: int) -> AsyncIterator[None]:
        """Hold ``nbytes`` on behalf of ``peer``, waiting until they fit."""
        while not self._fits(peer, nbytes):
            self._freed = self._freed or anyio.Event()
            await self._freed.wait()
        self._nbytes[peer] += nbytes
        try:
            yield
        finally:
            _give_back(self._nbytes, peer, nbytes)
            if self._freed is not None:
                self._freed.set()
                self._freed = None

    def held(self, peer: PeerId) -> tuple[int, int]:
        """Streams and bytes ``peer`` holds now."""
        return self._streams.get(peer, 0), self._nbytes.get(peer, 0)

    def _fits(self, peer: PeerId, nbytes: int) -> bool:
        mine, total = self._nbytes.get(peer, 0), self._nbytes.total()
        return (mine + nbytes <= self.limits.peer_nbytes or mine == 0) and (
            total + nbytes <= self.limits.total_nbytes or total == 0
        )


def _give_back(counter: Counter[PeerId], peer: PeerId, amount: int) -> None:
    counter[peer] -= amount
    if counter[peer] <= 0:
        del counter[peer]  # strangers come and go; a row each would be their way to fill the memory
