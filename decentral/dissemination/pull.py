"""Frames that are held here, and requests for what is not: frames by hash, a snapshot's chunks from many donors."""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict, deque
from collections.abc import Awaitable, Callable, Container, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import anyio

from decentral.consensus.round_state import Fetch
from decentral.dissemination.broadcast import FETCH, ChunkedBroadcast, Receiver, fetch
from decentral.dissemination.reassembly import NOTHING_CAME, Arrivals
from decentral.dissemination.spread import thin_last
from decentral.errors import DecentralError, PayloadError, TransportError
from decentral.flow.waiting import Changes, Offload
from decentral.transport import Transport
from decentral.transport.requests import serve_requests
from decentral.wire.frames import Frame
from decentral.wire.keys import Digest, PeerId
from decentral.wire.pieces import WANT_NBYTES, Want, read_want

# ---- frames held here ----
#
# They are of the round in progress, and of the last commits for those who missed them.
#
# Frames of the open round are what a commit is applied from, so they are never dropped for want of room: the past goes
# first. Only when the open round itself outgrows what its members can need does the greediest sender lose its newest
# frame, those that are no members before all others: whoever sends frames nobody asked for fills its own share and no
# more.

PER_SENDER = 64  # frames of one sender in one round: one contribution, or the results of some plans


