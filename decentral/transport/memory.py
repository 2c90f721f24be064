"""A network inside one event loop: the laws of every transport, with delay, rate, cuts and deaths at will.

Nothing crosses a wire. On anyio only, so it runs on asyncio and trio, and under virtual time.
The order of events depends on nothing but the calls made, and a seeded ``jitter`` keeps it so.
"""

from __future__ import annotations

import heapq
import logging
import random
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Self

import anyio
import anyio.abc
import anyio.lowlevel

from decentral.errors import DecentralError, PayloadError, PeerUnreachable, StreamClosed, TransportError
from decentral.flow.budget import Limits
from decentral.flow.pacing import SECONDS
from decentral.flow.waiting import Changes
from decentral.transport.base import Handler, KeptStreams, OwnTransport, Respond, Traffic, Watch, attend
from decentral.transport.requests import PREFIX_NBYTES, STALL, Holdable, Watchdog, ignore_count
from decentral.wire.keys import PeerId, Signer, peer_name

logger = logging.getLogger("decentral.transport")


@dataclass(frozen=True, slots=True)
class Weight:
    """How many bytes the bytes of a stream stand for: the first ``plain`` for themselves, each other for ``each``."""

    each: float = 1.0
    plain: int = 0

    def of(self, start: int, count: int) -> float:
        """Return how many bytes ``count`` of them stand for, from the ``start``-th on."""
        plain = min(count, max(0, self.plain - start))
        return plain + (count - plain) * self.each


AS_THEY_ARE = Weight()


