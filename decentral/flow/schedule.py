"""Who may move bytes when, so that all together keep to one rate: a token bucket with an express lane. Pure.

Bulk goes while there are tokens, one piece per turn, and peers take turns by what each has moved: two peers get half
each, whether one has one stream open and the other forty. Urgent bytes (leases, votes) do not wait: they are booked,
and bulk waits for the tokens they took. Express bytes have a bucket of their own, so that a flood of them is bulk like
any other. Over t seconds no more than ``rate * (t + BURST + EXPRESS_BURST)`` bytes and one piece pass: in a minute 2 %
more than the rate.

Source: tags as in Goyal, Vin and Cheng, "Start-time Fair Queuing", 1996.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from decentral.wire.keys import PeerId

BURST = 0.1  # s of the rate that an idle link saves up for bulk
EXPRESS_BURST = 1.0  # s of the rate that urgent bytes may take at once
EXPRESS_SHARE = 0.75  # of the rate, for urgent bytes that do not wait; the rest is bulk's, whatever happens
_PIECE_SECONDS = 0.05  # how long a turn lasts: what an urgent byte may find before it in the network
_SMALLEST, _LARGEST = 1 << 10, 1 << 16  # bytes of a turn
_ENOUGH = -1.0  # bytes: sums of floats come near 0 and need not reach it
_KEPT_TAGS = 64  # peers remembered beyond those who wait
_NEVER = float("inf")


@dataclass(eq=False, slots=True)
class Turn:
    """One piece that somebody wants to move; it may when ``granted``."""

    peer: PeerId
    nbytes: int
    start: float  # place in the order, in bytes of fair service
    granted: bool = False
    dropped: bool = False


class Schedule:
    """One direction of one peer: ``rate`` in bytes per second. Times come in, in seconds of any one clock."""

    def __init__(self, rate: float, now: float) -> None:
        self.rate = rate
        self._tokens, self._express, self._filled = BURST * rate, EXPRESS_BURST * rate, now
        self._order: list[tuple[float, int, Turn]] = []  # a heap
        self._served = 0.0  # tag of the turn that was granted last
        self._tags: dict[PeerId, float] = {}  # where the next piece of each peer stands
        self._count = 0

    @property
    def piece(self) -> int:
        """Bytes of one turn."""
        return piece_of(self.rate)

    @property
    def num_remembered(self) -> int:
        """Peers of which it is known where their next piece stands."""
        return len(self._tags)

    @property
    def head(self) -> Turn | None:
        """Whose turn is next."""
        while self._order and self._order[0][2].dropped:
            heapq.heappop(self._order)
        return self._order[0][2] if self._order else None

    def change(self, rate: float, now: float) -> None:
        """From ``now`` on it is another rate; what was saved up beyond its burst is lost, what is owed stays owed."""
        self._fill(now)
        self.rate = rate
        self._fill(now)

    def ask(self, peer: PeerId, nbytes: int, now: float, *, urgent: bool = False) -> Turn:
        """Want to move ``nbytes`` with ``peer``; granted at once when nobody has to wait for it."""
        self._fill(now)
        if urgent and self._express > 0:
            self._express -= nbytes
            self._tokens -= nbytes
            return Turn(peer, nbytes, self._served, granted=True)
        if self.idle(now):
            self._tags.clear()  # nobody has a claim from before the pause, and strangers' tags must not stay
        turn = Turn(peer, nbytes, max(self._served, self._tags.get(peer, 0.0)))
        self._tags[peer] = turn.start + nbytes
        if self.head is None and self._tokens > _ENOUGH:
            self._grant(turn)
            return turn
        self._count += 1
        heapq.heappush(self._order, (turn.start, self._count, turn))
        return turn

    def drop(self, turn: Turn) -> None:
        """It is not wanted any more."""
        turn.dropped = True

    def spend(self, nbytes: int, now: float) -> None:
        """Book bytes that have moved already."""
        self._fill(now)
        self._tokens -= nbytes

    def due(self, now: float) -> list[Turn]:
        """Grant what may move now, in order."""
        self._fill(now)
        granted = []
        while self._tokens > _ENOUGH and (turn := self.head) is not None:
            heapq.heappop(self._order)
            self._grant(turn)
            granted.append(turn)
        return granted

    def next_at(self) -> float:
        """When the next turn is due, if nothing urgent comes before."""
        return self._filled + max(0.0, -self._tokens) / self.rate if self.head is not None else _NEVER

    def idle(self, now: float) -> bool:
        """Whether bulk could move at once and has not needed to lately: something else than the rate is narrow."""
        self._fill(now)
        return self.head is None and self._tokens >= BURST * self.rate

    def _fill(self, now: float) -> None:
        passed = max(0.0, now - self._filled)
        self._filled = max(self._filled, now)
        self._tokens = min(BURST * self.rate, self._tokens + self.rate * passed)
        self._express = min(EXPRESS_BURST * self.rate, self._express + EXPRESS_SHARE * self.rate * passed)

    def _grant(self, turn: Turn) -> None:
        turn.granted = True
        self._tokens -= turn.nbytes
        self._served = turn.start
        if len(self._tags) > len(self._order) + _KEPT_TAGS:
            self._tags = {peer: tag for peer, tag in self._tags.items() if tag > self._served}


def piece_of(rate: float) -> int:
    """Bytes of one turn at ``rate``."""
    return int(min(_LARGEST, max(_SMALLEST, rate * _PIECE_SECONDS)))
