"""A stream whose pieces wait for their turn at its transport's caps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import anyio

from decentral.errors import TransportError
from decentral.flow.schedule import piece_of
from decentral.flow.upload import UplinkMeter
from decentral.transport.base import Count, Stream
from decentral.transport.throttle.gate import Gate
from decentral.transport.watchdog import Holdable
from decentral.wire.keys import peer_name

_UNCAPPED_PIECE = 1 << 16  # bytes, so that the meter sees when the buffers are full; no slower than larger ones
_TRIFLE = 64  # bytes: lengths and acknowledgements are booked without waiting
_QUESTION = 4096  # bytes: asking for what others have is no upload


class Throttle(Protocol):
    """What a stream goes by: its transport, whose caps may change while it waits."""

    up: Gate | None
    down: Gate | None
    meter: UplinkMeter
    may_upload: Callable[[], bool]


class ThrottledStream(Holdable):
    """See Stream."""

    def __init__(self, inner: Stream, transport: Throttle, count: Count, *, urgent: bool) -> None:
        """``count``: of its protocol, to be added to."""
        super().__init__()
        if isinstance(inner, Holdable):
            self.watchdogs = inner.watchdogs  # whichever holds it up
        self.peer = inner.peer
        self._inner, self._transport, self._count, self._urgent = inner, transport, count, urgent

    async def send(self, data: bytes | memoryview) -> None:
        """See Stream. TransportError when it is bulk and the transport's owner allows no more."""
        view, transport = memoryview(data).cast("B"), self._transport
        piece = _UNCAPPED_PIECE if transport.up is None else piece_of(transport.up.rate)
        for start in range(0, len(view), piece):
            if not self._urgent and len(view) > _QUESTION and not transport.may_upload():
                name = peer_name(self.peer)
                raise TransportError(f"to {name}: the day's upload is used up; it goes on tomorrow (UTC)")
            await self._send_piece(view[start : start + piece])

    async def receive_exactly(self, nbytes: int, on_bytes: Callable[[int], None] | None = None) -> bytes:
        """See Stream."""
        gate = self._transport.down
        if gate is None:
            data = await self._inner.receive_exactly(nbytes, on_bytes)
            self._count.received += nbytes
            return data
        pieces, piece = [], piece_of(gate.rate)
        for start in range(0, nbytes, piece):
            pieces.append(await self._inner.receive_exactly(min(piece, nbytes - start), on_bytes))
            self._count.received += len(pieces[-1])
            await self._pass(gate, len(pieces[-1]))
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    async def aclose(self) -> None:
        """See Stream."""
        await self._inner.aclose()

    async def _send_piece(self, piece: memoryview) -> None:
        if self._urgent:
            await self._pass_up(piece)
            return
        meter, began, taken = self._transport.meter, anyio.current_time(), 0
        meter.begin(began)
        try:
            await self._pass_up(piece)
            taken = len(piece)
        finally:
            meter.end(began, anyio.current_time(), taken)

    async def _pass_up(self, piece: memoryview) -> None:
        if self._transport.up is not None:
            await self._pass(self._transport.up, len(piece))
        await self._inner.send(piece)
        self._count.sent += len(piece)

    async def _pass(self, gate: Gate, nbytes: int) -> None:
        if nbytes <= _TRIFLE:
            gate.schedule.spend(nbytes, anyio.current_time())
            return
        turn = gate.ask(self.peer, nbytes, urgent=self._urgent)
        if not turn.granted:
            with self.held():
                await gate.wait(turn)