class MemoryNetwork:
    """Where memory transports meet.

    ``latency`` is one way in seconds, ``bandwidth`` each peer's uplink and ``downlink`` its downlink in bytes per
    second (None: no limit), ``jitter`` the largest extra delay of a piece in seconds, drawn from ``generator``.
    ``weights`` says how many bytes those of a protocol take the time of: small tensors that stand for large ones.
    With ``letters`` what fits into one piece goes without a stream, but for protocols whose answers are ``long``.
    """

    def __init__(
        self,
        *,
        latency: float = 0.0,
        bandwidth: float | None = None,
        downlink: float | None = None,
        jitter: float = 0.0,
        generator: random.Random | None = None,
        weights: Mapping[str, Weight] | None = None,
        letters: bool = False,
        long: Collection[str] = (),
    ) -> None:
        self.lines = MemoryLines(
            latency=latency,
            bandwidth=bandwidth,
            downlink=downlink,
            jitter=jitter,
            generator=generator or random.Random(0),
        )
        self.weights: Mapping[str, Weight] = weights or {}
        self.letters = letters
        self.long: Collection[str] = frozenset(long)
        self._posted: dict[frozenset[PeerId], dict[MemoryLetter, None]] = {}
        self._up: dict[PeerId, MemoryTransport] = {}
        self._cut: set[frozenset[PeerId]] = set()
        self._pipes: dict[frozenset[PeerId], list[Pipe]] = {}

    def transport(self, signer: Signer, *, limits: Limits | None = None) -> MemoryTransport:
        """Make a transport for the peer of ``signer``; enter it to be reachable. After ``kill``, make another."""
        return MemoryTransport(self, signer.peer, limits)

    def set_link(self, sender: PeerId, receiver: PeerId, *, latency: float, bandwidth: float | None = None) -> None:
        """Give one direction between two peers its own latency (s) and rate (bytes/s)."""
        self.lines.connect(sender, receiver, Link(latency=latency, bandwidth=bandwidth))

    def set_uplink(self, peer: PeerId, bandwidth: float | None, *, burst: float = 0.0) -> None:
        """Change what ``peer`` can send, in bytes per second over all its streams; ``burst``: bytes at once, before."""
        line = self.lines.uplink(peer)
        line.bandwidth, line.burst = bandwidth, burst

    def set_downlink(self, peer: PeerId, bandwidth: float | None) -> None:
        """Change what ``peer`` can receive, in bytes per second over all its streams, links of their own included."""
        self.lines.downlink(peer).bandwidth = bandwidth

    def kill(self, peer: PeerId) -> None:
        """End a peer as SIGKILL would: its handlers stop, its streams break, bytes in flight are lost.

        Other tasks of that peer are the caller's to cancel; whatever they try on the network fails.
        """
        transport = self._up.pop(peer, None)
        for pair in [pair for pair in (*self._pipes, *self._posted) if peer in pair]:
            self._break(pair)
        if transport is not None:
            transport.stop()

    def cut(self, a: PeerId, b: PeerId) -> None:
        """Break every stream between two peers and let no new one come about, until ``heal``."""
        self._cut.add(frozenset((a, b)))
        self._break(frozenset((a, b)))

    def heal(self, a: PeerId, b: PeerId) -> None:
        """Undo ``cut``."""
        self._cut.discard(frozenset((a, b)))

    def attach(self, transport: MemoryTransport) -> None:
        """Make a transport reachable; TransportError when its identity is on the network already."""
        if transport.peer in self._up:
            name = peer_name(transport.peer)
            raise TransportError(f"{name}: this identity is running already; give every peer its own key")
        self._up[transport.peer] = transport

    def detach(self, transport: MemoryTransport) -> None:
        """Take a transport off the network in good order."""
        if self._up.get(transport.peer) is transport:
            self.kill(transport.peer)

    def reach(self, sender: PeerId, receiver: PeerId) -> MemoryTransport:
        """Return the receiver's transport, if there is a path to it now."""
        transport = self._up.get(receiver)
        if transport is None or sender not in self._up or sender == receiver:
            raise PeerUnreachable(f"{peer_name(receiver)}: no such peer is up; try again or ask another")
        if frozenset((sender, receiver)) in self._cut:
            raise PeerUnreachable(f"{peer_name(receiver)}: the link to it is cut; try again or ask another")
        return transport

    def pipes(self, a: PeerId, b: PeerId, weight: Weight = AS_THEY_ARE) -> tuple[Pipe, Pipe]:
        """Return a fresh pipe each way between two peers."""
        there, back = self.lines.pipe(a, b, weight), self.lines.pipe(b, a, weight)
        both = self._pipes.setdefault(frozenset((a, b)), [])
        both[:] = [pipe for pipe in both if not pipe.over]
        both += (there, back)
        return there, back

    def add_letter(self, letter: MemoryLetter) -> None:
        """Note that a letter is on its way."""
        self._posted.setdefault(frozenset((letter.sender, letter.receiver)), {})[letter] = None

    def drop_letter(self, letter: MemoryLetter) -> None:
        """Note that a letter is there, or lost."""
        pair = frozenset((letter.sender, letter.receiver))
        under_way = self._posted.get(pair, {})
        under_way.pop(letter, None)
        if not under_way:
            self._posted.pop(pair, None)

    def carries(self, letter: MemoryLetter) -> bool:
        """Tell whether the way of a letter was not broken since it was posted."""
        return letter in self._posted.get(frozenset((letter.sender, letter.receiver)), {})

    def book_answer(self, letter: MemoryLetter, nbytes: int) -> None:
        """Book the answer to a letter, which came."""
        if letter.sender in self._up:
            self._up[letter.sender].traffic.add(letter.receiver, received=nbytes, kind=letter.protocol)

    def _break(self, pair: frozenset[PeerId]) -> None:
        for pipe in self._pipes.pop(pair, []):
            pipe.sever()
        for letter in self._posted.pop(pair, {}):
            letter.end()


