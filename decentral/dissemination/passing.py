"""A frame sent in pieces: some to be passed on, the rest to everybody, to each peer one after the other on one stream.

What came first is passed on while the next is under way. Pieces for a peer that cannot be reached go to the others who
pass on, or to everybody when nobody is left.

Which way is best is known once the uplink is. Until then it goes to everybody: a second, say, of what would otherwise
be seven copies through an uplink for two.

A thin peer sends little faster than its uplink carries: with two seconds of pieces waiting in front of it, it missed
nine rounds of twenty, probably as the acknowledgements of what others sent to it had to wait, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import anyio

from decentral.dissemination.arrivals import PAUSE
from decentral.dissemination.gather import ANSWER, OnFailed
from decentral.dissemination.reassembly import SMALLEST
from decentral.dissemination.spread import Spread
from decentral.errors import PayloadError, PeerUnreachable, TransportError
from decentral.flow.window import Ack, Window
from decentral.transport import Transport
from decentral.transport.sequences import sequence
from decentral.wire.frames import HEADER_NBYTES
from decentral.wire.keys import PeerId
from decentral.wire.pieces import Piece

PIECE = "/decentral/piece/1"
UNMEASURED, LARGEST = 1 << 15, 1 << 18  # bytes of a piece
LANDING = 1.0  # s; who takes longer may get a piece twice
REST = 2.0  # s in which nothing follows a stream that ended: time for a punch
HASTE = 1.1  # times the estimated rate, which is a lower bound and grows when more goes through
THIN = 4  # times as much given to others to pass on as to each: less than a third of the usual uplink, among eight
OFTEN = 1.0  # s in which each peer should get one; with 0.25 eight peers took a quarter more processor for a gather

Range = tuple[int, int, bool]  # [start, stop) of the frame, and whether it is to be passed on
Uplink = Callable[[], float | None]  # bytes/s; None: not known
Arrived = Callable[[Ack, bool], None]  # told of a piece that a peer says it has, and whether it has all it should


@dataclass(slots=True, eq=False)
class Passing:
    """One frame on its way to all of ``peers``; those in ``failed`` could not be reached, or refused it."""

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
        """Send it; ``way_of`` says which way so many bytes go best, its first peer being this one, then ``peers``."""
        given = {peer: _cut(0, len(self.data), UNMEASURED, False) for peer in self.peers}
        if uplink() is None:
            await self._send_all(given, lambda: uplink() is not None)
        furthest = max((_start(ranges, len(self.data)) for ranges in given.values()), default=0)
        if (rate := uplink()) is None or furthest == len(self.data):
            return await self._send_all(given)
        behind = {peer: [range_ for range_ in ranges if range_[0] < furthest] for peer, ranges in given.items()}
        await self._go_on(behind, furthest, way_of(len(self.data) - furthest), uplink, rate)

    def comes_to(self, peer: PeerId) -> bool:
        """Whether ``peer`` gets it, from here or from others, with no need to ask for it."""
        return peer in self.peers and peer not in self.failed and anyio.current_time() < self._moved_at + PAUSE

    async def _go_on(
        self, behind: dict[PeerId, list[Range]], start: int, way: Spread, uplink: Uplink, rate: float
    ) -> None:
        size = min(LARGEST, max(SMALLEST, int(rate * OFTEN / len(self.peers))))
        given, passed = {}, start + way.direct
        for peer, nbytes in zip(self.peers, way.passed[1:], strict=True):
            direct = _cut(start, start + way.direct, size, False)
            given[peer] = behind[peer] + _cut(passed, passed + nbytes, size, True) + direct
            passed += nbytes
        helpers = [peer for peer, nbytes in zip(self.peers, way.passed[1:], strict=True) if nbytes]
        if helpers and THIN * way.direct < sum(way.passed):
            self._pace = _Pace(lambda: HASTE * (uplink() or rate))
        while any(given.values()):
            await self._send_all(given)
            lost = [range_ for peer in given.keys() & self.failed for range_ in given[peer] if range_[2]]
            given = self._dealt(lost, [peer for peer in helpers if peer not in self.failed])

    async def _send_all(self, given: dict[PeerId, list[Range]], enough: Callable[[], bool] = lambda: False) -> None:
        """Takes off ``given`` what peers say they have; when it is ``enough``, waits a little for what is under way."""
        async with anyio.create_task_group() as group:

            def goes_on() -> bool:
                if enough():
                    group.cancel_scope.deadline = min(group.cancel_scope.deadline, anyio.current_time() + LANDING)
                return not enough()

            for peer, ranges in given.items():
                if peer not in self.failed:
                    group.start_soon(self._send_to, peer, ranges, goes_on)

    def _dealt(self, lost: list[Range], helpers: Sequence[PeerId]) -> dict[PeerId, list[Range]]:
        if helpers:
            return {peer: lost[turn :: len(helpers)] for turn, peer in enumerate(helpers)}
        direct = [(start, stop, False) for start, stop, _ in lost]
        return {peer: list(direct) for peer in self.peers if peer not in self.failed}

    async def _send_to(self, peer: PeerId, ranges: list[Range], goes_on: Callable[[], bool]) -> None:
        """Goes on after a rest, with small steps, when a stream ended: a relay may end each connection after 128 KiB.

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
                ranges[:] = [step for range_ in ranges for step in _cut(*range_[:2], UNMEASURED, range_[2])]

    async def _send_at_once(
        self, peer: PeerId, ranges: list[Range], goes_on: Callable[[], bool], window: Window
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
    """So many bytes per second, to whomever."""

    def __init__(self, rate: Callable[[], float]) -> None:
        self._rate, self._free_at = rate, 0.0

    async def wait(self, nbytes: int) -> None:
        """Until it is the turn of ``nbytes``."""
        now = anyio.current_time()
        turn = max(now, self._free_at)
        self._free_at = turn + nbytes / self._rate()
        await anyio.sleep(turn - now)


def _cut(start: int, stop: int, size: int, pass_on: bool) -> list[Range]:
    return [(at, min(at + size, stop), pass_on) for at in range(start, stop, size)]


def _start(ranges: Sequence[Range], end: int) -> int:
    return ranges[0][0] if ranges else end
