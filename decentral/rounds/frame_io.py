"""Frames and messages of one peer, checked as they come and sent as the machine asks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import anyio
from torch import Tensor

from decentral.consensus.chain import Head
from decentral.dissemination import broadcast
from decentral.dissemination.broadcast import ChunkedBroadcast, OnFailed
from decentral.dissemination.pull import FrameFetcher
from decentral.dissemination.reassembly import Arrivals
from decentral.errors import PayloadError, TransportError
from decentral.flow.budget import Allowances
from decentral.rounds.local_state import LocalState, Steps, SwarmAccess
from decentral.rounds.peer_watch import PeerWatch
from decentral.transport import Transport
from decentral.transport.base import OnBytes
from decentral.transport.requests import notify, serve_requests
from decentral.wire.frames import Frame, FrameKind, Header
from decentral.wire.keys import PeerId, peer_name
from decentral.wire.messages import Behind, JoinRequest, Message, Prepare, Record, decode, encode

CONTROL = "/decentral/control/1"
CONTROL_LIMIT = 1 << 20  # bytes; a record of 1,024 members with certificate is about 380 KB
SEND_TIMEOUT = 10.0  # s for a control message

# ---- how often a peer may say a thing ----
#
# Messages cost their sender a few bytes, and their receiver a write to its disk (Prepare), an answer (JoinRequest) or
# questions to others (Behind). So each peer may say each kind of thing so many times at once, and so many a second
# besides; a member begins anew with each round. What honest peers say is far below: a leader prepares once a ballot,
# which lasts 2 s or more, and again after 3; whoever asks to be let in does so once a second at most.

SAID_AT_ONCE = 256  # messages of one kind by a member: plans may be made again, and each part of one may be missed
SAID_EVERY = 0.015625  # s to the next one
FEW_AT_ONCE = 8  # the same where one is enough, and of whoever is no member
FEW_EVERY = 1.0
PREPARES_AT_ONCE = 4


class Said:
    """The limits of how often others may say something. Pure: the time comes in."""

    def __init__(self) -> None:
        self._many = Allowances(SAID_AT_ONCE, 1 / SAID_EVERY)
        self._few = Allowances(FEW_AT_ONCE, 1 / FEW_EVERY)
        self._prepares = Allowances(PREPARES_AT_ONCE, 1 / FEW_EVERY)
        self._of_outsiders = Allowances(FEW_AT_ONCE, 1 / FEW_EVERY)
        self._round = 0

    def takes(self, peer: PeerId, message: Message, head: Head, now: float) -> bool:
        """Tell whether a message is to be looked at; it is counted then."""
        if head.round != self._round:
            self._round = head.round
            for allowances in (self._many, self._few, self._prepares):
                allowances.begin_anew()
        kind = type(message)
        if peer not in head.members:
            return self._of_outsiders.take((peer, kind), now)
        if kind is Prepare:
            return self._prepares.take(peer, now)
        return (self._few if kind in (Behind, JoinRequest) else self._many).take((peer, kind), now)


class Pushes:
    """The frames of this peer on their way to others. A round that is over drops those that it does not name."""

    def __init__(self, me: PeerId, transport: Transport, broadcast: ChunkedBroadcast, on_failed: OnFailed) -> None:
        self._me, self._transport, self._broadcast, self._on_failed = me, transport, broadcast, on_failed
        self._under_way: dict[anyio.CancelScope, Frame] = {}
        self._times: dict[bytes, tuple[float, float | None]] = {}  # by frame: since when, and until when

    @property
    def count(self) -> int:
        """Return the number of frames that are on their way."""
        return len(self._under_way)

    async def push(self, frame: Frame, members: Sequence[PeerId]) -> None:
        """Give a frame to all ``members`` but this peer, unless its round ends before."""
        others = [peer for peer in members if peer != self._me]
        began = anyio.current_time()
        self._times[frame.hash] = began, None
        with anyio.CancelScope() as scope, self._transport.budget.own_frame():
            self._under_way[scope] = frame
            try:
                await self._broadcast.give(frame, others, self._on_failed)
            finally:
                del self._under_way[scope]
                self._times[frame.hash] = began, anyio.current_time()

    def seconds(self, frame: bytes | None) -> float | None:
        """Return the seconds that pushing a frame took, or takes so far; None: it was not pushed lately."""
        if frame is None or frame not in self._times:
            return None
        began, ended = self._times[frame]
        return (anyio.current_time() if ended is None else ended) - began

    def end_round(self, record: Record) -> None:
        """Drop the frames of a round that is over but those it names: they would slow the next one."""
        named = {ref.frame for ref in record.frames}
        self.cancel(lambda frame: frame.header.round <= record.round and frame.hash not in named)
        self._times = {frame: times for frame, times in self._times.items() if times[1] is None}

    def cancel(self, useless: Callable[[Frame], bool]) -> None:
        """Call off the frames on their way that are ``useless``."""
        for scope, frame in list(self._under_way.items()):
            if useless(frame):
                scope.cancel()


class FrameIO:
    """The ways of one peer to the others, and the ``Receiver`` of what comes by them."""

    def __init__(self, state: LocalState, swarm: SwarmAccess, steps: Steps, watch: PeerWatch) -> None:
        self.state, self.steps, self.watch = state, steps, watch
        self.transport, self.directory, self.arrivals = swarm.transport, swarm.directory, Arrivals()
        self.said, self.passed_over = Said(), Counter[str]()  # and messages that were one too many, by their kind
        self._said: tuple[Message | None, bytes] = None, b""  # the last message: most go to everybody
        serve_requests(self.transport, CONTROL, self._on_control, limit=CONTROL_LIMIT)
        limit = state.frame_limit
        serve_requests(self.transport, broadcast.PUSH, self._on_push, limit=limit, watch=self._hold_push)
        self.broadcast = ChunkedBroadcast(self.transport, state.me, self.arrivals, swarm.lines_of, self)
        self.fetcher = FrameFetcher(
            self.transport, state.store, self.arrivals, self.broadcast, self, state.offload, limit
        )
        self.pushes = Pushes(state.me, self.transport, self.broadcast, self.unreachable)

    # ---- in ----

    def chain_head(self) -> Head | None:
        """Return the head of the chain, as ``Receiver`` asks."""
        return self.state.machine.head if self.state.running else None

    def max_nbytes(self, header: Header, head: Head) -> int:
        """Return the bytes that a body may have, as ``Receiver`` asks."""
        return self.state.inbox.max_nbytes(header, head)

    def spawn(self, work: Callable[..., object], *args: object) -> None:
        """Do work beside the rounds, as ``Receiver`` asks."""
        self.state.tasks.spawn(work, *args)

    async def take(self, data: bytes, wanted: bytes | None = None) -> None:
        """Check a frame's bytes and hold it, as ``Receiver`` asks."""
        state = self.state
        frame, decoded = await state.inbox.take(data, lambda: state.head, lambda: state.machine.state.patience())
        if wanted is not None and frame.hash != wanted:
            raise PayloadError("a holder answered with another frame than the one asked for; drop it")
        match frame.header.kind, decoded:
            case FrameKind.SLICE, Tensor() as slice_N:
                state.sums.slices.add(frame, slice_N)
            case FrameKind.SWAP, Tensor() as theirs_N:
                if state.partners is not None:
                    state.partners.take(frame, theirs_N, state.head)
            case _, result_N if frame.hash not in state.store:
                if result_N is not None:
                    state.sums.results.add(frame, result_N)
                await self.hold(frame)

    async def hold(self, frame: Frame) -> None:
        """Hold a checked frame."""
        self.state.keep(frame)
        await self.steps.take(lambda now: self.state.machine.hold(frame.hash, frame.header, now))

    async def feed(self, peer: PeerId, message: Message) -> None:
        """Hand the machine a message as if ``peer`` had just sent it."""
        await self.steps.take(lambda now: self.state.machine.receive(peer, message, now))

    async def unreachable(self, peer: PeerId) -> None:
        """Note that a send to ``peer`` failed."""
        await self.steps.take(lambda now: self.state.machine.unreachable(peer, now))

    async def _on_control(self, peer: PeerId, data: bytes) -> bytes:
        if not self.state.running:
            return b""  # not in step yet: nothing that is said now concerns this peer
        message, now = decode(data), anyio.current_time()
        self.watch.heard(peer, now)
        if not self.said.takes(peer, message, self.state.head, now):
            self._pass_over(peer, type(message).__name__)
        elif isinstance(message, JoinRequest) and self._is_only_a_name(peer):
            self.directory.ask_for_lease(peer)  # it asks again
        else:
            await self.feed(peer, message)
        return b""

    def _is_only_a_name(self, peer: PeerId) -> bool:
        return peer not in self.state.head.members and not self.directory.has_answered(peer)

    def _pass_over(self, peer: PeerId, kind: str) -> None:
        """Tell of the first message of each kind: a peer that floods this one must not flood its log, too."""
        self.passed_over[kind] += 1
        if self.passed_over[kind] == 1:
            self.state.on_event("flooded", {"peer": peer_name(peer), "what": kind})

    @contextmanager
    def _hold_push(self, peer: PeerId) -> Iterator[OnBytes]:
        """Hold while ``peer`` pushes a frame. Raises PayloadError, before it is read, when none of it is taken."""
        state = self.state
        if state.running and peer not in state.head.members and not state.inbox.admits(peer):
            raise PayloadError(f"frame pushed by {peer_name(peer)}, which is no member; drop it")
        with self.arrivals.push(peer) as on_bytes:
            yield on_bytes

    async def _on_push(self, peer: PeerId, data: bytes) -> bytes:
        if not self.state.running:
            return b""
        self.watch.heard(peer, anyio.current_time())
        await self.take(data)
        return b""

    # ---- out ----

    async def send(self, to: PeerId, message: Message) -> None:
        """Send a message to one peer; the machine is told when it cannot be reached."""
        try:
            await notify(self.transport, to, CONTROL, self._encode(message), timeout=SEND_TIMEOUT)
        except TransportError:
            await self.unreachable(to)

    def _encode(self, message: Message) -> bytes:
        if self._said[0] is not message:
            self._said = message, encode(message)
        return self._said[1]

    def tidy(self, round_: int) -> None:
        """Drop what belongs to rounds up to ``round_`` and is of no use to those who missed them."""
        self.state.tidy(round_)
        self.arrivals.keep(self.state.head.members)
        self.broadcast.forget_before(round_ + 1)