class MemoryTransport(OwnTransport):
    """A peer on a MemoryNetwork: see ``Transport``."""

    def __init__(self, network: MemoryNetwork, peer: PeerId, limits: Limits | None = None) -> None:
        super().__init__(peer, limits)
        self.kept = KeptStreams(lambda peer: False)  # each its own handshake: what takes trips takes no fewer elsewhere
        self.network = network
        self._group: anyio.abc.TaskGroup | None = None
        self._scopes: dict[anyio.CancelScope, None] = {}  # in order of arrival: a set would not replay
        self._letters = MemoryLetters(self, network)

    async def __aenter__(self) -> Self:
        self.network.attach(self)
        self.services.fixed = True
        self.stack = AsyncExitStack()
        self._group = await self.stack.enter_async_context(anyio.create_task_group())  # its handlers only
        self.stack.callback(self.stop)
        self.stack.callback(self.network.detach, self)
        return self

    def stop(self) -> None:
        """End the handlers, and nothing else of whoever entered this transport."""
        for scope in tuple(self._scopes):
            scope.cancel()

    async def paths(self) -> dict[PeerId, tuple[str, ...]]:
        """Return nothing: there are no connections here."""
        return {}

    def addresses(self) -> tuple[str, ...]:
        """Return the addresses that others may dial."""
        name = peer_name(self.peer)
        return (f"/memory/{name}/p2p/{name}",)

    async def connect(self, peer: PeerId, addresses: Sequence[str]) -> None:
        """Dial ``peer`` at its addresses."""
        await anyio.lowlevel.checkpoint()
        name = peer_name(peer)
        if f"/memory/{name}/p2p/{name}" not in addresses:
            raise PeerUnreachable(f"{name}: none of its {len(addresses)} addresses is a /memory one; ask for others")
        self.network.reach(self.peer, peer)

    async def open(self, peer: PeerId, protocol: str) -> MemoryStream:
        """Open a stream to ``peer``."""
        await anyio.sleep(2 * self.network.lines.link(self.peer, peer).latency)  # the other side confirms the protocol
        other = self.network.reach(self.peer, peer)
        weight = self.network.weights.get(protocol, AS_THEY_ARE)
        there, back = self.network.pipes(self.peer, peer, weight)
        kind = protocol if self.network.letters else None
        other.accept(MemoryStream(self.peer, back, there, other.traffic, weight, kind), protocol)
        return MemoryStream(peer, there, back, self.traffic, weight, kind)

    def accept(self, stream: MemoryStream, protocol: str) -> None:
        """Start the handler of an inbound stream; PeerUnreachable when there is none."""
        handler = self.services.handlers.get(protocol)
        if handler is None or self._group is None:
            raise refuse(self.peer, protocol)
        self.begin(self._attend, stream, protocol, handler)

    @property
    def letters(self) -> MemoryLetters | None:
        """The letters of this peer, where the network carries any."""
        return self._letters if self.network.letters else None

    def letters_of(self, protocol: str) -> MemoryLetters:
        """Return where letters of a protocol come in; PeerUnreachable when it is not served."""
        if self._group is None or not self._letters.answers(protocol):
            raise refuse(self.peer, protocol)
        return self._letters

    def begin(self, deliver: Callable[..., Awaitable[None]], *args: object) -> None:
        """Do something that ends with the handlers."""
        assert self._group is not None, "it was reached"
        scope = anyio.CancelScope()  # made here: who is killed before the handler's first step must not start it
        self._scopes[scope] = None
        self._group.start_soon(self._within, scope, deliver, *args)

    async def _within(self, scope: anyio.CancelScope, deliver: Callable[..., Awaitable[None]], *args: object) -> None:
        try:
            with scope:
                await deliver(*args)
        finally:
            del self._scopes[scope]

    async def _attend(self, stream: MemoryStream, protocol: str, handler: Handler) -> None:
        try:
            with self.budget.inbound(stream.peer):
                await attend(stream, protocol, handler)
        except TransportError:
            await stream.aclose()  # over its budget: it sees StreamClosed


# ---- a stream: a pipe each way ----


@dataclass(eq=False)
class MemoryStream(Holdable):
    """An end of two pipes. Where a byte stands for many, watchdogs rest: they count bytes, and hardly any move."""

    peer: PeerId
    outgoing: Pipe
    incoming: Pipe
    traffic: Traffic
    weight: Weight
    kind: str | None  # under which its bytes are booked, too; None: whoever wraps the transport does that
    watchdogs: list[Watchdog] = field(default_factory=list)

    async def send(self, data: bytes | memoryview) -> None:
        """Send all of ``data``."""
        start = self.outgoing.written
        with self._pause_watchdogs():
            await self.outgoing.write(data)
        self.traffic.add(self.peer, sent=round(self.weight.of(start, len(data))), kind=self.kind)

    async def receive_exactly(self, nbytes: int, on_bytes: Callable[[int], None] | None = None) -> bytes:
        """Return the next ``nbytes``."""
        start = self.incoming.read_so_far
        with self._pause_watchdogs():
            data = await self.incoming.read(nbytes, on_bytes)
        self.traffic.add(self.peer, received=round(self.weight.of(start, nbytes)), kind=self.kind)
        return data

    async def aclose(self) -> None:
        """Close; what was sent still arrives."""
        self.outgoing.end()
        self.incoming.refuse()

    def _pause_watchdogs(self) -> AbstractContextManager[None]:
        return nullcontext() if self.weight.each == 1.0 else self.held()


