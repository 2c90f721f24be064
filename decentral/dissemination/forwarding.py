"""Pieces of others' frames, passed on as they come: each frame's on a stream to each of the others."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from decentral.dissemination.gather import ANSWER
from decentral.dissemination.passing import PIECE
from decentral.flow.changes import Changes
from decentral.flow.window import Ack, Window
from decentral.transport import Transport
from decentral.transport.sequences import sequence
from decentral.wire.keys import PeerId
from decentral.wire.pieces import Piece


class Forwarder:
    """Passes pieces on as they come, each frame's on a stream to each of the others. Who cannot be reached will ask."""

    def __init__(
        self, transport: Transport, window: Window, handled: Callable[[Ack], None], spawn: Callable[..., None]
    ) -> None:
        self.transport, self.window, self._handled, self._spawn = transport, window, handled, spawn
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
            async with sequence(self.transport, peer, PIECE, ANSWER, self.window, self._handled) as send:
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
        """Add one; None: there are no more."""
        if self._pieces is not None:
            self._pieces.append(piece)
            self._news.tell()

    async def next(self) -> bytes | None:
        """The oldest; None: there are no more."""
        while not self._pieces:
            await self._news.next()
        return self._pieces.popleft()

    def close(self) -> None:
        """Keep nothing more: that peer could not be reached, or has all."""
        self._pieces = None
