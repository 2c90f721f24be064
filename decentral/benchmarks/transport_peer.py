"""An end of the transport benchmark, a process of its own: takes streams and requests, says what they cost it.

python -m decentral.benchmarks.transport_peer '{"folder": ..., "transport": "native"}'

Says one JSON object when it listens, and one with its seconds of processor, those of its daemon included, for each
line that it hears. Ends when stdin does.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import psutil

from decentral.errors import StreamClosed
from decentral.swarm.identity import Identity
from decentral.transport import Stream
from decentral.transport.choice import make_transport
from decentral.transport.requests import serve_requests
from decentral.wire.keys import PeerId

STREAM, REQUEST = "/decentral/bench/stream/1", "/decentral/bench/request/1"
LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)
READ = 1 << 18  # bytes asked of a stream at a time
ENOUGH = 1 << 20  # bytes of the largest request


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportSeat:
    """Arguments that this end gets on its command line."""

    folder: str
    transport: str


def processor_seconds() -> float:
    """Return the processor time of this process and of its children, the daemon, so far.

    The system counts others' in hundredths of a second, in which two megabytes may be nothing at all; its own finer.
    """
    daemons = [process.cpu_times() for process in psutil.Process().children(recursive=True)]
    return time.process_time() + sum(one.user + one.system for one in daemons)


async def swallow(stream: Stream) -> None:
    """Read a stream whose first eight bytes say how long it is; one byte back when all is here."""
    left = int.from_bytes(await stream.receive_exactly(8), "little")
    while left:
        left -= len(await stream.receive_exactly(min(left, READ)))
    await stream.send(b"\x01")
    try:
        await stream.receive_exactly(1)  # until the other side, who has read that, ends the stream
    except StreamClosed:
        return


async def _answer(peer: PeerId, body: bytes) -> bytes:
    return body


async def serve(seat: TransportSeat) -> None:
    """Until stdin ends."""
    identity = Identity.load_or_create(Path(seat.folder) / "far.key")
    transport = make_transport(seat.transport, identity, LOOPBACK)
    transport.serve(STREAM, swallow)
    serve_requests(transport, REQUEST, _answer, limit=ENOUGH)
    async with transport:
        _say(peer=transport.peer.hex(), addresses=list(transport.addresses()))
        while await anyio.to_thread.run_sync(sys.stdin.readline):
            _say(processor=processor_seconds())


def _say(**answer: Any) -> None:  # Any: JSON
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    anyio.run(serve, TransportSeat(**json.loads(sys.argv[1])))
