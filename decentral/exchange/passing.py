"""A frame sent in pieces: some to be passed on, the rest to everybody, to each peer one after the other on one stream.

What came first is passed on while the next is under way. Pieces for a peer that cannot be reached go to the others who
pass on, or to everybody when nobody is left.

They go little faster than the uplink carries them. What waits in the buffers of seven connections holds up what others
need to send to this peer, acknowledgements and the windows of their streams, for as long as it takes to leave: frames
to a peer with 2 Mbit/s stood still for over two seconds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import anyio

from decentral.errors import PayloadError, TransportError
from decentral.exchange.gather import ANSWER, OnFailed
from decentral.exchange.spread import Spread
from decentral.transport import Transport
from decentral.transport.sequences import sequence
from decentral.wire.frames import HEADER_NBYTES
from decentral.wire.keys import PeerId
from decentral.wire.pieces import Piece

PIECE = "/decentral/piece/1"
SMALLEST, LARGEST = 1 << 12, 1 << 18  # bytes of a piece
OFTEN = 0.5  # s in which each peer should get one: smaller ones spend more on their heads
HASTE = 1.25  # times the estimated rate, which is a lower bound and grows when more goes through

Range = tuple[int, int, bool]  # [start, stop) of the frame, and whether it is to be passed on


@dataclass(slots=True)
class Passing:
    """One frame on its way to all of ``peers``; those in ``failed`` could not be reached."""

    transport: Transport
    peers: Sequence[PeerId]
    data: bytes
    arrived: Callable[[int], None]  # told of bytes that a peer says it has
    on_failed: OnFailed
    failed: set[PeerId] = field(default_factory=set)
    _pace: _Pace = field(init=False)

    async def send(self, way: Spread, me: int, rate: float) -> None:
        """Send it as ``way`` says, whose ``me``-th peer is this one and not in ``peers``; ``rate`` in bytes/s."""
        size = min(LARGEST, max(SMALLEST, int(rate * OFTEN / len(self.peers))))
        self._pace = _Pace(HASTE * rate)
        given, start = {}, way.direct
        shares = [nbytes for number, nbytes in enumerate(way.passed) if number != me]
        for peer, nbytes in zip(self.peers, shares, strict=True):
            given[peer] = [*_cut(start, start + nbytes, size, True), *_cut(0, way.direct, size, False)]
            start += nbytes
        helpers = [peer for peer, nbytes in zip(self.peers, shares, strict=True) if nbytes]
        while any(given.values()):
            lost = await self._send_all(given)
            given = self._dealt(lost, [peer for peer in helpers if peer not in self.failed])

    async def _send_all(self, given: dict[PeerId, list[Range]]) -> list[Range]:
        """Returns what somebody was to pass on who could not be reached."""
        async with anyio.create_task_group() as group:
            for peer, ranges in given.items():
                group.start_soon(self._send_to, peer, ranges)
        return [range_ for peer in given.keys() & self.failed for range_ in given[peer] if range_[2]]

    def _dealt(self, lost: list[Range], helpers: Sequence[PeerId]) -> dict[PeerId, list[Range]]:
        if helpers:
            return {peer: lost[turn :: len(helpers)] for turn, peer in enumerate(helpers)}
        direct = [(start, stop, False) for start, stop, _ in lost]
        return {peer: direct for peer in self.peers if peer not in self.failed}

    async def _send_to(self, peer: PeerId, ranges: list[Range]) -> None:
        if not ranges:
            return
        try:
            async with sequence(self.transport, peer, PIECE, ANSWER) as send:
                for start, stop, pass_on in ranges:
                    piece = Piece(self.data[:HEADER_NBYTES], len(self.data), start, pass_on, self.data[start:stop])
                    await self._pace.wait(stop - start)
                    await send(piece.to_bytes())
            self.arrived(sum(stop - start for start, stop, _ in ranges))
        except (TransportError, PayloadError):
            self.failed.add(peer)
            await self.on_failed(peer)


class _Pace:
    """So many bytes per second, whoever sends them."""

    def __init__(self, rate: float) -> None:
        self._rate, self._free_at = rate, 0.0

    async def wait(self, nbytes: int) -> None:
        """Until it is the turn of ``nbytes``."""
        now = anyio.current_time()
        turn = max(now, self._free_at)
        self._free_at = turn + nbytes / self._rate
        await anyio.sleep(turn - now)


class Forwarder:
    """Passes pieces on as they come, each frame's on a stream to each of the others. Who cannot be reached will ask."""

    def __init__(self, transport: Transport, spawn: Callable[..., None]) -> None:
        self.transport, self._spawn = transport, spawn
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
        """No more pieces of that frame come."""
        for way in self._ways.pop((round_, owner), ()):
            way.put(None)

    def forget_before(self, round_: int) -> None:
        """No more pieces of rounds before ``round_`` come."""
        for key in [key for key in self._ways if key[0] < round_]:
            self.finish(*key)

    def _way_to(self, peer: PeerId) -> _Way:
        way = _Way()
        self._spawn(self._forward, peer, way)
        return way

    async def _forward(self, peer: PeerId, way: _Way) -> None:
        try:
            async with sequence(self.transport, peer, PIECE, ANSWER) as send:
                while (piece := await way.next()) is not None:
                    await send(piece)
        finally:
            way.close()


class _Way:
    """Pieces for one peer, in order: a frame's bytes at most, as in the puzzle."""

    def __init__(self) -> None:
        self._pieces: deque[bytes | None] | None = deque()
        self._news = anyio.Event()

    def put(self, piece: bytes | None) -> None:
        """Add one; None: there are no more."""
        if self._pieces is not None:
            self._pieces.append(piece)
            self._news.set()

    async def next(self) -> bytes | None:
        """The oldest; None: there are no more."""
        while not self._pieces:
            self._news = anyio.Event()
            await self._news.wait()
        return self._pieces.popleft()

    def close(self) -> None:
        """Keep nothing more: that peer could not be reached, or has all."""
        self._pieces = None


def _cut(start: int, stop: int, size: int, pass_on: bool) -> Iterator[Range]:
    return ((at, min(at + size, stop), pass_on) for at in range(start, stop, size))
