"""Budget of what others may hold of this process: inbound streams, and bodies that came or are on their way.

A reservation waits while its peer, or all peers together, hold too much; as a stream holds at most one reservation,
made for the whole body before its first byte is read, somebody can always finish. A body larger than the budget
passes once nothing else is held: its size was bounded by the protocol that takes it. Small bodies need no
reservation.

Identities cost nothing, so limits of one peer bind nobody who makes many. Hence whoever is no member of the run,
which takes a lease that members let in, draws on a smaller pool: outsiders can be in each other's way, never in a
round's. When their streams are used up, the oldest of who has most of them makes room, so that one who joins gets a
turn.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Container, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass, field, fields

import anyio

from decentral.errors import ConfigError, TransportError
from decentral.flow.waiting import Changes
from decentral.wire.keys import PeerId, peer_name

_NOTHING = nullcontext()  # to hold


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Ceilings for one peer, for all members together, and for all others together."""

    peer_streams: int = 64  # inbound streams one peer may have open; a round needs fewer than ten
    total_streams: int = 512  # a file descriptor each, and up to 384 KiB of read buffer
    peer_nbytes: int = 1 << 26  # one body always passes, however large
    total_nbytes: int = 1 << 30
    # A body that never waits: votes would queue behind a frame of 64 MiB, newcomers behind bodies that somebody
    # withholds. All streams together hold 10 MiB of such.
    small_nbytes: int = 1 << 14
    outsider_streams: int = 128  # a newcomer needs one at a time
    outsider_nbytes: int = 1 << 26  # all that outsiders have to send is small: greetings, leases, questions

    def __post_init__(self) -> None:
        for name in (one.name for one in fields(self)):
            if getattr(self, name) < 1:
                raise ConfigError(
                    f"Limits({name}={getattr(self, name)}): must be at least 1; leave it out for the default"
                )


@dataclass(slots=True, eq=False)
class _Pool:
    """What some peers together hold, and may."""

    most_streams: int
    most_nbytes: int
    streams: Counter[PeerId] = field(default_factory=Counter)
    nbytes: Counter[PeerId] = field(default_factory=Counter)
    total: int = 0  # streams

    @contextmanager
    def stream(self, peer: PeerId) -> Iterator[None]:
        self.streams[peer] += 1
        self.total += 1
        try:
            yield
        finally:
            self.total -= 1
            _give_back(self.streams, peer, 1)

    def fits(self, peer: PeerId, nbytes: int, of_one: int) -> bool:
        if not nbytes:
            return True
        mine, total = self.nbytes.get(peer, 0), self.nbytes.total()
        return (mine + nbytes <= of_one or mine == 0) and (total + nbytes <= self.most_nbytes or total == 0)


class Budget:
    """What each peer holds now, against the limits. One per transport."""

    def __init__(self, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self._preferred: Container[PeerId] | None = None  # None: all are alike
        self._members = _Pool(self.limits.total_streams, self.limits.total_nbytes)
        self._outsiders = _Pool(self.limits.outsider_streams, self.limits.outsider_nbytes)
        self._scopes: dict[anyio.CancelScope, PeerId] = {}  # of outsiders' streams, oldest first
        self._freed = Changes()

    def prefer(self, members: Container[PeerId]) -> None:
        """From now on whoever is not in ``members``, which may change, is an outsider."""
        self._preferred = members

    @contextmanager
    def inbound(self, peer: PeerId) -> Iterator[None]:
        """Hold one inbound stream of ``peer``.

        TransportError when it, or all members, have too many open; and when an outsider's had to make room.
        """
        pool = self._pool(peer)
        mine, total = pool.streams.get(peer, 0), pool.total
        if mine >= self.limits.peer_streams or (pool is self._members and total >= pool.most_streams):
            raise TransportError(
                f"{peer_name(peer)}: {mine} inbound streams of it are open, {total} in all; the new one is refused"
            )
        with pool.stream(peer):
            if pool is self._members:
                yield
            else:
                with self._on_call(peer):
                    yield

    def bytes_of(self, peer: PeerId, nbytes: int) -> AbstractAsyncContextManager[None]:
        """Hold ``nbytes`` on behalf of ``peer``, waiting until they fit; a small body never waits."""
        return self._held(peer, nbytes) if nbytes > self.limits.small_nbytes else _NOTHING

    @asynccontextmanager
    async def _held(self, peer: PeerId, nbytes: int) -> AsyncIterator[None]:
        while not (pool := self._pool(peer)).fits(peer, nbytes, self.limits.peer_nbytes):
            await self._freed.next()
        pool.nbytes[peer] += nbytes
        try:
            yield
        finally:
            _give_back(pool.nbytes, peer, nbytes)
            self._freed.tell()

    def held(self, peer: PeerId) -> tuple[int, int]:
        """Streams and bytes ``peer`` holds now."""
        pools = (self._members, self._outsiders)
        return sum(pool.streams.get(peer, 0) for pool in pools), sum(pool.nbytes.get(peer, 0) for pool in pools)

    def comes_first(self, peer: PeerId) -> bool:
        """Whether ``peer`` is a member of the run, where there is one."""
        return self._preferred is not None and peer in self._preferred

    @contextmanager
    def _on_call(self, peer: PeerId) -> Iterator[None]:
        """An outsider's stream, which may have to make room."""
        if len(self._scopes) >= self._outsiders.most_streams:
            self._make_room()
        with anyio.CancelScope() as scope:
            self._scopes[scope] = peer
            try:
                yield
            finally:
                self._scopes.pop(scope, None)
        if scope.cancelled_caught:
            raise TransportError(f"{peer_name(peer)}: its stream made room for other outsiders; it may try again")

    def _make_room(self) -> None:
        """End the oldest stream of the outsider that has most of them."""
        streams = Counter(self._scopes.values())
        heaviest = max(streams, key=streams.__getitem__)
        oldest = next(scope for scope, peer in self._scopes.items() if peer == heaviest)
        del self._scopes[oldest]  # now: it takes a moment to end
        oldest.cancel()

    def _pool(self, peer: PeerId) -> _Pool:
        return self._members if self._preferred is None or peer in self._preferred else self._outsiders


def _give_back(counter: Counter[PeerId], peer: PeerId, amount: int) -> None:
    counter[peer] -= amount
    if counter[peer] <= 0:
        del counter[peer]  # strangers come and go; a row each would be their way to fill the memory
