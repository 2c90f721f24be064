"""Every frame to every peer: right for sparse frames.

A contributor pushes its frame to each member; whoever misses one, or some of it, asks any holder. Sent per peer and
round: ``(N-1) * frame``; received the same. Grows with N: groups bound it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import anyio

from decentral.errors import PayloadError, TransportError
from decentral.flow.send_queue import SendQueue
from decentral.transport import Transport
from decentral.transport.requests import notify, request
from decentral.wire.keys import PeerId
from decentral.wire.pieces import AT_ONCE, Want

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

    async def one(peer: PeerId) -> None:
        try:
            await notify(transport, peer, PUSH, data, timeout=ANSWER, on_handled=on_handled)
        except TransportError:
            await on_failed(peer)
        finally:
            turns.end()

    async with anyio.create_task_group() as group:
        for peer in peers:
            await turns.begin(len(data))
            group.start_soon(one, peer)


async def fetch(transport: Transport, holder: PeerId, want: Want, limit: int, at_once: int = AT_ONCE) -> bytes | None:
    """What ``holder`` answers, ``at_once`` bytes at a time; None when it has nothing of that frame.

    ``limit`` bounds all of it, in bytes.
    """
    answers: list[bytes] = []
    for part in want.cut(at_once) if want.ranges else (want,):
        answer = await _ask(transport, holder, part, limit)
        if answer is None:
            return None
        answers.append(answer)
    if not want.ranges:
        await _rest(transport, holder, want.frame, limit, at_once, answers)
    return answers[0] if len(answers) == 1 else b"".join(answers)


async def _rest(
    transport: Transport, holder: PeerId, frame: bytes, limit: int, at_once: int, answers: list[bytes]
) -> None:
    """Of a frame that is longer than one answer; its length is known once an answer is shorter."""
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
