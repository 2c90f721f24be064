"""Frames to everybody, by as few bytes of each uplink as can be: whole to each peer, or in pieces by way of others."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import anyio

from decentral.consensus.chain import Head
from decentral.dissemination.reassembly import PAUSE, SMALLEST_PIECE, Arrivals, Part, Reassembly
from decentral.dissemination.spread import TOGETHER, UNKNOWN_RATE, LinesOf, Spread, Ways, spread
from decentral.errors import PayloadError, PeerUnreachable, TransportError
from decentral.flow.pacing import Ack, Sending, SendQueue, UplinkMeter, Window, order_after
from decentral.flow.waiting import Changes
from decentral.transport import Transport
from decentral.transport.requests import notify, request, sequence, serve_sequences
from decentral.wire.frames import HEADER_NBYTES, Frame, FrameKind, Header
from decentral.wire.keys import PeerId
from decentral.wire.pieces import AT_ONCE, PIECE_HEAD_NBYTES, Piece, Want, read_piece

# ---- whole frames, to every peer and from any holder ----
#
# Right for sparse frames. A contributor pushes its frame to each member; whoever misses one, or some of it, asks any
# holder. Sent per peer and round: ``(N-1) * frame``; received the same. Grows with N: groups bound it.

PUSH = "/decentral/frame/1"
FETCH = "/decentral/fetch/1"
ANSWER = 10.0  # s until a path is there, and until a holder begins to answer

OnFailed = Callable[[PeerId], Awaitable[None]]


async def push(
    transport: Transport,
    peers: Sequence[PeerId],
    data: bytes,
    on_failed: OnFailed,
    on_handled: Callable[[], None],
    turns: SendQueue,
) -> None:
    """Send one frame to every peer, however long it takes; ``on_failed`` is told of who cannot be reached.

    ``on_handled`` is called when one of them has it, as far as they say so within a while. ``turns``: when to begin.
    """

    async def one(peer: PeerId, sending: Sending) -> None:
        def handled() -> None:
            turns.arrive(sending)
            on_handled()

        try:
            await notify(transport, peer, PUSH, data, timeout=ANSWER, on_handled=handled)
        except TransportError:
            await on_failed(peer)
        finally:
            turns.end()

    async with anyio.create_task_group() as group:
        for peer in peers:
            group.start_soon(one, peer, await turns.begin(len(data)))


async def fetch(transport: Transport, holder: PeerId, want: Want, limit: int, at_once: int = AT_ONCE) -> bytes | None:
    """Return what ``holder`` answers, asked for ``at_once`` bytes at a time; None when it has nothing of that frame.

    ``limit`` bounds all of it, in bytes.
    """
    answers: list[bytes] = []
    for part in want.cut(at_once) if want.ranges else (want,):
        answer = await _ask(transport, holder, part, limit)
        if answer is None:
            return None
        answers.append(answer)
    if not want.ranges:
        await _ask_for_rest(transport, holder, want.frame, limit, at_once, answers)
    return answers[0] if len(answers) == 1 else b"".join(answers)


async def _ask_for_rest(
    transport: Transport, holder: PeerId, frame: bytes, limit: int, at_once: int, answers: list[bytes]
) -> None:
    """Ask for the rest of a frame that is longer than one answer; its length is known once an answer is shorter."""
    at = len(answers[0])
    while len(answers[-1]) == at_once and at < limit:
        answer = await _ask(transport, holder, Want(frame, ((at, at + at_once),)), limit)
        if answer is None:  # it ended with the last one, or the holder did: its hash tells
            return
        answers.append(answer)
        at += len(answer)


async def _ask(transport: Transport, holder: PeerId, want: Want, limit: int) -> bytes | None:
    try:
        data = await request(transport, holder, FETCH, want.to_bytes(), limit=limit, timeout=ANSWER)
    except (TransportError, PayloadError):
        return None
    return data or None


# ---- our own frame in pieces ----
#
# Some are to be passed on, the rest goes to everybody, to each peer one after the other on one stream.
#
# What came first is passed on while the next is under way. Pieces for a peer that cannot be reached go to the others
# who pass on, or to everybody when nobody is left.
#
# Which way is best is known once the uplink is. Until then it goes to everybody: a second, say, of what would
# otherwise be seven copies through an uplink for two.
#
# A thin peer sends little faster than its uplink carries: with two seconds of pieces waiting in front of it, it missed
# nine rounds of twenty, probably as the acknowledgements of what others sent to it had to wait, too.

PIECE = "/decentral/piece/1"
UNMEASURED_PIECE, LARGEST_PIECE = 1 << 15, 1 << 18  # bytes of one: while the uplink is unknown, and at most
LANDING = 1.0  # s; who takes longer may get a piece twice
REST = 2.0  # s in which nothing follows a stream that ended: time for a punch
HASTE = 1.25  # times the estimated rate, which is a lower bound and grows when more goes through
THIN = 4  # times as much given to others to pass on as to each: less than a third of the usual uplink, among eight
OFTEN = 1.0  # s in which each peer should get one; with 0.25 eight peers took a quarter more processor for a gather

PieceRange = tuple[int, int, bool]  # [start, stop) of the frame, and whether it is to be passed on
Uplink = Callable[[], float | None]  # bytes/s; None: not known
Arrived = Callable[[Ack, bool], None]  # told of a piece that a peer says it has, and whether it has all it should


@dataclass(slots=True, eq=False)
class Passing:
    """A frame on its way to all of ``peers``; those in ``failed`` could not be reached, or refused it."""

    transport: Transport
    window: Window
    peers: Sequence[PeerId]
    data: bytes
    arrived: Arrived
    on_failed: OnFailed  # told of who could not be reached
    failed: set[PeerId] = field(default_factory=set)
    _moved_at: float = field(default_factory=anyio.current_time)
    _pace: _Pace = field(default_factory=lambda: _Pace(lambda: float("inf")))

    async def send(self, way_of: Callable[[int], Spread], uplink: Uplink) -> None:
        """Send the frame; ``way_of`` says which way so many bytes go best, its first peer being this one, then
        ``peers``.
        """
        given = {peer: _pieces_between(0, len(self.data), UNMEASURED_PIECE, False) for peer in self.peers}
        if uplink() is None:
            await self._send_all(given, lambda: uplink() is not None)
        starts = (_next_start(ranges, len(self.data)) for ranges in given.values())
        furthest = max(starts, default=len(self.data))  # for nobody nothing is left to send
        if (rate := uplink()) is None or furthest == len(self.data):
            return await self._send_all(given)
        behind = {peer: [range_ for range_ in ranges if range_[0] < furthest] for peer, ranges in given.items()}
        await self._go_on(behind, furthest, way_of(len(self.data) - furthest), uplink, rate)

    def comes_to(self, peer: PeerId) -> bool:
        """Tell whether ``peer`` gets the frame, from here or from others, with no need to ask for it."""
        return peer in self.peers and peer not in self.failed and anyio.current_time() < self._moved_at + PAUSE

    async def _go_on(
        self, behind: dict[PeerId, list[PieceRange]], start: int, way: Spread, uplink: Uplink, rate: float
    ) -> None:
        size = min(LARGEST_PIECE, max(SMALLEST_PIECE, int(rate * OFTEN / len(self.peers))))
        given, passed = {}, start + way.direct
        for peer, nbytes in zip(self.peers, way.passed[1:], strict=True):
            direct = _pieces_between(start, start + way.direct, size, False)
            given[peer] = behind[peer] + _pieces_between(passed, passed + nbytes, size, True) + direct
            passed += nbytes
        helpers = [peer for peer, nbytes in zip(self.peers, way.passed[1:], strict=True) if nbytes]
        if helpers and THIN * way.direct < sum(way.passed):
            self._pace = _Pace(lambda: HASTE * (uplink() or rate))
        while any(given.values()):
            await self._send_all(given)
            lost = [range_ for peer in given.keys() & self.failed for range_ in given[peer] if range_[2]]
            given = self._dealt(lost, [peer for peer in helpers if peer not in self.failed])

    async def _send_all(
        self, given: dict[PeerId, list[PieceRange]], enough: Callable[[], bool] = lambda: False
    ) -> None:
        """Send all pieces, and take off ``given`` what peers say they have; when it is ``enough``, waits a little for
        what is under way.
        """
        async with anyio.create_task_group() as group:

            def goes_on() -> bool:
                if enough():
                    group.cancel_scope.deadline = min(group.cancel_scope.deadline, anyio.current_time() + LANDING)
                return not enough()

            for peer, ranges in given.items():
                if peer not in self.failed:
                    group.start_soon(self._send_to, peer, ranges, goes_on)

    def _dealt(self, lost: list[PieceRange], helpers: Sequence[PeerId]) -> dict[PeerId, list[PieceRange]]:
        if helpers:
            return {peer: lost[turn :: len(helpers)] for turn, peer in enumerate(helpers)}
        direct = [(start, stop, False) for start, stop, _ in lost]
        return {peer: list(direct) for peer in self.peers if peer not in self.failed}

    async def _send_to(self, peer: PeerId, ranges: list[PieceRange], goes_on: Callable[[], bool]) -> None:
        """Send one peer its pieces; go on after a rest, with small steps, when a stream ended: a relay may end each
        connection after 128 KiB.

        What was under way then is lost, so with more than that at a time nothing ever arrives; and without a rest no
        such connection lives long enough for a punch.
        """
        window, ended = self.window, False
        while ranges and goes_on():
            left = len(ranges)
            try:
                await self._send_at_once(peer, ranges, goes_on, window)
            except PeerUnreachable:
                self.failed.add(peer)
                return await self.on_failed(peer)
            except (TransportError, PayloadError):
                if ended and len(ranges) == left:  # it stands elsewhere, say, and will ask for the frame if it wants it
                    self.failed.add(peer)
                    return
                window, ended = Window(lambda: None), True
                await anyio.sleep(REST)
                ranges[:] = [
                    step for range_ in ranges for step in _pieces_between(*range_[:2], UNMEASURED_PIECE, range_[2])
                ]

    async def _send_at_once(
        self, peer: PeerId, ranges: list[PieceRange], goes_on: Callable[[], bool], window: Window
    ) -> None:
        def handled(landing: Ack) -> None:
            del ranges[0]
            self._moved_at = anyio.current_time()
            self.arrived(landing, not ranges)

        async with sequence(self.transport, peer, PIECE, ANSWER, window, handled) as send:
            for start, stop, pass_on in tuple(ranges):
                if not goes_on():
                    break
                piece = Piece(self.data[:HEADER_NBYTES], len(self.data), start, pass_on, self.data[start:stop])
                await self._pace.wait(stop - start)
                await send(piece.to_bytes())


class _Pace:
    """A rate in bytes per second, over all receivers together."""

    def __init__(self, rate: Callable[[], float]) -> None:
        self._rate, self._free_at = rate, 0.0

    async def wait(self, nbytes: int) -> None:
        """Wait until it is the turn of ``nbytes``."""
        now = anyio.current_time()
        turn = max(now, self._free_at)
        self._free_at = turn + nbytes / self._rate()
        await anyio.sleep(turn - now)


def _pieces_between(start: int, stop: int, size: int, pass_on: bool) -> list[PieceRange]:
    return [(at, min(at + size, stop), pass_on) for at in range(start, stop, size)]


def _next_start(ranges: Sequence[PieceRange], end: int) -> int:
    return ranges[0][0] if ranges else end


# ---- pieces of others' frames ----


class Forwarder:
    """The pieces that this peer passes on as they come: each frame's on a stream to each of the others.

    A peer that cannot be reached will ask.
    """

    def __init__(
        self, transport: Transport, window: Window, handled: Callable[[Ack], None], spawn: Callable[..., None]
    ) -> None:
        self.transport, self.window, self._on_handled, self._spawn = transport, window, handled, spawn
        self._ways: dict[tuple[int, PeerId], list[_Way]] = {}  # (round, owner)

    def take(self, piece: Piece, others: Sequence[PeerId]) -> None:
        """Give a piece to all of ``others``."""
        key = (piece.header.round, piece.header.sender)
        if key not in self._ways:
            self._ways[key] = [self._way_to(peer) for peer in others]
        data = Piece(piece.head, piece.nbytes, piece.start, False, piece.data).to_bytes()
        for way in self._ways[key]:
            way.put(data)

    def finish(self, round_: int, owner: PeerId) -> None:
        """End the streams of a frame of which no more pieces come."""
        for way in self._ways.pop((round_, owner), ()):
            way.put(None)

    def forget_before(self, round_: int) -> None:
        """End the streams of rounds before ``round_``: no more pieces of them come."""
        for key in [key for key in self._ways if key[0] < round_]:
            self.finish(*key)

    def _way_to(self, peer: PeerId) -> _Way:
        way = _Way()
        self._spawn(self._forward, peer, way)
        return way

    async def _forward(self, peer: PeerId, way: _Way) -> None:
        try:
            async with sequence(self.transport, peer, PIECE, ANSWER, self.window, self._on_handled) as send:
                while (piece := await way.next()) is not None:
                    await send(piece)
        finally:
            way.close()


class _Way:
    """Pieces for one peer, in order: a frame's bytes at most, as in its reassembly."""

    def __init__(self) -> None:
        self._pieces: deque[bytes | None] | None = deque()
        self._news = Changes()

    def put(self, piece: bytes | None) -> None:
        """Add a piece; None: there are no more."""
        if self._pieces is not None:
            self._pieces.append(piece)
            self._news.tell()

    async def next(self) -> bytes | None:
        """Wait for the oldest piece; None: there are no more."""
        while not self._pieces:
            await self._news.next()
        return self._pieces.popleft()

    def close(self) -> None:
        """Keep no more pieces: that peer could not be reached, or has all."""
        self._pieces = None


