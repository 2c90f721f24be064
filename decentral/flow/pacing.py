"""Pacing: when bytes may leave and for whom, how many may be under way, and how fast the uplink is."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import anyio
import anyio.lowlevel
import anyio.to_thread

from decentral.flow.waiting import Changes
from decentral.wire.keys import PeerId

# ---- one rate for all, with an express lane ----
#
# A token bucket. Pure.
#
# Timely bytes (what crosses between the stages of a replica) go before bulk, which then has every fourth turn: a step
# waits for 200 kB, and must not wait for frames of 50 MB.
#
# Bulk goes while there are tokens, one piece per turn, and peers take turns by what each has moved: two peers get half
# each, whether one has one stream open and the other forty. Urgent bytes (leases, votes) do not wait: they are booked,
# and bulk waits for the tokens they took. Express bytes have a bucket of their own, so that a flood of them is bulk
# like any other. Over t seconds no more than ``rate * (t + BURST + EXPRESS_BURST)`` bytes and one piece pass: in a
# minute 2 % more than the rate.
#
# Source: tags as in Goyal, Vin and Cheng, "Start-time Fair Queuing", 1996.

BURST = 0.1  # s of the rate that an idle link saves up for bulk
EXPRESS_BURST = 1.0  # s of the rate that urgent bytes may take at once
EXPRESS_SHARE = 0.75  # of the rate, for urgent bytes that do not wait; the rest is bulk's, whatever happens
_PIECE_SECONDS = 0.05  # how long a turn lasts: what an urgent byte may find before it in the network
_SMALLEST, _LARGEST = 1 << 10, 1 << 16  # bytes of a turn
_ENOUGH = -1.0  # bytes: sums of floats come near 0 and need not reach it
PASSED = 3  # timely turns in a row, behind which bulk has one
_KEPT_TAGS = 64  # peers remembered beyond those who wait
_NEVER = float("inf")


@dataclass(eq=False, slots=True)
class Turn:
    """A piece that somebody wants to move, and may once it is ``granted``."""

    peer: PeerId
    nbytes: int
    start: float  # place in the order, in bytes of fair service
    granted: bool = False
    dropped: bool = False
    timely: bool = False


class _Queue:
    """Turns in the order of their places."""

    def __init__(self) -> None:
        self._turns: list[tuple[float, int, Turn]] = []  # a heap
        self._count = 0

    def __len__(self) -> int:
        return len(self._turns)

    @property
    def head(self) -> Turn | None:
        """The turn that comes next."""
        while self._turns and self._turns[0][2].dropped:
            heapq.heappop(self._turns)
        return self._turns[0][2] if self._turns else None

    def push(self, turn: Turn) -> None:
        """Add one."""
        self._count += 1
        heapq.heappush(self._turns, (turn.start, self._count, turn))

    def pop(self) -> None:
        """Take the first one away."""
        heapq.heappop(self._turns)


class Schedule:
    """The turns of one direction of one peer; ``rate`` in bytes per second. Times come in, in seconds of one clock."""

    def __init__(self, rate: float, now: float) -> None:
        self.rate = rate
        self._tokens, self._express, self._filled = BURST * rate, EXPRESS_BURST * rate, now
        self._bulk, self._timely = _Queue(), _Queue()
        self._passed = 0  # turns of bulk that went behind a timely one, in a row
        self._served = 0.0  # tag of the turn that was granted last
        self._tags: dict[PeerId, float] = {}  # where the next piece of each peer stands

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
        """The turn that comes next."""
        timely, bulk = self._timely.head, self._bulk.head
        return bulk if timely is None or (bulk is not None and self._passed >= PASSED) else timely

    def change(self, rate: float, now: float) -> None:
        """Go on at another rate; what was saved up beyond its burst is lost, what is owed stays owed."""
        self._fill(now)
        self.rate = rate
        self._fill(now)

    def ask(self, peer: PeerId, nbytes: int, now: float, *, urgent: bool = False, timely: bool = False) -> Turn:
        """Ask to move ``nbytes`` with ``peer``; granted at once when nobody has to wait for it."""
        self._fill(now)
        if urgent and self._express > 0:
            self._express -= nbytes
            self._tokens -= nbytes
            return Turn(peer, nbytes, self._served, granted=True)
        if self.idle(now):
            self._tags.clear()  # nobody has a claim from before the pause, and strangers' tags must not stay
        turn = Turn(peer, nbytes, max(self._served, self._tags.get(peer, 0.0)), timely=timely)
        self._tags[peer] = turn.start + nbytes
        if self.head is None and self._tokens > _ENOUGH:
            self._grant(turn)
            return turn
        (self._timely if timely else self._bulk).push(turn)
        return turn

    def drop(self, turn: Turn) -> None:
        """Want it no more."""
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
            (self._timely if turn.timely else self._bulk).pop()
            self._passed = self._passed + 1 if turn.timely and self._bulk.head is not None else 0
            self._grant(turn)
            granted.append(turn)
        return granted

    def next_at(self) -> float:
        """Return when the next turn is due, if nothing urgent comes before."""
        return self._filled + max(0.0, -self._tokens) / self.rate if self.head is not None else _NEVER

    def idle(self, now: float) -> bool:
        """Tell whether bulk could move at once and has not needed to lately: something else than the rate is narrow."""
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
        if len(self._tags) > len(self._bulk) + len(self._timely) + _KEPT_TAGS:
            self._tags = {peer: tag for peer, tag in self._tags.items() if tag > self._served}


def piece_of(rate: float) -> int:
    """Return the bytes of one turn at ``rate``."""
    return int(min(_LARGEST, max(_SMALLEST, rate * _PIECE_SECONDS)))


# ---- frames for one peer each, one after another ----
#
# They are begun as fast as the uplink carries them.
#
# Begun all at once they share the uplink as TCP happens to divide it, and all wait for the last: on eight equal lines
# of 20 Mbit/s one peer had all its slices after 5.2 s, another after 6.8. So peer i begins with peer i + 1 and goes on
# with i + 2: each receives from as few peers at a time as it sends to.
#
# A turn comes when the uplink should have carried what was begun before, or when few are under way: a wrong estimate
# makes more of them share the uplink, or fewer, and a peer that takes nothing holds nobody up.
#
# The rate is what arrived elsewhere from one answer to a later one, over that time; answers may come together, so it is
# no more than frames were begun at. No sample holds a trip: counted from when frames began, a line of 3.5 MB/s was one
# of 2.6, one of 125 became slower with every round, and frames were begun so slowly that no round could tell of more
# (experiments/LOG.md).
#
# Source: the order is that of the pairwise exchange in Thakur, Rabenseifner and Gropp, "Optimization of
# collective communication operations in MPICH", 2005; the samples are those of Cardwell et al., "BBR:
# Congestion-Based Congestion Control", 2016.

FEW = 3  # frames under way that keep a line full: one begins slowly, one ends
HASTE = 1.25  # times the rate, which grows when more goes through
SAMPLES = 16  # of the last frames, less than a round has: a line that changed is known in the next one


@dataclass(frozen=True, slots=True)
class Arrival:
    """The moment when a frame had arrived."""

    nbytes: int  # of all frames until then
    at: float


@dataclass(frozen=True, slots=True)
class Sending:
    """A frame that was begun."""

    nbytes: int
    most: float  # bytes/s at which frames were begun
    before: Arrival | None  # the last one then; None: nothing had arrived since the line stood still


class SendQueue:
    """The queue of one peer's frames. Nobody waits while nothing is known of the line."""

    def __init__(self) -> None:
        self._queue = anyio.Lock()  # first come, first served
        self._under_way = 0
        self._free_at = 0.0
        self._fewer = Changes()
        self._arrived = 0  # bytes
        self._first: Arrival | None = None  # since the line stood still
        self._last: Arrival | None = None
        self._rates: deque[float] = deque(maxlen=SAMPLES)

    @property
    def rate(self) -> float | None:
        """Return the bytes per second that arrive elsewhere; None: not known."""
        return _second_best([*self._rates]) if self._rates else None  # the best may be of answers that came together

    async def begin(self, nbytes: int) -> Sending:
        """Wait until it is the turn of a frame of so many bytes; ``end`` when it has arrived or will not."""
        async with self._queue:
            most = math.inf
            if (rate := self.rate) is not None:
                with anyio.move_on_after(self._free_at - anyio.current_time()):
                    while self._under_way >= FEW:
                        await self._fewer.next()
                most = HASTE * rate
                self._free_at = anyio.current_time() + nbytes / most
            if not self._under_way:
                self._first = self._last = None
            self._under_way += 1
            return Sending(nbytes, most, self._last)

    def arrive(self, sending: Sending) -> None:
        """Note that a frame has arrived."""
        now = anyio.current_time()
        self._arrived += sending.nbytes
        self._last = Arrival(self._arrived, now)
        if (before := sending.before or self._first) is None:
            self._first = self._last
            return
        seconds = now - before.at
        found = (self._arrived - before.nbytes) / seconds if seconds > 0 else math.inf
        if (sample := min(found, sending.most)) < math.inf:
            self._rates.append(sample)

    def end(self) -> None:
        """Note that a frame that was begun is no longer under way."""
        self._under_way -= 1
        self._fewer.tell()