# ---- the lines between all peers ----


class MemoryLines:
    """``latency`` is one way in seconds, ``bandwidth`` and ``downlink`` are bytes per second of each peer over all its
    streams (None: no limit), ``jitter`` is the largest extra delay of a piece in seconds, drawn from ``generator``.
    """

    def __init__(
        self,
        *,
        latency: float,
        bandwidth: float | None,
        downlink: float | None,
        jitter: float,
        generator: random.Random,
    ) -> None:
        self.latency, self.bandwidth, self._downlink_rate = latency, bandwidth, downlink
        self.jitter, self.generator = jitter, generator
        self._links: dict[tuple[PeerId, PeerId], Link] = {}
        self._uplinks: dict[PeerId, Link] = {}
        self._downlinks: dict[PeerId, Downlink] = {}

    def connect(self, sender: PeerId, receiver: PeerId, link: Link) -> None:
        """Give one direction between two peers a line of its own."""
        self._links[sender, receiver] = link

    def link(self, sender: PeerId, receiver: PeerId) -> Link:
        """Return the line of one direction between two peers."""
        return self._links.get((sender, receiver)) or self.uplink(sender)

    def uplink(self, peer: PeerId) -> Link:
        """Return the line by which a peer sends, to all who have no line of their own with it."""
        if peer not in self._uplinks:
            self._uplinks[peer] = Link(latency=self.latency, bandwidth=self.bandwidth)
        return self._uplinks[peer]

    def downlink(self, peer: PeerId) -> Downlink:
        """Return the line by which a peer receives."""
        if peer not in self._downlinks:
            self._downlinks[peer] = Downlink(bandwidth=self._downlink_rate)
        return self._downlinks[peer]

    def pipe(self, sender: PeerId, receiver: PeerId, weight: Weight) -> Pipe:
        """Return a fresh pipe, one way."""
        return Pipe(self.link(sender, receiver), self.downlink(receiver), self._extra_delay, weight)

    def put(self, link: Link, receiver: PeerId, nbytes: float) -> TimedPiece:
        """Put a piece that leaves now on the line."""
        return _put(link, self.downlink(receiver), nbytes, self._extra_delay)

    def settle(self, receiver: PeerId, now: float) -> None:
        """Give what has reached a peer's line by now its turn."""
        self.downlink(receiver).settle(now)

    def _extra_delay(self) -> float:
        return self.generator.uniform(0.0, self.jitter) if self.jitter else 0.0


# ---- one direction of a stream ----
#
# A bounded queue of pieces, each with the time it may be read.

WINDOW = 1 << 20  # bytes in flight per stream; where the daemon's senders were measured to block
PIECE = 1 << 16  # bytes
# s of a line that a piece takes at most: what is written next to it waits that long. TCP begins with ten packets. With
# three pieces of half a second before the plan of a reduce, rounds at 1 Mbit/s took 13 % longer than real ones.
PIECE_SECONDS = 0.1
PACKET = 1460  # bytes, the least piece
_NEVER = float("inf")
_NO_DATA = memoryview(b"")


@dataclass(slots=True)
class Link:
    """A way between peers that takes one piece after the other: a token bucket."""

    latency: float = 0.0  # s, one way
    bandwidth: float | None = None  # bytes/s; None: no limit
    burst: float = 0.0  # bytes that a line at rest lets through at once
    free_at: float = 0.0  # s, on the loop's clock: when the last piece will have left; earlier: what was saved up

    @property
    def piece(self) -> float:
        """The largest piece, in bytes."""
        return PIECE if self.bandwidth is None else min(PIECE, max(PACKET, PIECE_SECONDS * self.bandwidth))

    def arrival(self, nbytes: float, now: float) -> float:
        """Put ``nbytes`` on the link; returns when the last of them arrives."""
        if not self.bandwidth:
            return max(self.free_at, now) + self.latency
        self.free_at = max(self.free_at, now - self.burst / self.bandwidth) + nbytes / self.bandwidth
        return max(self.free_at, now) + self.latency

    async def share(self) -> None:
        """Let frames that the line takes seconds for leave side by side, with room for leases and votes: real ones stay
        with their sender while so much is under way.
        """
        await anyio.sleep(max(0.0, self.free_at - anyio.current_time() - SECONDS))


