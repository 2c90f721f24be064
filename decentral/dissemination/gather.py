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
from decentral.wire.wants import Want

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


async def fetch(transport: Transport, holder: PeerId, want: Want, limit: int) -> bytes | None:
    """What ``holder`` answers; None when it has nothing of that frame. ``limit`` bounds the answer's bytes."""
    try:
        data = await request(transport, holder, FETCH, want.to_bytes(), limit=limit, timeout=ANSWER)
    except (TransportError, PayloadError):
        return None
    return data or None