def order_after(peers: Iterable[PeerId], me: PeerId) -> list[PeerId]:
    """Return the peers after ``me`` first, then those before it, and ``me`` last if it is there."""
    ordered = sorted(peers)
    return [*(peer for peer in ordered if peer > me), *(peer for peer in ordered if peer <= me)]


# ---- bytes under way, unheard of ----
#
# To all peers together: as many as the uplink carries in four seconds.
#
# What the system's and the daemon's buffers have swallowed cannot be called back, and what follows on the same
# connection waits behind it. At 2 Mbit/s a frame that was called off in round 2 arrived in round 7, and in three runs
# of six no frame of that peer was ever in time. So bytes stay here until the other side has said that it has those
# before.
#
# Every stream has the same share and may always have one body under way, so a peer that takes nothing stops nobody
# else.

# s of the uplink; with two, a gather of eight on equal lines took 14.5 s, with four 13.2, without any such limit 13.0
SECONDS = 4.0
FIRST = 1 << 16  # bytes of each stream while nothing is known of the uplink


class Window:
    """The bytes that one peer has under way, and may have. ``uplink`` tells bytes per second; None: not known."""

    def __init__(self, uplink: Callable[[], float | None]) -> None:
        self._uplink = uplink
        self.streams = 0  # that are open
        self.nbytes = 0  # under way on all of them

    def allows(self, nbytes: int, under_way: int) -> bool:
        """Tell whether a stream with so many bytes under way may send ``nbytes``."""
        rate = self._uplink()
        if rate is None:
            return under_way + nbytes <= FIRST
        most = SECONDS * rate
        return self.nbytes + nbytes <= most and under_way + nbytes <= most / self.streams


