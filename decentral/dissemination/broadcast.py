"""Contributions that go by way of others: sent in pieces where the own uplink is thin, passed on, and put together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import anyio

from decentral.consensus.chain import Head
from decentral.dissemination import gather
from decentral.dissemination.arrivals import Arrivals
from decentral.dissemination.deliveries import Deliveries
from decentral.dissemination.forwarding import Forwarder
from decentral.dissemination.gather import OnFailed
from decentral.dissemination.partial_frame import Part
from decentral.dissemination.passing import LARGEST, PIECE, Passing
from decentral.dissemination.reassembly import Reassembly
from decentral.dissemination.spread import UNKNOWN, Line, Spread, spread
from decentral.errors import PayloadError
from decentral.flow.send_queue import SendQueue, shifted
from decentral.flow.window import Ack, Window
from decentral.transport import Transport
from decentral.transport.sequences import serve_sequences
from decentral.wire.frames import HEADER_NBYTES, Frame, FrameKind, Header
from decentral.wire.keys import PeerId
from decentral.wire.pieces import PIECE_HEAD_NBYTES, read_piece

LinesOf = Callable[[Sequence[PeerId]], Sequence[Line]]

PIECED = 1 << 16  # bytes of a contribution that goes in pieces; smaller ones fit into any buffer, and are soon gone


def all_equal(peers: Sequence[PeerId]) -> list[Line]:
    """Nothing is known of what anybody can send."""
    return [Line(UNKNOWN, passes_on=False)] * len(peers)


class Receiver(Protocol):
    """Who the frames that come are for: the rounds of one peer."""

    def chain_head(self) -> Head | None:
        """Where its chain stands; None while it is in step with no chain, and takes nothing."""
        ...

    def max_nbytes(self, header: Header, head: Head) -> int:
        """Bytes that the body of a frame may have. Raises PayloadError for one that belongs to nothing here."""
        ...

    async def take(self, data: bytes, wanted: bytes | None = None) -> None:
        """Check a frame's bytes and hold it; ``wanted``: the hash it must have. Raises PayloadError."""
        ...

    def spawn(self, work: Callable[..., object], *args: object) -> None:
        """Do ``work(*args)`` beside the rounds; it is given up when they end."""
        ...


class ChunkedBroadcast:
    """One peer's part in it."""

    def __init__(
        self, transport: Transport, me: PeerId, arrivals: Arrivals, lines_of: LinesOf, receiver: Receiver
    ) -> None:
        self.transport, self.me, self.arrivals, self.lines_of = transport, me, arrivals, lines_of
        self.receiver = receiver
        self.reassembly = Reassembly(self._check)
        self.window, self.turns = Window(self._uplink), SendQueue(self._uplink)
        self._deliveries = Deliveries(transport.meter)
        self.forwarder = Forwarder(transport, self.window, self._deliveries.passed_on, receiver.spawn)
        self._given: list[tuple[bytes, Passing]] = []  # frames on their way in pieces, and their hashes
        most = PIECE_HEAD_NBYTES + LARGEST
        serve_sequences(transport, PIECE, self._on_piece, limit=most, watch=arrivals.push)

    async def give(self, frame: Frame, others: Sequence[PeerId], on_failed: OnFailed) -> None:
        """Send a frame to all, by way of others where that is sooner; ``on_failed`` is told of who is not reached."""
        data, peers = frame.data, shifted(others, self.me)
        with self._deliveries.of_a_frame():
            if frame.header.kind == FrameKind.CONTRIBUTION and len(data) >= PIECED:
                await self._give_in_pieces(frame.hash, data, peers, on_failed)
            else:
                await gather.push(self.transport, peers, data, on_failed, self._handled(data), self._turns_of(frame))

    async def _give_in_pieces(self, frame: bytes, data: bytes, peers: Sequence[PeerId], on_failed: OnFailed) -> None:
        passing = Passing(self.transport, self.window, peers, data, self._deliveries.arrived, on_failed)
        self._given.append((frame, passing))
        try:
            await passing.send(lambda nbytes: self._way_of(nbytes, peers), self._uplink)
        finally:
            self._given.remove((frame, passing))

    @property
    def under_way(self) -> tuple[bytes, ...]:
        """The frames that are on their way from here in pieces, by their hashes."""
        return tuple(frame for frame, _ in self._given)

    def comes_to(self, peer: PeerId, frame: bytes) -> bool:
        """Whether ``peer`` gets that frame from here in pieces, or from those who pass them on."""
        return any(passing.comes_to(peer) for given, passing in self._given if given == frame)

    def part(self, round_: int, owner: PeerId) -> Part | None:
        """What came in pieces of that frame, while it is not whole."""
        return self.reassembly.part(round_, owner)

    def fetched(self, frame: bytes, owner: PeerId) -> None:
        """A holder sent what was missing of it: no more pieces are needed."""
        self.reassembly.right(frame[:HEADER_NBYTES])
        self.arrivals.whole(owner)

    def _way_of(self, nbytes: int, peers: Sequence[PeerId]) -> Spread:
        way = spread(nbytes, self.lines_of((self.me, *peers)), 0)
        return Spread(nbytes, (0,) * (1 + len(peers))) if way is None else way

    def _handled(self, data: bytes) -> Callable[[], None]:
        began = anyio.current_time()
        return lambda: self._deliveries.arrived(Ack(len(data), began, anyio.current_time()), True)

    def _turns_of(self, frame: Frame) -> SendQueue:
        """A contribution begins everywhere at once: an offer names it, and who sees nothing of it come asks for it."""
        return self.turns if frame.header.kind in (FrameKind.SLICE, FrameKind.RESULT) else SendQueue(lambda: None)

    def _uplink(self) -> float | None:
        rate = self.lines_of((self.me,))[0].rate
        return rate if rate > UNKNOWN else None

    def forget_before(self, round_: int) -> None:
        """Drop what belongs to rounds before ``round_``."""
        self.reassembly.forget_before(round_)
        self.forwarder.forget_before(round_)

    async def _on_piece(self, peer: PeerId, data: bytes) -> None:
        """Passed on when its owner asks for that, and the frame taken with the last one."""
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
        """Only members' contributions come in pieces, one of a sender in each round. Raises PayloadError."""
        head = self.receiver.chain_head()
        if head is None or header.kind != FrameKind.CONTRIBUTION or header.sender not in head.members:
            raise PayloadError("piece of what is no member's contribution; drop it")
        return self.receiver.max_nbytes(header, head)