# ---- arrivals elsewhere, for the estimate of the uplink ----
#
# All frames that are under way count together.
#
# Counted from when the first stream was open over there, so neither the way nor what waited on it before counts, and
# for each quarter of a second after it. What had arrived by any of them, over the time since, is a rate that the
# uplink has; the highest is that of the frame. Not what arrived within some seconds: of a stream whose first answers
# were slow, early arrivals count as late ones, beside those that were late, and a link of 238 kB/s was taken for one
# of 388.
#
# Believed after ``SURE`` seconds or when most have a whole copy: a shaper or a buffer lets through at once what the
# line carries in a tenth of a second, and the first copy of a small frame told 5.8 MB/s of a line of 2.5. One slow
# receiver is not waited for.

SURE = 2.0  # s
MOST = 0.75  # of the copies
BIN = 0.25  # s


class Deliveries:
    """The arrivals of one peer's frames, reported to ``meter``."""

    def __init__(self, meter: UplinkMeter) -> None:
        self._meter = meter
        self._frames = 0
        self._copies = self._whole = 0  # that are to arrive, and that have
        self._began: float | None = None  # nothing arrived before; None: not known yet
        self._last = 0.0  # s after that, of what arrived last
        self._nbytes: list[int] = []  # by the end of each bin

    @contextmanager
    def of_a_frame(self, copies: int) -> Iterator[None]:
        """Count a frame as on its way to so many peers while it is sent."""
        if not self._frames:
            self._began, self._last, self._nbytes = None, 0.0, []
            self._copies = self._whole = 0
            self._meter.begin_delivery()
        self._frames += 1
        self._copies += copies
        try:
            yield
        finally:
            self._frames -= 1

    def arrived(self, landing: Ack, whole: bool) -> None:
        """Note that a peer has so many bytes more, and perhaps all that it should get."""
        self._begin(landing.opened)
        self._count(landing, whole)

    def passed_on(self, landing: Ack) -> None:
        """Note that a peer has so many bytes of another's frame from here."""
        if self._frames and self._began is not None and landing.at >= self._began:
            self._count(landing, False)

    def _begin(self, at: float) -> None:
        """Begin to measure: answers that came faster may tell of an earlier time."""
        if self._began is None:
            self._began = at
        earlier = int((self._began - at) / BIN)
        if earlier > 0:
            self._nbytes[:0] = [0] * earlier
            self._began -= earlier * BIN
            self._last += earlier * BIN

    def _count(self, landing: Ack, whole: bool) -> None:
        assert self._began is not None, "it begins with the first arrival"
        seconds = max(0.0, landing.at - self._began)
        self._last = max(self._last, seconds)
        turn = int(seconds / BIN)
        self._nbytes += [self._nbytes[-1] if self._nbytes else 0] * (turn + 1 - len(self._nbytes))
        for later in range(turn, len(self._nbytes)):
            self._nbytes[later] += landing.nbytes
            if (later + 1) * BIN >= SURE:
                self._meter.add_delivery(self._nbytes[later], (later + 1) * BIN)
        self._whole += whole
        if whole and self._whole >= MOST * self._copies:
            self._meter.add_delivery(self._nbytes[-1], self._last)


