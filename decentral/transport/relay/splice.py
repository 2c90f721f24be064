"""Two streams joined into one: what comes on either leaves on the other, no faster than it is taken there.

At most one piece of 64 KiB each way is in hand; what waits to be read lies in the streams' windows, which nobody widens
while the other side does not keep pace. The end of one direction is passed on after its last byte and leaves the other
one open. A reset is passed on as an end, too: one that overtakes what was sent before would lose it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import anyio

from decentral.errors import StreamClosed
from decentral.transport.native.stream import NativeStream
from decentral.transport.throttle import Gate

PIECE = 65507  # bytes: one frame of yamux, which with its header is one message of Noise
_PARTING = 5.0  # s that one side has to read the end, once the other one is gone


@dataclass(frozen=True, slots=True)
class SpliceTerms:
    """What a joined pair keeps to."""

    seconds: float | None  # that it lasts
    nbytes: int | None  # that each direction carries
    gate: Gate | None  # through which all pairs' bytes go, by turns of those who send
    on_bytes: Callable[[int], None]  # told of what was passed on


async def join(one: NativeStream, other: NativeStream, terms: SpliceTerms) -> None:
    """Carry bytes both ways until both have ended, either is gone, or the terms are used up."""
    one.muxed.most_unread = other.muxed.most_unread = None
    try:
        with anyio.move_on_after(terms.seconds):
            async with anyio.create_task_group() as group:
                group.start_soon(_carry, one, other, terms)
                group.start_soon(_carry, other, one, terms)
    finally:
        one.reset()
        other.reset()


async def _carry(source: NativeStream, target: NativeStream, terms: SpliceTerms) -> None:
    """One direction. When it is over, the whole pair soon is, unless the source still listens."""
    try:
        await _pass_on(source, target, terms)
    except StreamClosed:
        return  # the target is gone; what it had sent before is on its way in the other direction
    target.muxed.end()
    await source.muxed.until_ended()
    with anyio.move_on_after(_PARTING):
        await target.muxed.until_ended()
    target.reset()


async def _pass_on(source: NativeStream, target: NativeStream, terms: SpliceTerms) -> None:
    most = PIECE if terms.gate is None else min(PIECE, terms.gate.schedule.piece)
    passed = 0
    while piece := await source.muxed.receive(most):
        passed += len(piece)
        if terms.nbytes is not None and passed > terms.nbytes:
            target.reset()
            source.reset()
            return
        if terms.gate is not None:
            await _turn(terms.gate, source, len(piece))
        await target.muxed.send(piece, terms.on_bytes)


async def _turn(gate: Gate, source: NativeStream, nbytes: int) -> None:
    turn = gate.ask(source.peer, nbytes, urgent=False)
    if not turn.granted:
        await gate.wait(turn)
