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

import math
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Container, Hashable, Iterator
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    asynccontextmanager,
    contextmanager,
    nullcontext,
)
from dataclasses import dataclass, field, fields

import anyio

from decentral.errors import ConfigError, TransportError
from decentral.flow.waiting import Changes
from decentral.wire.keys import PeerId, peer_name

_NOTHING = nullcontext()  # to hold
_AT_ONCE = nullcontext(None)  # a pace that nobody has to keep to


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
    """A pool: what some peers together hold, and may."""

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
    """The share of this process that each peer holds now, against the limits. One per transport."""

    def __init__(self, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self._preferred: Container[PeerId] | None = None  # None: all are alike
        self._members = _Pool(self.limits.total_streams, self.limits.total_nbytes)
        self._outsiders = _Pool(self.limits.outsider_streams, self.limits.outsider_nbytes)
        self._scopes: dict[anyio.CancelScope, PeerId] = {}  # of outsiders' streams, oldest first
        self._resting: dict[anyio.CancelScope, PeerId] = {}  # of members' streams, between bodies; longest first
        self._freed = Changes()
        self.answers = Answers()

    def prefer(self, members: Container[PeerId]) -> None:
        """From now on whoever is not in ``members``, which may change, is an outsider."""
        self._preferred = members

    @contextmanager
    def inbound(self, peer: PeerId) -> Iterator[None]:
        """Hold one inbound stream of ``peer``.

        TransportError when it, or all members, have too many open; and when an outsider's had to make room. Those that
        only rest make room before.
        """
        pool = self._pool(peer)
        mine, total = pool.streams.get(peer, 0), pool.total
        has_many = mine >= self.limits.peer_streams
        if (has_many or (pool is self._members and total >= pool.most_streams)) and not self._end_rest(
            peer if has_many else None
        ):
            raise TransportError(
                f"{peer_name(peer)}: {mine} inbound streams of it are open, {total} in all; the new one is refused"
            )
        with pool.stream(peer):
            if pool is self._members:
                yield
            else:
                with self._on_call(peer):
                    yield

    @contextmanager
    def resting(self, peer: PeerId, seconds: float) -> Iterator[None]:
        """Hold while a stream of ``peer`` waits for its next body, so many ``seconds`` at most; left early when it has
        to make room.
        """
        with anyio.move_on_after(seconds) as scope:
            self._resting[scope] = peer
            try:
                yield
            finally:
                self._resting.pop(scope, None)

    def _end_rest(self, peer: PeerId | None) -> bool:
        """End the stream that rests longest, of ``peer`` or of any; tell whether there was one."""
        scope = next((scope for scope, one in self._resting.items() if peer in (None, one)), None)
        if scope is None:
            return False
        del self._resting[scope]  # now: it takes a moment to end
        scope.cancel()
        return True

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

    def own_frame(self) -> AbstractContextManager[None]:
        """Held while a frame of this peer waits to be sent: outsiders are answered with a share of the uplink then."""
        return self.answers.own_frame()

    def answering(self, peer: PeerId, nbytes: int) -> AbstractAsyncContextManager[Pace | None]:
        """Held while ``peer`` is sent an answer. What it yields, if it is not None, is awaited before each piece of it,
        of at most ``PIECE`` bytes.
        """
        outsider = nbytes > 0 and self._pool(peer) is self._outsiders
        return self.answers.turn(peer, nbytes) if outsider and not self.answers.is_free(peer, nbytes) else _AT_ONCE

    def held(self, peer: PeerId) -> tuple[int, int]:
        """Streams and bytes ``peer`` holds now."""
        pools = (self._members, self._outsiders)
        return sum(pool.streams.get(peer, 0) for pool in pools), sum(pool.nbytes.get(peer, 0) for pool in pools)

    def comes_first(self, peer: PeerId) -> bool:
        """Tell whether ``peer`` is a member of the run, where there is one."""
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


# ---- answers to outsiders, beside this peer's own frames ----
#
# Whoever fetches is answered, and eight who fetched all day made rounds of 2 Mbit/s 25 times as long: what was sent to
# them stood before the frames of this peer, in the same line. So while own frames wait to be sent, outsiders are given
# a tenth of the uplink together, one answer at a time; it is never nothing, or nobody could join. While none waits they
# have all of it, but no more of it under way than half a second takes, as the next own frame waits behind that.
#
# Who has had least comes first: a newcomer that asks for its first chunk does not queue behind those that ask for
# their thousandth.

SHARE = 0.1  # of the uplink
LEAST = 8192.0  # bytes/s; a reader takes half of that for a path that is dead
UNMEASURED = 125_000.0  # bytes/s that the uplink is taken for until a frame told
AHEAD = 0.5  # s of the uplink that may be under way
FIRST = 1 << 20  # bytes of it while nothing is measured
PIECE = 1 << 14  # bytes of an answer that leave at once
# A greeting or a list of leases does not wait behind a snapshot, so many bytes of such for each outsider, and for all.
SMALL_AT_ONCE, SMALL_PER_SECOND = 1 << 16, 1 << 12
ALL_SMALL_AT_ONCE, ALL_SMALL_PER_SECOND = 1 << 18, 1 << 14
_UNREAD, _LONGEST = 1.0, 15.0  # s after which an answer that nobody has read yet holds up no others
_REMEMBERED = 1024  # outsiders
_SEEN = 16  # answers
_MOMENT = 1e-6  # s that nobody waits for: a deadline that is nearer may be now

Pace = Callable[[int], Awaitable[None]]


@dataclass(eq=False, slots=True)
class _Answer:
    peer: PeerId
    nbytes: int
    until: float = math.inf  # when it holds up others no more


class Answers:
    """Answers that wait for their turn, or are under way. ``uplink`` tells bytes per second; None: not measured."""

    def __init__(self) -> None:
        self.uplink: Callable[[], float | None] = lambda: None
        self._own = 0  # frames that wait to be sent
        self._free_at = 0.0  # when the share of what was sent beside own frames is used up
        self._waiting: list[_Answer] = []
        self._under_way: list[_Answer] = []
        self._had: dict[PeerId, int] = {}  # bytes, whoever came last at the end
        self._seen: deque[float] = deque(maxlen=_SEEN)  # bytes/s of the last answers that had the uplink
        self._small = Allowances(SMALL_AT_ONCE, SMALL_PER_SECOND)
        self._all_small = Allowances(ALL_SMALL_AT_ONCE, ALL_SMALL_PER_SECOND)
        self._changed = Changes()

    @contextmanager
    def own_frame(self) -> Iterator[None]:
        """Held while a frame of this peer waits to be sent, or is on its way."""
        self._own += 1
        try:
            yield
        finally:
            self._own -= 1
            self._changed.tell()

    def is_free(self, peer: PeerId, nbytes: int) -> bool:
        """Tell whether an answer is so short that it need not wait; it is counted then."""
        now = anyio.current_time()
        left = min(self._small.left(peer, now), self._all_small.left(None, now))
        if nbytes > min(PIECE, left):
            return False
        self._small.spend(peer, nbytes, now)
        self._all_small.spend(None, nbytes, now)
        return True

    @asynccontextmanager
    async def turn(self, peer: PeerId, nbytes: int) -> AsyncIterator[Pace]:
        """Wait for the turn of an answer to an outsider. What is yielded is to be awaited before each piece."""
        answer = _Answer(peer, nbytes)
        self._waiting.append(answer)
        try:
            while (wait := self._seconds_until(answer, anyio.current_time())) > _MOMENT:
                with anyio.move_on_after(wait):
                    await self._changed.next()
            self._begin(answer)
        finally:
            self._waiting.remove(answer)
            self._changed.tell()
        began, beside = anyio.current_time(), self._own
        try:
            yield self._pace
            took = anyio.current_time() - began
            if took > 0 and not beside and not self._own:
                self._seen.append(nbytes / took)
        finally:
            self._under_way.remove(answer)
            self._changed.tell()

    async def _pace(self, nbytes: int) -> None:
        """Until so many bytes of an answer may leave."""
        while self._own and (wait := self._free_at - anyio.current_time()) > _MOMENT:
            with anyio.move_on_after(wait):
                await self._changed.next()
        if self._own:
            self._free_at = max(self._free_at, anyio.current_time()) + nbytes / max(LEAST, SHARE * self._rate())

    def _begin(self, answer: _Answer) -> None:
        takes = 2 * answer.nbytes / (self._rate() * (SHARE if self._own else 1))
        answer.until = anyio.current_time() + min(_UNREAD + takes, _LONGEST)
        self._under_way.append(answer)
        had = self._had.pop(answer.peer, 0)
        if len(self._had) >= _REMEMBERED:
            del self._had[next(iter(self._had))]
        self._had[answer.peer] = had + answer.nbytes

    def _seconds_until(self, answer: _Answer, now: float) -> float:
        """0: it is the turn of ``answer``; infinity: something else must happen first."""
        if answer is not min(self._waiting, key=lambda waiting: self._had.get(waiting.peer, 0)):
            return math.inf
        ahead = [other for other in self._under_way if other.until > now]
        measured = self._estimate()
        most = 0.0 if self._own else FIRST if measured is None else AHEAD * measured
        if not ahead or sum(other.nbytes for other in ahead) + answer.nbytes <= most:
            return 0.0
        return min(other.until for other in ahead) - now

    def _estimate(self) -> float | None:
        """Give what frames told of the uplink, or answers: frames may be too short to tell much."""
        return max(self.uplink() or 0.0, *self._seen, 0.0) or None

    def _rate(self) -> float:
        return self._estimate() or UNMEASURED


# ---- so many in a while ----


class Allowances:
    """Token buckets, one for each of those who ask for something: ``most`` at once, ``rate`` a second in the long run.

    Pure: the time comes in. Of more than ``_KEPT`` the one that came first is forgotten, and begins anew.
    """

    _KEPT = 4096

    def __init__(self, most: float, rate: float) -> None:
        self.most, self.rate = most, rate
        self._left: dict[Hashable, tuple[float, float]] = {}  # what was left when it was last spent of, and when

    def left(self, key: Hashable, now: float) -> float:
        """How many ``key`` may have now."""
        left, since = self._left.get(key, (self.most, now))
        return min(self.most, left + self.rate * max(0.0, now - since))

    def spend(self, key: Hashable, count: float, now: float) -> None:
        """It has so many."""
        if key not in self._left and len(self._left) >= self._KEPT:
            del self._left[next(iter(self._left))]
        self._left[key] = self.left(key, now) - count, now

    def begin_anew(self) -> None:
        """Everybody may have all at once again."""
        self._left.clear()

    def take(self, key: Hashable, now: float) -> bool:
        """Let ``key`` have one, if there is one."""
        if self.left(key, now) < 1.0:
            return False
        self.spend(key, 1.0, now)
        return True
