"""Two sessions of Yamux on a pipe under virtual time."""

from __future__ import annotations

from contextlib import asynccontextmanager

import anyio
import trio
import trio.testing

from decentral.errors import StreamClosed
from decentral.transport.protocols.yamux import Session, Stock

MIB = 1 << 20


class Joined:
    """What a session needs of a connection: bytes to another one, until the path dies."""

    peer = bytes(32)
    rate = None  # bytes/s, not known

    def __init__(self, outgoing, incoming):
        self.outgoing, self.incoming, self.dead = outgoing, incoming, False

    async def send(self, *parts):
        if self.dead:
            return
        try:
            await self.outgoing.send(b"".join(parts))
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            raise StreamClosed("broken") from None

    async def receive(self):
        try:
            return await self.incoming.receive()
        except (anyio.EndOfStream, anyio.ClosedResourceError):
            raise StreamClosed("ended") from None

    async def send_eof(self):
        self.outgoing.close()

    async def aclose(self):
        self.outgoing.close()
        self.incoming.close()


@asynccontextmanager
async def two_sessions(stock=lambda: Stock(32 * MIB)):
    """A session that dialled, one that was dialled, the streams opened to the latter, and their connections."""
    (there, here), (back, home) = anyio.create_memory_object_stream(0), anyio.create_memory_object_stream(0)
    a_end, b_end = Joined(there, home), Joined(back, here)
    came = []
    a = Session(a_end, dialled=True, stock=stock(), on_stream=lambda stream: None)
    b = Session(b_end, dialled=False, stock=stock(), on_stream=came.append)
    async with anyio.create_task_group() as group:
        group.start_soon(a.run)
        group.start_soon(b.run)
        yield a, b, came, (a_end, b_end)
        group.cancel_scope.cancel()


def virtually(script):
    trio.run(script, clock=trio.testing.MockClock(autojump_threshold=0))


async def first(came):
    while not came:
        await anyio.sleep(0.01)
    return came[0]


def ignore(nbytes):
    pass
