"""The paths to other peers: direct or through relays, and two questions to a peer about the path to it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated

import anyio

from decentral.errors import DecentralError, StreamClosed, TransportError
from decentral.transport.base import Count, Stream, Transport
from decentral.transport.native.tcp import endpoint
from decentral.transport.protocols.noise import close_now, secure_outbound
from decentral.transport.requests import request, serve_requests
from decentral.wire.codecs import U8, U16, U64, Text, from_bytes, to_bytes
from decentral.wire.keys import PeerId, Signer

# ---- can this machine be dialled? ----
#
# Others know: each is asked to dial back the address that it sees the question come from.
#
# Crosses the wire: a port, and back who I seem to be, whether I answered there, and what time it is: 60 bytes. Nobody
# is dialled but who asks, at the host the question came from, so nobody can be made to knock at a third one's door.
#
# Source: the idea is that of libp2p's AutoNAT (libp2p/specs, autonat-v1.md), whose answers the daemon keeps to itself.

DIALBACK = "/decentral/dialback/1"
ANSWERED, SILENT, NOT_TRIED = 1, 0, 2
_PATIENCE_FOR_A_DIAL = 3.0  # s for a TCP connection and a handshake: a filtered port says nothing, ever
_AT_ONCE = 8  # dials under way for all who ask; the next is told that it was not tried
_LONGEST_ADDRESS = 64  # characters of /ip6/HOST/tcp/PORT
_ANSWER_NBYTES = 128


@dataclass(frozen=True, slots=True)
class Question:
    """The port on which the asker listens."""

    port: U16


@dataclass(frozen=True, slots=True)
class DialbackAnswer:
    """The asker as the other side sees it."""

    seen: Annotated[str, Text(_LONGEST_ADDRESS)]  # multiaddr of my end of the connection; empty: it is relayed
    outcome: U8  # ANSWERED, SILENT or NOT_TRIED
    milliseconds: U64  # since 1970 by its clock, when it answered

    def check(self) -> str | None:
        """Return the rule that this answer breaks."""
        return None if self.outcome in (ANSWERED, SILENT, NOT_TRIED) else f"outcome {self.outcome}"


async def ask_dialback(transport: Transport, peer: PeerId, port: int) -> DialbackAnswer:
    """Ask ``peer``, who is connected directly. Raises TransportError, PayloadError."""
    body = to_bytes(Question(port))
    data = await request(transport, peer, DIALBACK, body, limit=_ANSWER_NBYTES, timeout=2 * _PATIENCE_FOR_A_DIAL)
    return from_bytes(DialbackAnswer, data)


def serve_dialback(transport: Transport, clock: Callable[[], float] = time.time) -> None:
    """Dial back whoever asks. Before the transport is entered."""
    dialling: set[PeerId] = set()

    async def answer(peer: PeerId, body: bytes) -> bytes:
        port = from_bytes(Question, body).port
        seen = next(filter(endpoint, (await transport.paths()).get(peer, ())), "")
        outcome = NOT_TRIED
        if seen and port and peer not in dialling and len(dialling) < _AT_ONCE:
            dialling.add(peer)
            try:
                outcome = ANSWERED if await _answers(seen, port, peer) else SILENT
            finally:
                dialling.discard(peer)
        return to_bytes(DialbackAnswer(seen[:_LONGEST_ADDRESS], outcome, int(1000 * clock())))

    serve_requests(transport, DIALBACK, answer, limit=2)


async def _answers(seen: str, port: int, peer: PeerId) -> bool:
    """Tell whether ``peer`` shakes hands at that port: by a key of its own, so that no daemon mistakes it for this
    peer.
    """
    end = endpoint(seen)
    assert end is not None, "chosen before"
    try:
        with anyio.fail_after(_PATIENCE_FOR_A_DIAL):
            socket = await anyio.connect_tcp(end[0], port)
            try:
                await secure_outbound(socket, Signer.generate(), peer)
            finally:
                await close_now(socket)
    except (OSError, TimeoutError, DecentralError):
        return False
    return True


# ---- how fast is the path? ----
#
# A body there, the same body back. For people who ask, never for rounds.
#
# Crosses the wire: at most 1 MiB each way, from one peer at a time, 64 times a day. What training knows of links it
# measures on its own frames (``UplinkMeter``).

SPEED = "/decentral/speed/1"
SPEED_NBYTES = 1 << 20
SPEEDS_A_DAY = 64  # tests a day: 67 MB each way, and every peer of a large swarm may ask a few times
_DAY = 86_400.0  # s
_PIECE = 1 << 16  # bytes after which a test that goes on is booked
_PATIENCE_FOR_SPEED = 30.0  # s for all of it: 0.6 Mbit/s


@dataclass(frozen=True, slots=True)
class Speed:
    """Payload bits per second of one transfer: a lower bound, as slow start is in it."""

    up: float
    down: float


class SpeedTest:
    """The answering side: sends back what comes, to one peer at a time and ``SPEEDS_A_DAY`` times a day.

    Anybody may ask, and what is sent for that is paid by this peer's line: so it is bounded. It is none of the run's
    cost: so ``count`` has it apart, for who tells what a run has sent. A day's upload has it in, as the line has.
    """

    def __init__(self) -> None:
        self.count = Count()
        self._busy = anyio.Semaphore(1)
        self._tests, self._day_began = 0, float("-inf")

    async def echo(self, stream: Stream) -> None:
        """Answer one stream. TransportError, before anything is sent, when it is one too many."""
        try:
            self._busy.acquire_nowait()
        except anyio.WouldBlock:
            raise TransportError("a speed is being measured already; the next one is refused") from None
        try:
            self._count_test(anyio.current_time())
            with anyio.move_on_after(_PATIENCE_FOR_SPEED):
                await self._send_back(_Counted(stream, self.count))
        finally:
            self._busy.release()

    def _count_test(self, now: float) -> None:
        if now - self._day_began >= _DAY:
            self._tests, self._day_began = 0, now
        if self._tests >= SPEEDS_A_DAY:
            raise TransportError(f"{SPEEDS_A_DAY} speeds were measured here today; the next one is refused")
        self._tests += 1

    async def _send_back(self, stream: _Counted) -> None:
        await stream.send(b"!")  # who is refused learns it before it has sent anything
        body = await stream.receive_exactly(SPEED_NBYTES)
        await stream.send(b"!")
        await stream.receive_exactly(1)
        await stream.send(body)
        await stream.receive_exactly(1)


@dataclass(frozen=True, slots=True)
class _Counted:
    """A stream, and where its bytes are booked as they cross: of a test that breaks off, what did."""

    stream: Stream
    count: Count

    async def send(self, data: bytes) -> None:
        for start in range(0, len(data), _PIECE):
            await self.stream.send(data[start : start + _PIECE])
            self.count.sent += len(data[start : start + _PIECE])

    async def receive_exactly(self, nbytes: int) -> bytes:
        pieces = []
        for start in range(0, nbytes, _PIECE):
            pieces.append(await self.stream.receive_exactly(min(_PIECE, nbytes - start)))
            self.count.received += len(pieces[-1])
        return b"".join(pieces)


def serve_speed(transport: Transport) -> SpeedTest:
    """Answer who measures the path to this peer. Before the transport is entered."""
    test = SpeedTest()
    transport.serve(SPEED, test.echo)
    return test


async def measure_speed(transport: Transport, peer: bytes) -> Speed:
    """Measure the path to ``peer``. Raises TransportError, also when somebody else measures there now."""
    stream = await transport.open(peer, SPEED)
    try:
        with anyio.fail_after(_PATIENCE_FOR_SPEED):
            await stream.receive_exactly(1)
            began = anyio.current_time()
            await stream.send(os.urandom(SPEED_NBYTES))  # nothing on the way could squeeze it
            await stream.receive_exactly(1)
            sent = anyio.current_time()
            await stream.send(b"!")
            await stream.receive_exactly(SPEED_NBYTES)
            came = anyio.current_time()
            await stream.send(b"!")
            with suppress(StreamClosed):  # ended: the peer is free to measure with the next one who asks
                await stream.receive_exactly(1)
    except TimeoutError:
        raise TransportError(
            f"{SPEED_NBYTES} bytes each way took longer than {_PATIENCE_FOR_SPEED:g} s; try again"
        ) from None
    finally:
        await stream.aclose()
    return Speed(8 * SPEED_NBYTES / (sent - began), 8 * SPEED_NBYTES / (came - sent))


# ---- direct, or through a relay? ----
#
# How each peer is reached, and how much of what was exchanged with it went through relays.
#
# The transport knows its connections and counts bytes by peer, not both together; looked at every few seconds, and
# when a way is wanted that nobody has looked at yet, what was exchanged since the last look went the way that is there
# now.

LOOK_EVERY = 5.0  # s; one question to the daemon
_CIRCUIT = "/p2p-circuit"


@dataclass(slots=True)
class Path:
    """The way to one peer, as far as it is known."""

    direct: bool  # now
    nbytes: int = 0  # exchanged, both ways, up to the last look
    relayed_nbytes: int = 0  # of those, through a relay

    @property
    def relayed_share(self) -> float:
        """The part of what was exchanged with it that went through a relay."""
        return self.relayed_nbytes / self.nbytes if self.nbytes else float(not self.direct)


class Paths:
    """The ways to all peers that this one is connected with, or was."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._known: dict[PeerId, Path] = {}
        self._asked = anyio.Event()

    def get(self, peer: PeerId) -> Path | None:
        """Return the way to ``peer``; None before there was a connection."""
        return self._known.get(peer)

    def look_soon(self) -> None:
        """Look before it is time again: somebody wants to know the way to a peer that has just come."""
        self._asked.set()

    async def watch(self) -> None:
        """Look now and then, and when it is asked for, until cancelled."""
        while True:
            with suppress(TransportError):  # the daemon is being started again
                self.look(await self._transport.paths())
            with anyio.move_on_after(LOOK_EVERY):
                await self._asked.wait()
            self._asked = anyio.Event()

    def look(self, connections: dict[PeerId, tuple[str, ...]]) -> None:
        """Book what was exchanged since the last look; a connection without a relay is used where there is one."""
        counted = self._transport.traffic.peers  # bounded, so this is
        for peer, ends in connections.items():
            if peer in self._known or peer in counted:
                direct = any(_CIRCUIT not in end for end in ends)
                self._book(peer, self._known.setdefault(peer, Path(direct)), direct)

    def _book(self, peer: PeerId, path: Path, direct: bool) -> None:
        count = self._transport.traffic.of(peer)
        fresh = count.sent + count.received - path.nbytes
        path.nbytes += fresh
        path.relayed_nbytes += 0 if direct else fresh
        path.direct = direct
