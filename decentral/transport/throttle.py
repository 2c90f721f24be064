"""Any transport, with caps on what it sends and receives, and votes ahead of frames.

A cap holds over all streams together. Sending waits before bytes go; receiving reads slower, so the other side waits:
what the network's buffers hold then (the daemon: about 1 MiB a stream) is the only overshoot. Bytes of protocols that
are not named urgent are bulk. Nothing else crosses the wire than without caps.

Time that our own cap takes is nobody's stall: our watchdogs stand still meanwhile. The other side's do not, so only as
many pushes begin at once as leave each of them eight times the least rate.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, Protocol, Self

import anyio

from decentral.errors import ConfigError, TransportError
from decentral.flow.budget import Budget
from decentral.flow.pacing import Schedule, Turn, UplinkMeter, piece_of
from decentral.flow.waiting import Changes
from decentral.transport.base import Count, DhtHost, Handler, KeptStreams, Letters, Stream, Traffic, Transport
from decentral.transport.requests import LEAST_RATE, Holdable
from decentral.wire.keys import PeerId, peer_name

# bytes/s, the least that others do not take for a peer's death: at 32 kB/s a reader lets the daemon's sender move every
# 14 to 22 s (experiments/LOG.md), of 30 s at most
LEAST_CAP = 8 * LEAST_RATE


@dataclass(frozen=True, slots=True, kw_only=True)
class Caps:
    """Payload bytes per second over all streams together, each way; None: no cap."""

    up: float | None = None
    down: float | None = None

    def __post_init__(self) -> None:
        for name, rate in (("up", self.up), ("down", self.down)):
            if rate is not None and not rate >= LEAST_CAP:
                raise ConfigError(
                    f"Caps({name}={rate:g}): at least {LEAST_CAP} bytes/s (263 kbit/s), or other peers take this one "
                    "for dead; leave it out for no cap"
                )


_LOOK_EVERY = 0.5  # s between looks whether a push may begin because the others do not use the cap


class ThrottledTransport:
    """A transport with caps.

    ``urgent`` names the protocols that never wait for bulk, ``timely`` those that go before it: while something of
    these leaves, bulk waits, a quarter of a second for each piece at most. ``may_upload`` is asked before either goes.
    """

    def __init__(
        self,
        inner: Transport,
        caps: Caps | None = None,
        *,
        urgent: Collection[str],
        timely: Collection[str] = (),
        may_upload: Callable[[], bool] = lambda: True,
    ) -> None:
        caps = caps or Caps()
        self.inner, self.caps, self.may_upload = inner, caps, may_upload
        self.peer: PeerId = inner.peer
        self.up = None if caps.up is None else Gate(caps.up)
        self.down = None if caps.down is None else Gate(caps.down)
        self.meter = UplinkMeter()
        self.kept = KeptStreams(inner.kept.keeps)
        self._urgent, self._timely = frozenset(urgent), frozenset(timely)
        self.leaving = Leaving()
        self._pushes = 0
        self._pushed = Changes()

    @property
    def traffic(self) -> Traffic:
        """The bytes sent and received so far."""
        return self.inner.traffic

    @property
    def budget(self) -> Budget:
        """The share of this process that others hold."""
        return self.inner.budget

    @property
    def letters(self) -> Letters | None:
        """Nothing: a cap counts what streams move."""
        return None

    @property
    def dht_host(self) -> DhtHost | None:
        """The host for hivemind's DHT, where there is one."""
        return self.inner.dht_host

    @property
    def uplink(self) -> float | None:
        """Bytes per second that this peer was seen to send, at most its cap; None: not measured yet."""
        found = self.meter.bytes_per_second
        return found if found is None or self.caps.up is None else min(found, self.caps.up)

    async def cap(self, caps: Caps) -> None:
        """Hold to these caps from now on. Runs on the transport's loop."""
        self.caps = caps
        self.up, self.down = change_gate(self.up, caps.up), change_gate(self.down, caps.down)
        self._pushed.tell()

    def serve(self, protocol: str, handler: Handler) -> None:
        """Answer streams of ``protocol`` by ``handler``."""

        async def attend_throttled(stream: Stream) -> None:
            await handler(self._throttle(stream, protocol))

        self.inner.serve(protocol, attend_throttled)

    async def open(self, peer: PeerId, protocol: str) -> ThrottledStream:
        """Open a stream to ``peer``."""
        return self._throttle(await self.inner.open(peer, protocol), protocol)

    async def connect(self, peer: PeerId, addresses: Sequence[str]) -> None:
        """Dial ``peer`` at its addresses."""
        await self.inner.connect(peer, addresses)

    async def paths(self) -> dict[PeerId, tuple[str, ...]]:
        """Return the other ends of the connections there are."""
        return await self.inner.paths()

    def addresses(self) -> tuple[str, ...]:
        """Return the addresses that others may dial."""
        return self.inner.addresses()

    async def __aenter__(self) -> Self:
        await self.inner.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        await self.kept.close()
        return await self.inner.__aexit__(kind, error, trace)

    @asynccontextmanager
    async def pushing(self, protocol: str) -> AsyncIterator[None]:
        """Hold a place among those who push bulk at once; waits for one before the other side's time begins.

        Who waits goes on, too, when those who push do not use up the cap: they are slow for another reason.
        """
        if self.up is None or protocol in self._urgent or protocol in self._timely:
            yield
            return
        while self.up is not None and self._pushes >= self.up.rate // LEAST_CAP:
            with anyio.move_on_after(_LOOK_EVERY) as look:
                await self._pushed.next()
            if look.cancelled_caught and (self.up is None or self.up.schedule.idle(anyio.current_time())):
                break
        self._pushes += 1
        try:
            yield
        finally:
            self._pushes -= 1
            self._pushed.tell()

    def _throttle(self, stream: Stream, protocol: str) -> ThrottledStream:
        count = self.traffic.kinds.setdefault(protocol, Count())
        precedence: Precedence = "bulk"
        if protocol in self._urgent or protocol in self._timely:
            precedence = "urgent" if protocol in self._urgent else "timely"
        return ThrottledStream(stream, self, count, precedence)