@dataclass(frozen=True, slots=True)
class Ack:
    """A body that the other side has handled; times of this peer's clock, as early as answers so far allow."""

    nbytes: int
    opened: float  # when the stream was open over there
    at: float


class InFlight:
    """The bodies under way on one stream; a context manager that is entered while the stream is open.

    An answer may wait for seconds behind what the other side sends, so it brings the time that the other side's clock
    shows. Of all answers the one that came fastest tells how far the clocks are apart.
    """

    def __init__(self, window: Window, hear: Callable[[], Awaitable[float]], heard: Callable[[Ack], None]) -> None:
        """``hear`` waits until the oldest body was handled, and returns the seconds since the stream was open there."""
        self._window, self._hear, self._heard = window, hear, heard
        self._bodies: deque[tuple[int, float]] = deque()  # bytes, and when they began to leave
        self._nbytes = 0
        self._began = self._opened = 0.0

    def __enter__(self) -> Self:
        self._window.streams += 1
        self._began, self._opened = anyio.current_time(), math.inf
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._window.streams -= 1
        self._window.nbytes -= self._nbytes

    async def begin(self, nbytes: int) -> None:
        """Wait until so many bytes may leave, and count them; at once when nothing is under way here."""
        while self._bodies and not self._window.allows(nbytes, self._nbytes):
            await self._land()
        self._bodies.append((nbytes, anyio.current_time()))
        self._count(nbytes)

    async def land(self) -> None:
        """Wait until all is handled."""
        while self._bodies:
            await self._land()

    async def _land(self) -> None:
        since, now = await self._hear(), anyio.current_time()
        self._opened = min(self._opened, max(now - since, self._began))
        nbytes, sent = self._bodies.popleft()
        self._count(-nbytes)
        self._heard(Ack(nbytes, self._opened, min(max(self._opened + since, sent), now)))

    def _count(self, nbytes: int) -> None:
        self._nbytes += nbytes
        self._window.nbytes += nbytes


