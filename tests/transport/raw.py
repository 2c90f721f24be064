"""Connections whose one end is a stranger's, who shook hands and says what it likes from then on."""

from __future__ import annotations

import struct
from contextlib import asynccontextmanager

import anyio

from decentral.transport import Transport
from decentral.transport.native.tcp import endpoint
from decentral.transport.protocols.messages import propose
from decentral.transport.protocols.noise import secure_outbound
from decentral.transport.protocols.yamux import PROTOCOL
from decentral.wire.keys import Signer

BROKEN_FRAMES = {
    "4 GiB": struct.pack("!BBHII", 0, 0, 1, 1, (1 << 32) - 1),
    "4 GiB to nobody": struct.pack("!BBHII", 0, 0, 0, 7, (1 << 32) - 1),
    "version": struct.pack("!BBHII", 1, 0, 1, 1, 0),
    "type": struct.pack("!BBHII", 0, 9, 0, 0, 0),
    "our number": struct.pack("!BBHII", 0, 1, 1, 2, 0),
    "number twice": struct.pack("!BBHII", 0, 1, 1, 1, 0) * 2,
    "window of 4 GiB": struct.pack("!BBHII", 0, 1, 1, 1, (1 << 32) - 1),
}


@asynccontextmanager
async def raw_connection(b: Transport, signer: Signer):
    """What a stranger has who shook hands and now says what it likes."""
    host, port = endpoint(b.addresses()[0])
    async with await anyio.connect_tcp(host, port) as tcp:
        secured = await secure_outbound(tcp, signer, b.peer)
        await propose(secured, PROTOCOL)
        yield secured


async def until_dropped(secured) -> None:
    """Read on; StreamClosed when the other side has had enough, at once and not when it gives up a silent one."""
    with anyio.fail_after(20):
        while True:
            await secured.receive()


async def until_fed(secured) -> None:
    """Wait until the other side has taken all that was sent before: it answers a ping after that."""
    await secured.send(struct.pack("!BBHII", 0, 2, 1, 0, 7))
    answer, seen = struct.pack("!BBHII", 0, 2, 2, 0, 7), b""
    with anyio.fail_after(20):
        while answer not in seen:
            seen = seen[-len(answer) :] + await secured.receive()


def opening(number: int) -> bytes:
    """The frame that opens a stream."""
    return struct.pack("!BBHII", 0, 1, 1, number, 0)


def piece(number: int, data: bytes, flags: int = 0) -> bytes:
    """The frame that brings ``data`` on a stream."""
    return struct.pack("!BBHII", 0, 0, flags, number, len(data)) + data