# ---- the broadcast of one peer ----
#
# Contributions go by way of others: sent in pieces where the own uplink is thin, passed on, and put together.

PIECED = 1 << 16  # bytes of a contribution that goes in pieces; smaller ones fit into any buffer, and are soon gone


class Receiver(Protocol):
    """The receiver of frames that come: the rounds of one peer."""

    def chain_head(self) -> Head | None:
        """Return the head of its chain; None while it is in step with no chain, and takes nothing."""
        ...

    def max_nbytes(self, header: Header, head: Head) -> int:
        """Return the bytes that the body of a frame may have. Raises PayloadError for one that belongs to nothing
        here.
        """
        ...

    async def take(self, data: bytes, wanted: bytes | None = None) -> None:
        """Check a frame's bytes and hold it; ``wanted``: the hash it must have. Raises PayloadError."""
        ...

    def spawn(self, work: Callable[..., object], *args: object) -> None:
        """Do ``work(*args)`` beside the rounds; it is given up when they end."""
        ...


@dataclass(frozen=True, slots=True)
class Went:
    """The way of a frame, and the seconds in which its owner should send it to everybody itself."""

    by_others: bool
    alone: float


class ChunkedBroadcast:
    """The exchange of frames in pieces: sends this peer's, passes on pieces of others', and puts together what
    comes.
    """

    def __init__(
        self, transport: Transport, me: PeerId, arrivals: Arrivals, lines_of: LinesOf, receiver: Receiver
    ) -> None:
        self.transport, self.me, self.arrivals, self.lines_of = transport, me, arrivals, lines_of
        self.receiver = receiver
        self.reassembly = Reassembly(self._check)
        self.window, self.turns = Window(self._uplink), SendQueue()
        self._deliveries = Deliveries(transport.meter)
        self.forwarder = Forwarder(transport, self.window, self._deliveries.passed_on, receiver.spawn)
        self._given: list[tuple[bytes, Passing]] = []  # frames on their way in pieces, and their hashes
        self._ways = Ways()
        self._went: dict[bytes, Went] = {}  # frames of the round for which there was a choice
        most = PIECE_HEAD_NBYTES + LARGEST_PIECE
        serve_sequences(transport, PIECE, self._on_piece, limit=most, watch=arrivals.push)

    async def give(self, frame: Frame, others: Sequence[PeerId], on_failed: OnFailed) -> None:
        """Send a frame to all, by way of others where that is sooner; ``on_failed`` is told of who is not reached."""
        if not others:  # nor does a frame for nobody say anything of the uplink
            return
        data, peers = frame.data, order_after(others, self.me)
        with self._deliveries.of_a_frame(len(peers)):
            if frame.header.kind == FrameKind.CONTRIBUTION and len(data) >= PIECED:
                await self._give_in_pieces(frame.hash, data, peers, on_failed)
            else:
                await push(self.transport, peers, data, on_failed, self._on_handled(data), self._turns_of(frame))

    async def _give_in_pieces(self, frame: bytes, data: bytes, peers: Sequence[PeerId], on_failed: OnFailed) -> None:
        passing = Passing(self.transport, self.window, peers, data, self._deliveries.arrived, on_failed)
        self._given.append((frame, passing))
        try:
            await passing.send(lambda nbytes: self._way_of(frame, nbytes, peers, nbytes == len(data)), self._uplink)
        finally:
            self._given.remove((frame, passing))

    @property
    def under_way(self) -> tuple[bytes, ...]:
        """Return the hashes of the frames that are on their way from here in pieces."""
        return tuple(frame for frame, _ in self._given)

    def comes_to(self, peer: PeerId, frame: bytes) -> bool:
        """Tell whether ``peer`` gets that frame from here in pieces, or from those who pass them on."""
        return any(passing.comes_to(peer) for given, passing in self._given if given == frame)

    def part(self, round_: int, owner: PeerId) -> Part | None:
        """Return the part of a frame that came in pieces, while it is not whole."""
        return self.reassembly.part(round_, owner)

    def fetched(self, frame: bytes, owner: PeerId) -> None:
        """Note that a holder sent what was missing of a frame: no more pieces are needed."""
        self.reassembly.right(frame[:HEADER_NBYTES])
        self.arrivals.whole(owner)

    def _way_of(self, frame: bytes, nbytes: int, peers: Sequence[PeerId], from_the_start: bool) -> Spread:
        lines = self.lines_of((self.me, *peers))
        by_others, to_everybody = spread(nbytes, lines, 0), Spread(nbytes, (0,) * len(lines))
        if by_others is None:
            return to_everybody
        if not from_the_start:  # the first seconds of such a frame say nothing of either way
            return by_others
        went = self._went[frame] = Went(self._ways.choose(), nbytes * len(peers) / lines[0].rate)
        return by_others if went.by_others else to_everybody

    def note_seconds_to_commit(self, frame: bytes, seconds: float, late: float) -> None:
        """Note how long after its first byte a frame of this peer was in a commit, infinity: in none; ``late``: how
        long after it the last of the others offered.
        """
        went = self._went.get(frame)
        if went is not None and late <= TOGETHER * went.alone:
            self._ways.took(went.by_others, seconds / went.alone)

    def _on_handled(self, data: bytes) -> Callable[[], None]:
        began = anyio.current_time()
        return lambda: self._deliveries.arrived(Ack(len(data), began, anyio.current_time()), True)

    def _turns_of(self, frame: Frame) -> SendQueue:
        """Give a contribution turns that begin everywhere at once: an offer names it, and peers that see nothing of it
        ask.
        """
        return self.turns if frame.header.kind in (FrameKind.SLICE, FrameKind.RESULT) else SendQueue()

    def _uplink(self) -> float | None:
        rate = self.lines_of((self.me,))[0].rate
        return rate if rate > UNKNOWN_RATE else None

    def forget_before(self, round_: int) -> None:
        """Drop what belongs to rounds before ``round_``."""
        self.reassembly.forget_before(round_)
        self.forwarder.forget_before(round_)
        self._went.clear()  # of the round that is over

    async def _on_piece(self, peer: PeerId, data: bytes) -> None:
        """Take a piece: pass it on when its owner asks for that, and take the frame with the last one."""
        head = self.receiver.chain_head()
        if head is None:
            return
        piece = read_piece(data)
        round_, owner = piece.header.round, piece.header.sender
        fresh, whole = self.reassembly.add(piece, peer)
        if fresh:
            self.arrivals.piece(owner)
        if fresh and piece.pass_on and peer == owner:
            self.forwarder.take(piece, [member for member in head.members if member not in (self.me, owner)])
        if whole is not None:
            self.forwarder.finish(round_, owner)
            try:
                await self._take_whole(piece.head, whole)
            finally:
                self.arrivals.whole(owner)  # not before it is kept: who waits for it would fetch it

    async def _take_whole(self, head: bytes, whole: bytes) -> None:
        try:
            await self.receiver.take(whole)
            self.reassembly.right(head)
        except PayloadError:
            again = self.reassembly.wrong(head)
            if again is None:
                raise
            await self._take_whole(head, again)

    def _check(self, header: Header) -> int:
        """Raise PayloadError unless it is a member's contribution, one of a sender in each round: no others come in
        pieces.
        """
        head = self.receiver.chain_head()
        if head is None or header.kind != FrameKind.CONTRIBUTION or header.sender not in head.members:
            raise PayloadError("piece of what is no member's contribution; drop it")
        return self.receiver.max_nbytes(header, head)