@dataclass(slots=True)
class TimedPiece:
    """Bytes on their way."""

    data: memoryview
    nbytes: float  # that it takes on the links
    reaches: float  # s: when it is at the receiver's downlink
    ready: float | None = None  # s: when it is through; None: nobody knows yet who else is ahead of it
    soonest: float = 0.0  # s: when it is through if nobody is

    @property
    def due(self) -> float:
        """When to look whether it is through."""
        return self.soonest if self.ready is None else self.ready


@dataclass(slots=True)
class Downlink:
    """The line by which one peer receives over all its streams: pieces pass in the order in which they reach it.

    A piece written first may reach it last, so its turn is decided when it is there and not when it is written.
    """

    bandwidth: float | None = None  # bytes/s; None: no limit
    free_at: float = 0.0  # s
    _coming: list[tuple[float, int, TimedPiece]] = field(default_factory=list)
    _count: int = 0

    def expect(self, piece: TimedPiece, now: float) -> None:
        """Note a piece that was sent."""
        if self.bandwidth is None:
            piece.ready = piece.reaches
            return
        piece.soonest = piece.reaches + piece.nbytes / self.bandwidth
        heapq.heappush(self._coming, (piece.reaches, self._count, piece))
        self._count += 1
        self.settle(now)

    def settle(self, now: float) -> None:
        """Give every piece that has reached the downlink by now its turn."""
        while self._coming and self._coming[0][0] <= now:
            reaches, _, piece = heapq.heappop(self._coming)
            took = piece.nbytes / self.bandwidth if self.bandwidth else 0.0
            piece.ready = self.free_at = max(self.free_at, reaches) + took


def _put(
    link: Link,
    downlink: Downlink,
    nbytes: float,
    extra_delay: Callable[[], float],
    data: memoryview = _NO_DATA,
    after: float = 0.0,
) -> TimedPiece:
    """Put a piece on the way now; it arrives ``after`` the one before it, as jitter never reorders a stream."""
    now = anyio.current_time()
    piece = TimedPiece(data, nbytes, max(after, link.arrival(nbytes, now) + extra_delay()))
    downlink.expect(piece, now)
    return piece


class Pipe:
    """Bytes one way. Both sides wait on one event, renewed at every change that one of them may wait for."""

    def __init__(self, link: Link, downlink: Downlink, jitter: Callable[[], float], weight: Weight) -> None:
        self._link, self._downlink, self._jitter, self._weight = link, downlink, jitter, weight
        self._pieces: deque[TimedPiece] = deque()
        self.written = self.read_so_far = 0  # bytes, as they are
        self._held = 0.0
        self._last = 0.0
        self._changed = Changes()
        self._ended = self._refused = self._severed = False

    @property
    def over(self) -> bool:
        """Tell whether nothing can come through any more."""
        return self._severed or self._refused or (self._ended and not self._pieces)

    async def write(self, data: bytes | memoryview) -> None:
        """Queue a copy of ``data``, waiting while a window of it is unread."""
        await anyio.lowlevel.checkpoint_if_cancelled()
        view = memoryview(data).cast("B")
        size = max(1, int(self._link.piece / self._weight.each))
        for start in range(0, len(view), size):
            while self._held >= WINDOW and not self._dead:
                await self._changed.next()
            if self._dead:
                raise StreamClosed(f"{start} of {len(view)} bytes were taken before the other side ended the stream")
            self._put(bytes(view[start : start + size]))
            if self._weight.each != 1.0:
                await self._link.share()

    async def read(self, nbytes: int, on_bytes: Callable[[int], None] | None = None) -> bytes:
        """Return the next ``nbytes``; StreamClosed when the pipe ends before."""
        await anyio.lowlevel.checkpoint_if_cancelled()
        taken: list[memoryview] = []
        missing = nbytes
        while missing:
            await self._wait_for_a_piece(nbytes - missing, nbytes)
            piece = self._take(missing)
            missing -= len(piece)
            taken.append(piece)
            if on_bytes is not None:
                on_bytes(len(piece))
        return b"".join(taken)

    def end(self) -> None:
        """Write nothing more; what is queued still arrives."""
        self._ended = True
        self._changed.tell()

    def refuse(self) -> None:
        """Read nothing more: further writes fail and what is queued is dropped."""
        self._refused = True
        self._pieces.clear()
        self._changed.tell()

    def sever(self) -> None:
        """Break: both sides fail and what is queued is lost."""
        self._severed = True
        self._pieces.clear()
        self._changed.tell()

    @property
    def _dead(self) -> bool:
        return self._severed or self._refused or self._ended

    def _put(self, piece: bytes) -> None:
        nbytes = self._weight.of(self.written, len(piece))
        self.written += len(piece)
        sent = _put(self._link, self._downlink, nbytes, self._jitter, memoryview(piece), self._last)
        self._last = sent.reaches
        self._pieces.append(sent)
        self._held += nbytes
        if len(self._pieces) == 1:
            self._changed.tell()

    def _take(self, most: int) -> memoryview:
        piece = self._pieces[0]
        taken, piece.data = piece.data[:most], piece.data[most:]
        if not piece.data:
            self._pieces.popleft()
        if self._held >= WINDOW:
            self._changed.tell()
        self._held -= self._weight.of(self.read_so_far, len(taken))
        self.read_so_far += len(taken)
        return taken

    async def _wait_for_a_piece(self, come: int, nbytes: int) -> None:
        while (due := self._due()) > anyio.current_time():
            if self._severed or self._refused or (self._ended and not self._pieces):
                raise StreamClosed(f"{come} of {nbytes} bytes came before the stream ended")
            if due == _NEVER:
                await self._changed.next()
                continue
            with anyio.CancelScope(deadline=due):
                await self._changed.next()

    def _due(self) -> float:
        """Return when to look again: the first piece is ready, or may be, or was not sent yet."""
        if not self._pieces:
            return _NEVER
        self._downlink.settle(anyio.current_time())
        return self._pieces[0].due


