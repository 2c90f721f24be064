"""Chunks of a snapshot from several donors at once, each asked for as much at a time as its way to here carries.

A donor's window grows while its answers come as quickly as its quickest one, and shrinks when they wait for one
another: the way is then full, whether its end or ours is the narrow one. Donors take the next chunk when they have
room, so a slow one takes few; at the end, whoever is free is asked for what it will bring sooner than the donor that
owes it. A donor that fails leaves its chunks to the others.

Crosses the wire: one request of 36 bytes per chunk; a chunk more than once only at the end, or when a donor stalls.

Source: the window is that of Brakmo and Peterson, "TCP Vegas: End to End Congestion Avoidance on a Global Internet",
1995; the end is BitTorrent's end game (Cohen, "Incentives Build Robustness in BitTorrent", 2003).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import anyio

from decentral.errors import DecentralError, PayloadError, TransportError
from decentral.flow.waiting import Changes
from decentral.state.snapshot import Assembler
from decentral.wire.keys import PeerId

FIRST_WINDOW = 1  # chunks asked of a donor of which nothing is known: two would share its way, and look slow
LARGEST_WINDOW = 32  # half the streams that a donor lets one peer open
IN_FLIGHT = 128  # chunks asked of all donors: 32 MiB, 200 MB/s at 160 ms
LEAST_QUEUED, MOST_QUEUED = 0.5, 1.5  # chunks that wait in a donor's way: its own frames wait behind them
LOOK_EVERY = 0.25  # s between looks for new donors, and for chunks that are overdue
_NEVER = float("inf")

Ask = Callable[[PeerId, int], Awaitable[bytes]]


@dataclass(slots=True)
class StripeSource:
    """What one donor was asked for, and how it answers."""

    asked: dict[int, float] = field(default_factory=dict)  # chunk -> when, s
    window: float = FIRST_WINDOW  # chunks
    quickest: float = _NEVER  # s from question to answer
    usual: float = _NEVER  # s, smoothed
    _doubling: bool = True

    def answered(self, took: float) -> None:
        """One more chunk came, ``took`` seconds after it was asked for."""
        self.quickest = min(self.quickest, took)
        self.usual = took if self.usual == _NEVER else self.usual + (took - self.usual) / 4
        queued = self.window * (1 - self.quickest / took) if took > 0 else 0.0
        if queued < LEAST_QUEUED:
            self.window += 1 if self._doubling else 1 / self.window
        elif queued > MOST_QUEUED:
            self._doubling = False
            self.window -= 1 / self.window
        self.window = min(LARGEST_WINDOW, max(1.0, self.window))

    def remaining(self, number: int, now: float) -> float:
        """Seconds until a chunk it owes may be here; one that is late will be as late again."""
        waited = now - self.asked[number]
        return self.usual - waited if self.usual == _NEVER or waited < self.usual else waited


class Stripes:
    """Which donor is asked for which chunk. Pure: the time comes in."""

    def __init__(self, missing: Sequence[int]) -> None:
        self.missing = dict.fromkeys(missing)
        self.donors: dict[PeerId, StripeSource] = {}
        self._todo = deque(missing)
        self._gone: set[PeerId] = set()

    def meet(self, peers: Sequence[PeerId]) -> None:
        """These may be asked, too; those that failed before are not."""
        for peer in peers:
            if peer not in self._gone:
                self.donors.setdefault(peer, StripeSource())

    def due(self, now: float) -> list[tuple[PeerId, int]]:
        """Whom to ask for which chunk now."""
        asks = []
        for peer, donor in self.donors.items():
            while len(donor.asked) < int(donor.window) and self._in_flight() < IN_FLIGHT:
                number = self._next_for(donor, now)
                if number is None:
                    break
                donor.asked[number] = now
                asks.append((peer, number))
        return asks

    def came(self, peer: PeerId, number: int, now: float) -> list[PeerId]:
        """A chunk is here; returns who owes it still and need not send it."""
        donor = self.donors.get(peer)
        if donor is not None and number in donor.asked:
            donor.answered(now - donor.asked[number])
        self.missing.pop(number, None)
        owing = [other for other, donor in self.donors.items() if donor.asked.pop(number, None) is not None]
        return [other for other in owing if other != peer]

    def drop(self, peer: PeerId) -> list[int]:
        """A donor failed: others bring what it owes, which is returned."""
        self._gone.add(peer)
        donor = self.donors.pop(peer, None)
        owed = [] if donor is None else [number for number in donor.asked if number in self.missing]
        self._todo.extendleft(number for number in reversed(owed) if not self._holders(number))
        return owed

    def _next_for(self, donor: StripeSource, now: float) -> int | None:
        while self._todo:
            number = self._todo.popleft()
            if number in self.missing:
                return number
        late = [(min(h.remaining(n, now) for h in self._holders(n)), n) for n in self.missing if n not in donor.asked]
        remaining, number = max(late, default=(0.0, 0))
        return number if remaining > donor.usual else None

    def _holders(self, number: int) -> list[StripeSource]:
        return [donor for donor in self.donors.values() if number in donor.asked]

    def _in_flight(self) -> int:
        return sum(len(donor.asked) for donor in self.donors.values())


class _Fetch:
    """Carries out what Stripes says."""

    def __init__(self, assembler: Assembler, ask: Ask, dropped: Callable[[PeerId, DecentralError], None]) -> None:
        self.assembler, self.ask, self.dropped = assembler, ask, dropped
        self.stripes = Stripes(assembler.missing())
        self.failure: DecentralError | None = None
        self._scopes: dict[tuple[PeerId, int], anyio.CancelScope] = {}
        self._changed = Changes()

    async def run(self, donors: Callable[[], Sequence[PeerId]]) -> None:
        """Until all is here, or nobody is left to ask."""
        async with anyio.create_task_group() as group:
            while self.stripes.missing and self.failure is None:
                self.stripes.meet(donors())
                for peer, number in self.stripes.due(anyio.current_time()):
                    scope = self._scopes[peer, number] = anyio.CancelScope()
                    group.start_soon(self._one, peer, number, scope)
                if not self.stripes.donors:
                    break
                with anyio.move_on_after(LOOK_EVERY):
                    await self._changed.next()
            group.cancel_scope.cancel()

    async def _one(self, peer: PeerId, number: int, scope: anyio.CancelScope) -> None:
        with scope:
            try:
                self._take(peer, number, await self.ask(peer, number))
            except (TransportError, PayloadError) as error:
                self._drop(peer, error)
            except DecentralError as error:  # our own disk: no donor can help
                self.failure = error
        self._scopes.pop((peer, number), None)
        self._changed.tell()

    def _take(self, peer: PeerId, number: int, data: bytes) -> None:
        self.assembler.add(number, data)
        for other in self.stripes.came(peer, number, anyio.current_time()):
            self._scopes[other, number].cancel()  # a stream that is closed stops sending

    def _drop(self, peer: PeerId, error: DecentralError) -> None:
        for number in self.stripes.drop(peer):
            self._scopes[peer, number].cancel()
        self.dropped(peer, error)


async def fetch_chunks(
    assembler: Assembler,
    ask: Ask,
    donors: Callable[[], Sequence[PeerId]],
    dropped: Callable[[PeerId, DecentralError], None],
) -> None:
    """Fill ``assembler``; what came stays in it whatever happens.

    ``ask(donor, number)`` brings a chunk or raises TransportError or PayloadError; ``donors()`` says who may be asked
    now, and is called again and again; ``dropped`` hears of each donor that failed, and why: with a PayloadError when
    it sent what is not the chunk. Raises TransportError when no donor is left, DiskError when a chunk cannot be
    written.
    """
    fetch = _Fetch(assembler, ask, dropped)
    await fetch.run(donors)
    if fetch.failure is not None:
        raise fetch.failure
    if assembler.missing():
        raise TransportError(
            f"{len(assembler.missing())} of {assembler.index.layout.num_chunks} chunks of a snapshot are missing and "
            "no donor is left; what came is kept for the next attempt"
        )
