"""In which steps does a sender move when the other side reads slowly? Two daemons on loopback.

    python experiments/links/slow_reader.py 32000 3000000

The first argument is the reader's rate in bytes per second, the second what is sent in all. Prints where the sender
was first made to wait, and the longest waits with the bytes behind each.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import anyio

from decentral.swarm.identity import Identity
from decentral.transport.base import Stream
from decentral.transport.daemon.transport import DaemonTransport

LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)
PIECE = 1 << 16
NOTABLE = 0.3  # s


async def measure(rate: float, nbytes: int, folder: Path) -> None:
    a, b = (DaemonTransport(Identity.load_or_create(folder / f"{name}.key"), listen=LOOPBACK) for name in ("a", "b"))

    async def read_slowly(stream: Stream) -> None:
        began, step = anyio.current_time(), max(1024, int(0.05 * rate))
        for come in range(0, nbytes, step):
            await stream.receive_exactly(min(step, nbytes - come))
            await anyio.sleep_until(began + come / rate)

    b.serve("/slow", read_slowly)
    async with a, b:
        await a.connect(b.peer, b.addresses())
        stream = await a.open(b.peer, "/slow")
        waits = []
        for sent in range(0, nbytes, PIECE):
            asked = anyio.current_time()
            await stream.send(bytes(min(PIECE, nbytes - sent)))
            waits.append((anyio.current_time() - asked, sent))
        first = next((sent for seconds, sent in waits if seconds > NOTABLE), None)
        longest = ", ".join(f"{seconds:.1f} s after {sent}" for seconds, sent in sorted(waits)[-3:])
        print(f"reader at {rate:g} bytes/s: first wait after {first} bytes; longest waits {longest}")
        await stream.aclose()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        anyio.run(measure, float(sys.argv[1]), int(float(sys.argv[2])), Path(made))