class FrameStore:
    """The frames that this peer holds, by hash, those of past rounds dropped first."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity  # bytes of all frames together
        self.nbytes = 0
        self._open, self._room = 0, capacity
        self._members: Container[PeerId] = ()
        self._frames: OrderedDict[Digest, Frame] = OrderedDict()
        self._count: Counter[tuple[PeerId, int]] = Counter()

    def __contains__(self, frame: Digest) -> bool:
        return frame in self._frames

    def get(self, frame: Digest) -> Frame | None:
        """Return the frame with that hash, or None."""
        return self._frames.get(frame)

    def open(self, round_: int, room: int, members: Container[PeerId] = ()) -> None:
        """Begin round ``round_`` of ``members``; frames from it on may take ``room`` bytes even beyond the
        capacity.
        """
        self._open, self._room, self._members = round_, max(room, self.capacity), members

    def has_of(self, sender: PeerId) -> bool:
        """Tell whether a frame of ``sender`` is here for the round in progress, or the next."""
        return any(self._count[sender, round_] for round_ in (self._open, self._open + 1))

    def add(self, frame: Frame) -> list[Digest]:
        """Hold ``frame``; returns what had to go from the open round or later ones, most often nothing.

        Raises PayloadError when its sender has too many in this round already.
        """
        if frame.hash in self._frames:
            return []
        key = (frame.header.sender, frame.header.round)
        if self._count[key] >= PER_SENDER:
            raise PayloadError(f"more than {PER_SENDER} frames of one sender in round {key[1]}; drop its frames")
        self._frames[frame.hash] = frame
        self._count[key] += 1
        self.nbytes += frame.nbytes
        return self._make_room()

    def _make_room(self) -> list[Digest]:
        if self.nbytes <= self.capacity:
            return []
        past = [key for key, frame in self._frames.items() if frame.header.round < self._open]
        for key in past:
            if self.nbytes <= self.capacity:
                return []
            self._drop(key)
        dropped = []
        while self.nbytes > self._room and len(self._frames) > 1:
            dropped.append(self._newest_of_the_greediest())
            self._drop(dropped[-1])
        return dropped

    def _newest_of_the_greediest(self) -> Digest:
        sizes: Counter[PeerId] = Counter()
        for frame in self._frames.values():
            sizes[frame.header.sender] += frame.nbytes
        outsiders = [(sender, nbytes) for sender, nbytes in sizes.items() if sender not in self._members]
        greediest = max(outsiders or sizes.items(), key=lambda item: item[1])[0]
        return next(key for key, frame in reversed(self._frames.items()) if frame.header.sender == greediest)

    def forget_before(self, round_: int) -> None:
        """Drop frames of rounds before ``round_``."""
        for key in [key for key, frame in self._frames.items() if frame.header.round < round_]:
            self._drop(key)

    def _drop(self, key: Digest) -> None:
        frame = self._frames.pop(key)
        self.nbytes -= frame.nbytes
        owner = (frame.header.sender, frame.header.round)
        self._count[owner] -= 1
        if self._count[owner] <= 0:
            del self._count[owner]


# ---- frames that did not come ----
#
# They are asked of their holders, and those held here are given to who asks.
#
# Of what came in pieces only the rest is asked for. Who is sending a frame in pieces sends it to nobody a second time:
# four who each lacked some of a thin peer's frame had all of it once more, one of eight on 2 Mbit/s, and the round
# took 94 s.
#
# Once a round has been applied here, its frames are of no use here, and nobody is asked for them: five peers waited for
# the end of a thin one's push, which by then was that of the next frame, and had all of the last one sent again, 9 s of
# its line.


class FrameFetcher:
    """The requests for frames that are missing here, and the answers to peers that miss frames which are here."""

    def __init__(
        self,
        transport: Transport,
        store: FrameStore,
        arrivals: Arrivals,
        broadcast: ChunkedBroadcast,
        receiver: Receiver,
        offload: Offload,
        limit: int,
    ) -> None:
        """``limit``: bytes of the largest frame."""
        self.transport, self.store, self.arrivals, self.broadcast = transport, store, arrivals, broadcast
        self.receiver, self._offload, self._limit = receiver, offload, limit
        self._waiting: dict[int, list[anyio.CancelScope]] = {}  # for frames, by round
        serve_requests(transport, FETCH, self.answer, limit=WANT_NBYTES)

    async def fetch(self, wanted: Fetch) -> None:
        """Get a frame while its round lasts; wait for one that is coming already: asked for again, it would come twice
        and each time slower.
        """
        with self.arrivals.fetch(wanted.frame) as fresh:
            whole = await self._find(wanted) if fresh else None
            if whole is not None:
                await self._keep(whole, wanted.frame, wanted.owner)

    async def ask(self, holder: PeerId, frame: bytes, owner: PeerId, round_: int) -> bool:
        """Get a frame from one holder, also of a round that is over elsewhere. Tell whether the holder had it."""
        whole = await self._ask(holder, frame, owner, round_)
        if whole is not None:
            await self._keep(whole, frame, owner)
        return whole is not None

    async def _keep(self, whole: bytes, frame: bytes, owner: PeerId) -> None:
        await self.receiver.take(whole, frame)
        self.broadcast.fetched(whole, owner)

    async def _find(self, wanted: Fetch) -> bytes | None:
        """Ask one holder after the other; None: no one has it, it came by itself, or its round is over.

        What takes it is not ended with the round: it may be this frame that ends it.
        """
        head = self.receiver.chain_head()
        if head is None or head.round >= wanted.round:
            return None
        waiting = self._waiting.setdefault(wanted.round, [])
        with anyio.CancelScope() as scope:
            waiting.append(scope)
            try:
                for holder in thin_last(wanted.holders, self.broadcast.lines_of(wanted.holders)):
                    await self.arrivals.wait_for_push(wanted.owner)
                    if wanted.frame in self.store:
                        return None
                    if holder == wanted.owner and self.arrivals.is_pushing(holder):
                        continue  # it stands still for now, and would come twice by the same way
                    whole = await self._ask(holder, wanted.frame, wanted.owner, wanted.round)
                    if whole is not None:
                        return whole
            finally:
                waiting.remove(scope)
        return None

    async def _ask(self, holder: PeerId, frame: bytes, owner: PeerId, round_: int) -> bytes | None:
        """Return the whole frame; where what came of it in pieces was forged, all of it is asked for."""
        came = self.broadcast.part(round_, owner)
        for part in (NOTHING_CAME,) if came is None else (came, NOTHING_CAME):
            answer = await fetch(self.transport, holder, Want(frame, part.missing), self._limit)
            if answer is None:
                return None
            if (whole := await self._offload(part.complete, answer, frame)) is not None:
                return whole
        return None

    def forget_before(self, round_: int) -> None:
        """Ask for no frame of rounds before ``round_`` any more, but as one who catches up."""
        for over in [over for over in self._waiting if over < round_]:
            for scope in self._waiting.pop(over):
                scope.cancel()

    async def answer(self, peer: PeerId, data: bytes) -> bytes:
        """Return what ``peer`` is given of the frame that it asks for; nothing while that comes to it anyway."""
        want = read_want(data)
        frame = self.store.get(want.frame)
        if frame is None or self.broadcast.comes_to(peer, frame.hash):
            return b""
        return want.of(frame.data)


# ---- chunks of a snapshot, or of a text ----
#
# They come from several donors at once, each asked for as much at a time as its way to here carries.
#
# A donor's window grows while its answers come as quickly as its quickest one, and shrinks when they wait for one
# another: the way is then full, whether its end or ours is the narrow one. Donors take the next chunk when they have
# room, so a slow one takes few; at the end, whoever is free is asked for what it will bring sooner than the donor that
# owes it. A donor that fails leaves its chunks to the others.
#
# Crosses the wire: one request of 36 bytes per chunk; a chunk more than once only at the end, or when a donor stalls.
#
# Source: the window is that of Brakmo and Peterson, "TCP Vegas: End to End Congestion Avoidance on a Global Internet",
# 1995; the end is BitTorrent's end game (Cohen, "Incentives Build Robustness in BitTorrent", 2003).

FIRST_WINDOW = 1  # chunks asked of a donor of which nothing is known: two would share its way, and look slow
LARGEST_WINDOW = 32  # half the streams that a donor lets one peer open
IN_FLIGHT = 128  # chunks asked of all donors: 32 MiB, 200 MB/s at 160 ms
LEAST_QUEUED, MOST_QUEUED = 0.5, 1.5  # chunks that wait in a donor's way: its own frames wait behind them
LOOK_EVERY = 0.25  # s between looks for new donors, and for chunks that are overdue
_NEVER = float("inf")

Ask = Callable[[PeerId, int], Awaitable[bytes]]


class Chunked(Protocol):
    """A whole that is put together of chunks that come in any order."""

    @property
    def num_chunks(self) -> int:
        """Return the number of its chunks."""

    def missing(self) -> list[int]:
        """Return the numbers of those still to fetch, in order."""

    def add(self, number: int, data: bytes) -> None:
        """Take a chunk. Raises PayloadError for what is not it, DiskError where it cannot be written."""


@dataclass(slots=True)
class StripeSource:
    """The chunks that one donor was asked for, and how it answers."""

    asked: dict[int, float] = field(default_factory=dict)  # chunk -> when, s
    window: float = FIRST_WINDOW  # chunks
    quickest: float = _NEVER  # s from question to answer
    usual: float = _NEVER  # s, smoothed
    _doubling: bool = True

    def note_answer(self, took: float) -> None:
        """Note that one more chunk came, ``took`` seconds after it was asked for."""
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
        """Return the seconds until a chunk it owes may be here; one that is late will be as late again."""
        waited = now - self.asked[number]
        return self.usual - waited if self.usual == _NEVER or waited < self.usual else waited


class Stripes:
    """The plan of which donor is asked for which chunk. Pure: the time comes in."""

    def __init__(self, missing: Sequence[int]) -> None:
        self.missing = dict.fromkeys(missing)
        self.donors: dict[PeerId, StripeSource] = {}
        self._todo = deque(missing)
        self._gone: set[PeerId] = set()

    def meet(self, peers: Sequence[PeerId]) -> None:
        """Ask ``peers``, too, but not those that failed before."""
        for peer in peers:
            if peer not in self._gone:
                self.donors.setdefault(peer, StripeSource())

    def due(self, now: float) -> list[tuple[PeerId, int]]:
        """Return which donor to ask for which chunk now."""
        asks = []
        for peer, donor in self.donors.items():
            while len(donor.asked) < int(donor.window) and self._in_flight() < IN_FLIGHT:
                number = self._next_for(donor, now)
                if number is None:
                    break
                donor.asked[number] = now
                asks.append((peer, number))
        return asks

    def note_chunk(self, peer: PeerId, number: int, now: float) -> list[PeerId]:
        """Note that a chunk is here; return the donors that owe it still and need not send it."""
        donor = self.donors.get(peer)
        if donor is not None and number in donor.asked:
            donor.note_answer(now - donor.asked[number])
        self.missing.pop(number, None)
        owing = [other for other, donor in self.donors.items() if donor.asked.pop(number, None) is not None]
        return [other for other in owing if other != peer]

    def drop(self, peer: PeerId) -> list[int]:
        """Drop a donor that failed: others bring what it owes, which is returned."""
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
    """The tasks that carry out what Stripes plans."""

    def __init__(self, assembler: Chunked, ask: Ask, dropped: Callable[[PeerId, DecentralError], None]) -> None:
        self.assembler, self.ask, self.dropped = assembler, ask, dropped
        self.stripes = Stripes(assembler.missing())
        self.failure: DecentralError | None = None
        self._scopes: dict[tuple[PeerId, int], anyio.CancelScope] = {}
        self._changed = Changes()

    async def run(self, donors: Callable[[], Sequence[PeerId]]) -> None:
        """Fetch until all is here, or nobody is left to ask."""
        async with anyio.create_task_group() as group:
            while self.stripes.missing and self.failure is None:
                self.stripes.meet(donors())
                for peer, number in self.stripes.due(anyio.current_time()):
                    scope = self._scopes[peer, number] = anyio.CancelScope()
                    group.start_soon(self._fetch_one, peer, number, scope)
                if not self.stripes.donors:
                    break
                with anyio.move_on_after(LOOK_EVERY):
                    await self._changed.next()
            group.cancel_scope.cancel()

    async def _fetch_one(self, peer: PeerId, number: int, scope: anyio.CancelScope) -> None:
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
        for other in self.stripes.note_chunk(peer, number, anyio.current_time()):
            self._scopes[other, number].cancel()  # a stream that is closed stops sending

    def _drop(self, peer: PeerId, error: DecentralError) -> None:
        for number in self.stripes.drop(peer):
            self._scopes[peer, number].cancel()
        self.dropped(peer, error)


def in_own_order(me: PeerId, peer: PeerId) -> bytes:
    """Return the key by which ``me`` sorts whom it may ask: each has another order, so that not all ask the same."""
    return hashlib.blake2b(me + peer, digest_size=16).digest()


async def fetch_chunks(
    assembler: Chunked,
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
            f"{len(assembler.missing())} of {assembler.num_chunks} chunks are missing and no donor is left; what came "
            "is kept for the next attempt"
        )