# ---- bodies that need no stream ----
#
# Those that fit into one piece are put on the line as a stream would, and given to the handler when they are through. A
# stream costs two pipes, four watchdogs and a dozen waits; a letter two waits. What is on a line, and for how long, is
# the same: the handshake, the length before each body, the queue at both lines, cuts and deaths.

_Served = tuple[Respond, int, Watch | None]


class MemoryLetter:
    """A body that was sent. ``weight``: what its bytes stand for, both ways."""

    def __init__(self, sender: PeerId, receiver: PeerId, protocol: str, body: bytes, weight: Weight) -> None:
        self.sender, self.receiver, self.protocol, self.body, self.weight = sender, receiver, protocol, body, weight
        self.opened = anyio.current_time()
        self.over = False  # nothing comes back any more, or nobody wants it
        self._came: anyio.Event | None = None
        self._answer: bytes | None = None

    async def answer(self, limit: int) -> bytes:
        """Return the answer."""
        if not self.over:
            self._came = anyio.Event()
            await self._came.wait()
        self.over = True
        if self._answer is None:
            raise StreamClosed(f"{peer_name(self.receiver)}: ended {self.protocol} without an answer; ask another peer")
        if len(self._answer) > limit:
            found = f"{len(self._answer)} bytes announced, at most {limit} taken; drop it"
            raise PayloadError(f"{self.protocol} from {peer_name(self.receiver)}: {found}")
        return self._answer

    async def close(self) -> None:
        """Wait for no answer any more."""
        self.over = True

    def end(self, answer: bytes | None = None) -> None:
        """End it with what comes back, or with nothing."""
        if not self.over:
            self.over, self._answer = True, answer
        if self._came is not None:
            self._came.set()