# ---- a stream that waits its turn ----

_UNCAPPED_PIECE = 1 << 16  # bytes, so that the meter sees when the buffers are full; no slower than larger ones
_TRIFLE = 64  # bytes: lengths and acknowledgements are booked without waiting
LET_PASS = 0.25  # s
_QUESTION = 4096  # bytes: asking for what others have is no upload


Precedence = Literal["urgent", "timely", "bulk"]


class Leaving:
    """The count of timely sends under way, for which bulk waits."""

    def __init__(self) -> None:
        self._count, self._fewer = 0, Changes()

    @contextmanager
    def timely(self) -> Iterator[None]:
        """Hold while it leaves."""
        self._count += 1
        try:
            yield
        finally:
            self._count -= 1
            if not self._count:
                self._fewer.tell()

    async def let_pass(self) -> None:
        """Wait until nothing timely leaves, for a quarter of a second at most."""
        if self._count:
            with anyio.move_on_after(LET_PASS):
                while self._count:
                    await self._fewer.next()


class Throttle(Protocol):
    """The ways of a stream: its transport, whose caps may change while it waits."""

    up: Gate | None
    down: Gate | None
    leaving: Leaving
    meter: UplinkMeter
    may_upload: Callable[[], bool]


class ThrottledStream(Holdable):
    """A stream that waits its turn."""

    def __init__(self, inner: Stream, transport: Throttle, count: Count, precedence: Precedence) -> None:
        """``count``: of its protocol, to be added to."""
        super().__init__()
        if isinstance(inner, Holdable):
            self.watchdogs = inner.watchdogs  # whichever holds it up
        self.peer = inner.peer
        self._inner, self._transport, self._count, self._precedence = inner, transport, count, precedence

    async def send(self, data: bytes | memoryview) -> None:
        """Send all of ``data``. TransportError when it is bulk and the transport's owner allows no more."""
        view, transport = memoryview(data).cast("B"), self._transport
        piece = _UNCAPPED_PIECE if transport.up is None else piece_of(transport.up.rate)
        for start in range(0, len(view), piece):
            if self._precedence != "urgent" and len(view) > _QUESTION and not transport.may_upload():
                name = peer_name(self.peer)
                raise TransportError(f"to {name}: the day's upload is used up; it goes on tomorrow (UTC)")
            await self._send_piece(view[start : start + piece])

    async def receive_exactly(self, nbytes: int, on_bytes: Callable[[int], None] | None = None) -> bytes:
        """Return the next ``nbytes``."""
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
        """Close; what was sent still arrives."""
        await self._inner.aclose()

    async def _send_piece(self, piece: memoryview) -> None:
        if self._precedence == "urgent":
            await self._pass_up(piece)
            return
        if self._precedence == "timely":
            with self._transport.leaving.timely():
                await self._pass_up(piece)
            return
        await self._transport.leaving.let_pass()
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
        turn = gate.ask(self.peer, nbytes, self._precedence)
        if not turn.granted:
            with self.held():
                await gate.wait(turn)


# ---- gates, where turns are awaited ----

_FREE = 1e15  # bytes/s: for those who wait at a cap that was lifted


class Gate:
    """The schedule of one direction, and those who wait for it. The turn that comes next keeps the time for all."""

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self._schedule: Schedule | None = None  # made when the loop's clock is there
        self._waiting: dict[Turn, anyio.Event] = {}

    def change(self, rate: float) -> None:
        """Go on at another rate, for those who wait already, too."""
        self.rate = rate
        if self._schedule is not None:
            self._schedule.change(rate, anyio.current_time())
            self._wake(self._schedule.head)  # it keeps the time, by the old rate

    @property
    def schedule(self) -> Schedule:
        """The turns: who may move when."""
        if self._schedule is None:
            self._schedule = Schedule(self.rate, anyio.current_time())
        return self._schedule

    def ask(self, peer: PeerId, nbytes: int, precedence: Precedence = "bulk") -> Turn:
        """Ask the schedule for a turn; ``wait`` for it unless it is granted."""
        urgent, timely = precedence == "urgent", precedence == "timely"
        return self.schedule.ask(peer, nbytes, anyio.current_time(), urgent=urgent, timely=timely)

    async def wait(self, turn: Turn) -> None:
        """Wait until it is granted."""
        event = self._waiting[turn] = anyio.Event()
        try:
            while not turn.granted:
                deadline = self.schedule.next_at() if self.schedule.head is turn else float("inf")
                with anyio.CancelScope(deadline=deadline):
                    await event.wait()
                    event = self._waiting[turn] = anyio.Event()
                self._grant()
        finally:
            del self._waiting[turn]
            if not turn.granted:
                self.schedule.drop(turn)
            self._wake(self.schedule.head)  # it keeps the time from now on

    def _grant(self) -> None:
        for turn in self.schedule.due(anyio.current_time()):
            self._wake(turn)

    def _wake(self, turn: Turn | None) -> None:
        if turn in self._waiting:
            self._waiting[turn].set()


def change_gate(gate: Gate | None, rate: float | None) -> Gate | None:
    """Return the gate for ``rate``: the same one while there is a cap, because some wait at it."""
    if gate is None:
        return None if rate is None else Gate(rate)
    gate.change(_FREE if rate is None else rate)
    return None if rate is None else gate