# ---- the speed of the uplink ----
#
# Estimated from the transfers that this peer makes. Pure: the time comes in.
#
# Copies of frames that others say they have, over the time since the first was begun, while any was under way: right
# for frames of any size, and one slow receiver spoils nothing. Of the last four the second fastest counts, that under
# way among them, as one may be fast or slow by accident: the fastest of sixteen was a burst once, and made everybody's
# rounds twice as long for as many. A frame of ten seconds is no accident and counts three times: four seconds of the
# estimate may be under way, and on a line that falls to a tenth watchdogs end streams before those have arrived.
#
# A frame that was there within a quarter of a second shows that a line is faster than thought, as far as that time
# tells, and never that it is slower: what it took were trips.
#
# And, while nobody has said so, how fast pieces are taken; less sure, as on a busy machine a buffer is slow, too. Only
# what had to wait counts: bytes that a buffer swallows at once say nothing of the link behind it. So a window is eight
# seconds in which some piece was always under way, and its rate the bytes of those that waited; the fastest of the
# last windows counts, as a slow receiver makes a window slow and nothing makes one fast. Frames of 0.9 MB fit into the
# buffers for the most part, and their windows told 0.3 MB/s of a link of 2.5 (measured, seven streams at once).

FRAMES = 4  # that count
BRIEF = 0.25  # s
LONG = 5.0  # s for each of which a frame counts once more
WINDOW = 8.0  # s of being busy; a piece of 64 KiB that began before it is 1 % too many at 8 Mbit/s, for each stream
KEPT = 16  # windows: two minutes of sending, so an estimate follows a link that has become slower
WAITED = 0.001  # s; the daemon takes 64 KiB in 0.07 ms while it has room, and 0.5 Gbit/s carry them in 1 ms


class UplinkMeter:
    """``begin`` and ``end`` around every piece of bulk."""

    def __init__(self) -> None:
        self._under_way = 0
        self._since = 0.0
        self._busy, self._nbytes = 0.0, 0
        self._rates: deque[float] = deque(maxlen=KEPT)
        self._delivered: list[float] = []  # rates of the frames before the one under way
        self._fastest = self._lasted = 0.0  # the rate of that one, and for how long it was counted

    def begin(self, now: float) -> None:
        """Note that a piece is to be sent."""
        self._advance(now)
        self._under_way += 1

    def end(self, began: float, now: float, nbytes: int) -> None:
        """Note that it was taken, or not: then ``nbytes`` is 0."""
        self._advance(now)
        self._under_way -= 1
        self._nbytes += nbytes if now - began > WAITED else 0
        if self._busy >= WINDOW:
            self._rates.append(self._nbytes / self._busy)
            self._busy, self._nbytes = 0.0, 0

    @property
    def is_idle(self) -> bool:
        """Tell whether no piece is under way."""
        return not self._under_way

    def begin_delivery(self) -> None:
        """Note that a frame is to be sent while none is under way."""
        self._delivered, self._fastest, self._lasted = self._frame_rates(), 0.0, 0.0

    def add_delivery(self, nbytes: int, seconds: float) -> None:
        """Note that copies of so many bytes had arrived so long after the first of them was begun."""
        self._fastest = max(self._fastest, nbytes / max(seconds, BRIEF))
        self._lasted = max(self._lasted, seconds)

    @property
    def bytes_per_second(self) -> float | None:
        """The estimate; None: no transfer has filled the link yet."""
        known = self._frame_rates()
        return _second_best(known) if known else max(self._rates, default=None)

    def _frame_rates(self) -> list[float]:
        before = self._delivered
        tells = self._lasted >= BRIEF or self._fastest > (_second_best(before) if before else 0.0)
        times = min(FRAMES - 1, 1 + int(self._lasted / LONG))
        return [*before, *[self._fastest] * times][-FRAMES:] if tells else before

    def _advance(self, now: float) -> None:
        if self._under_way:
            self._busy += now - self._since
        self._since = now


def _second_best(rates: list[float]) -> float:
    return sorted(rates)[-2:][0]


def lease_bits(bytes_per_second: float | None) -> int:
    """Return bit/s as a lease tells it: two digits, so that noise is no news to everybody; 0: not measured."""
    if not bytes_per_second:
        return 0
    bits = round(8 * bytes_per_second)
    return round(bits, 2 - len(str(bits)))