class MemoryLetters:
    """The letters of one transport, out and in."""

    def __init__(self, transport: MemoryTransport, network: MemoryNetwork) -> None:
        self._transport, self._network = transport, network
        self._served: dict[str, _Served] = {}

    def carry(self, protocol: str, nbytes: int) -> bool:
        """Tell whether a body goes as a letter: if it were one piece on a stream."""
        return self._weight(protocol).of(0, PREFIX_NBYTES + nbytes) <= PIECE and protocol not in self._network.long

    def serve(self, protocol: str, respond: Respond, limit: int, watch: Watch | None) -> None:
        """Answer each body with what ``respond`` returns."""
        self._served[protocol] = respond, limit, watch

    async def post(self, peer: PeerId, protocol: str, body: bytes) -> MemoryLetter:
        """Send a body."""
        await self.reach(peer, protocol)
        return await self.put(peer, protocol, body)

    async def reach(self, peer: PeerId, protocol: str, *, late: float = 0.0) -> None:
        """Make the handshake, ``late`` by so many seconds. Raises PeerUnreachable."""
        await anyio.sleep(late + 2 * self._network.lines.link(self._transport.peer, peer).latency)
        self._network.reach(self._transport.peer, peer).letters_of(protocol)

    async def put(self, peer: PeerId, protocol: str, body: bytes, *, lost: bool = False) -> MemoryLetter:
        """Put a body on the line, or nowhere where it is ``lost``; returns when a stream would have taken it."""
        own = self._transport
        letter = MemoryLetter(own.peer, peer, protocol, body, self._weight(protocol))
        if lost:
            await anyio.lowlevel.checkpoint()
            return letter
        link = self._network.lines.link(own.peer, peer)
        nbytes = letter.weight.of(0, PREFIX_NBYTES + len(body))
        piece = self._network.lines.put(link, peer, nbytes)
        own.traffic.add(peer, sent=round(nbytes), kind=protocol)
        other = self._network.reach(own.peer, peer)
        self._network.add_letter(letter)
        other.begin(other.letters_of(protocol).deliver, letter, piece, nbytes)
        if letter.weight.each != 1.0:
            await link.share()
        return letter

    async def deliver(self, letter: MemoryLetter, piece: TimedPiece, nbytes: float) -> None:
        """Wait for a letter at its receiver, have it handled, send what comes back."""
        try:
            with self._transport.budget.inbound(letter.sender):
                if await self._through(piece, self._transport.peer, letter):
                    await self._handle(letter, nbytes)
        except DecentralError as error:
            logger.debug("%s from %s: %s", letter.protocol, peer_name(letter.sender), error)
        except Exception:  # as ``attend`` has it of streams
            logger.exception("handler of %s failed on a letter from %s", letter.protocol, peer_name(letter.sender))
        finally:
            letter.end()
            self._network.drop_letter(letter)

    async def _handle(self, letter: MemoryLetter, nbytes: float) -> None:
        transport, sender, body = self._transport, letter.sender, letter.body
        transport.traffic.add(sender, received=round(nbytes), kind=letter.protocol)
        respond, limit, watch = self._served[letter.protocol]
        if len(body) > limit:
            raise PayloadError(f"{letter.protocol} from {peer_name(sender)}: {len(body)} bytes, at most {limit} taken")
        async with transport.budget.bytes_of(sender, len(body)):
            with nullcontext(ignore_count) if watch is None else watch(sender) as on_bytes:
                on_bytes(len(body))
                answer = await respond(sender, body)
        if not letter.over:
            await self._send_back(letter, answer)

    async def _send_back(self, letter: MemoryLetter, answer: bytes) -> None:
        back = letter.weight.of(0, PREFIX_NBYTES + len(answer))
        link = self._network.lines.link(self._transport.peer, letter.sender)
        piece = self._network.lines.put(link, letter.sender, back)
        self._transport.traffic.add(letter.sender, sent=round(back), kind=letter.protocol)
        if await self._through(piece, letter.sender, letter) and not letter.over:
            self._network.book_answer(letter, round(back))
            letter.end(answer)

    async def _through(self, piece: TimedPiece, receiver: PeerId, letter: MemoryLetter) -> bool:
        """Wait until a piece is through the receiver's line; tell whether it is, and no watchdog cut it off before."""
        began = anyio.current_time()
        while not letter.over or receiver == letter.receiver:
            now = anyio.current_time()
            self._network.lines.settle(receiver, now)
            due = piece.due
            if due <= now:
                return self._network.carries(letter)
            if due - began > STALL and letter.weight.each == 1.0:
                await anyio.sleep(max(0.0, began + STALL - now))
                return False
            await anyio.sleep(due - now)
        return False

    def _weight(self, protocol: str) -> Weight:
        return self._network.weights.get(protocol, AS_THEY_ARE)

    def answers(self, protocol: str) -> bool:
        """Tell whether anything is served here under that name."""
        return protocol in self._served


def refuse(peer: PeerId, protocol: str) -> PeerUnreachable:
    """Return the error that nobody answers that there."""
    return PeerUnreachable(f"{peer_name(peer)}: it does not serve {protocol}; compare the versions")
