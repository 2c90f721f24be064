"""A transport on loopback, measured: one long stream, its cost in processor time, and the round trip of a request.

Both ends are processes of their own, as peers are, each with its daemon where there is one. Loopback has no delay and
no limit, so it is the transport that is measured, encryption and multiplexing included. Transports take turns, a stream
and some requests each, so that what else this machine does meanwhile is in the medians of all of them alike.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import anyio

from decentral.benchmarks.transport_peer import LOOPBACK, REQUEST, STREAM, TransportSeat, processor_seconds
from decentral.errors import DecentralError
from decentral.swarm.identity import Identity
from decentral.transport import Transport
from decentral.transport.choice import make_transport
from decentral.transport.requests import request
from decentral.wire.keys import PeerId

PIECE = bytes(1 << 18)  # sent at a time, as frames are
TIMEOUT = 30.0  # s for a path and for an answer
MEGABYTE = 1e6
_REQUESTS = 200  # asked one after the other, all turns together

Ask = Callable[[bool], dict[str, Any]]  # Any: JSON


@dataclass(frozen=True, slots=True)
class TransportResult:
    """Figures of one transport: medians of the streams, and of the requests."""

    transport: str
    megabytes: float  # of one stream, 10^6 bytes
    MBps: float
    processor_ms_per_MB: float  # of both ends and their daemons
    request_ms: float  # there and back, a kilobyte each way
    request_ms_p90: float

    def as_json(self) -> dict[str, Any]:  # Any: JSON
        """Plain JSON, rounded to what repeats."""
        return {key: round(value, 3) if isinstance(value, float) else value for key, value in asdict(self).items()}


def measure(
    kinds: Sequence[str], folder: Path, *, nbytes: int, repeats: int, on_done: Callable[[], None] = lambda: None
) -> list[TransportResult]:
    """Time ``repeats`` streams of ``nbytes`` of each kind, and requests of a kilobyte, from this process to another
    one.

    ``on_done`` is called after each turn of each kind.
    """
    with ExitStack() as stack:
        asks = [
            stack.enter_context(_far_end(TransportSeat(folder=str(_make(folder / kind)), transport=kind)))
            for kind in kinds
        ]
        return anyio.run(_measure, kinds, folder, nbytes, repeats, asks, on_done)


def _make(folder: Path) -> Path:
    folder.mkdir()
    return folder


@contextmanager
def _far_end(seat: TransportSeat) -> Iterator[Ask]:
    """The other process; call it for what it says next, first asking for it or not."""
    command = [sys.executable, "-m", "decentral.benchmarks.transport_peer", json.dumps(asdict(seat))]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    lines, stdin = process.stdout, process.stdin

    def ask(first: bool) -> dict[str, Any]:
        if first:
            stdin.write("\n")
            stdin.flush()
        if not (line := lines.readline()):
            raise DecentralError(f"bench transport: the other end ({seat.transport}) has died; see its error above")
        found: dict[str, Any] = json.loads(line)
        return found

    try:
        yield ask
    finally:
        stdin.close()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        lines.close()


async def _measure(
    kinds: Sequence[str],
    folder: Path,
    nbytes: int,
    repeats: int,
    asks: Sequence[Ask],
    on_done: Callable[[], None],
) -> list[TransportResult]:
    pairs = []
    async with AsyncExitStack() as stack:
        for kind, ask in zip(kinds, asks, strict=True):
            transport = make_transport(kind, Identity.load_or_create(folder / kind / "near.key"), LOOPBACK)
            pairs.append(_Pair(kind, await stack.enter_async_context(transport), ask))
            await pairs[-1].meet()
        for _ in range(repeats):
            for pair in pairs:
                await pair.turn(nbytes, -(-_REQUESTS // repeats))
                on_done()
    return [pair.result(nbytes) for pair in pairs]


@dataclass(slots=True)
class _Pair:
    """Two ends on one transport, and what was seen of them."""

    kind: str
    transport: Transport
    ask: Ask
    peer: PeerId = field(init=False)
    seconds: list[float] = field(default_factory=list)  # of each stream
    spent: list[float] = field(default_factory=list)  # s of processor, of each stream
    trips: list[float] = field(default_factory=list)  # s of each request

    async def meet(self) -> None:
        far = self.ask(False)
        self.peer = PeerId(bytes.fromhex(far["peer"]))
        await self.transport.connect(self.peer, far["addresses"])
        await _stream(self.transport, self.peer, len(PIECE))  # windows grow, code is loaded

    async def turn(self, nbytes: int, num_requests: int) -> None:
        before = self._processor()
        self.seconds.append(await _stream(self.transport, self.peer, nbytes))
        self.spent.append(self._processor() - before)
        self.trips += [await _request(self.transport, self.peer) for _ in range(num_requests)]

    def result(self, nbytes: int) -> TransportResult:
        megabytes, trips = nbytes / MEGABYTE, sorted(self.trips)
        return TransportResult(
            self.kind,
            megabytes,
            megabytes / median(self.seconds),
            1e3 * sum(self.spent) / (len(self.spent) * megabytes),
            1e3 * median(trips),
            1e3 * trips[9 * len(trips) // 10],
        )

    def _processor(self) -> float:
        """Seconds so far; this process has the near ends of the others, too, which stand still meanwhile."""
        return processor_seconds() + float(self.ask(True)["processor"])


async def _stream(transport: Transport, peer: PeerId, nbytes: int) -> float:
    """Seconds until the other end says that it has all of a stream."""
    began = time.perf_counter()
    stream = await transport.open(peer, STREAM)
    try:
        await stream.send(nbytes.to_bytes(8, "little"))
        for start in range(0, nbytes, len(PIECE)):
            await stream.send(memoryview(PIECE)[: min(len(PIECE), nbytes - start)])
        await stream.receive_exactly(1)
    finally:
        await stream.aclose()
    return time.perf_counter() - began


async def _request(transport: Transport, peer: PeerId) -> float:
    began = time.perf_counter()
    await request(transport, peer, REQUEST, PIECE[:1000], limit=1000, timeout=TIMEOUT)
    return time.perf_counter() - began
