"""Frames and messages of one peer, checked as they come and sent as the machine asks."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import anyio
from torch import Tensor

from decentral.compressors.base import Decoded
from decentral.consensus.chain import Head
from decentral.dissemination import broadcast
from decentral.dissemination.broadcast import ChunkedBroadcast, OnFailed
from decentral.dissemination.pull import FrameFetcher
from decentral.dissemination.reassembly import Arrivals
from decentral.errors import PayloadError, TransportError
from decentral.flow.budget import Allowances
from decentral.flow.waiting import Changes, Offload, in_thread
from decentral.parameters import Schema
from decentral.replica.codec import Codec, FixedShapes, Shapes, range_shapes
from decentral.replica.contents import GATHERED, NO_TAIL, Payloads, Readings, Tail, Unpacked
from decentral.replica.measures import Measure
from decentral.rounds.local_state import LocalState, Steps, SwarmAccess
from decentral.rounds.peer_watch import PeerWatch
from decentral.transport import Transport
from decentral.transport.base import OnBytes
from decentral.transport.requests import notify, serve_requests
from decentral.wire.frames import HEADER_NBYTES, Frame, FrameKind, Header, parse
from decentral.wire.keys import PeerId, peer_name
from decentral.wire.messages import Behind, JoinRequest, Message, Offer, Prepare, Record, ReducePlan, decode, encode

CONTROL = "/decentral/control/1"
CONTROL_LIMIT = 1 << 20  # bytes; a record of 1,024 members with certificate is about 380 KB
SEND_TIMEOUT = 10.0  # s for a control message

# ---- the check of every frame ----
#
# Nothing else looks at a frame before it: right run, round, size, signature, finite values.
#
# Sizes come from the local schema and the plan, never from the wire. A frame that fails raises PayloadError and
# leaves no trace. Frames are of members, and one of each newcomer: keys cost nothing, and what they sign is kept for
# nobody.

AHEAD = 2  # rounds a frame may be ahead of us: its sender may have seen a commit that we have not


class PlanUnknown(PayloadError):
    """A slice or result came before the plan that says how large it is."""


class Inbox:
    """The frames that come, checked by the plans of the round in progress."""

    def __init__(
        self,
        schema: Schema,
        codec: Codec,
        merge_codec: Codec,
        offload: Offload = in_thread,
        tail: Tail = NO_TAIL,
        channels: int = 1,
        unpacked: Unpacked | None = None,
        readings: Readings | None = None,
        admits: Callable[[PeerId], bool] = lambda newcomer: False,
    ) -> None:
        """``channels``: the vectors that a contribution has at most; ``unpacked``: where the outer step looks;
        ``readings``: what other peers of this process have read, in a simulation; ``admits``: whether a frame of a peer
        that is no member yet is looked at.
        """
        self.channels = channels
        self._offload, self.tail = offload, tail
        self.unpacked, self.readings = unpacked or Unpacked(), readings
        self.schema, self.codec, self.merge_codec = schema, codec, merge_codec
        self.plans: dict[tuple[int, int], tuple[tuple[PeerId, int, int], ...]] = {}  # (round, plan) -> partition
        self._plan_came = Changes()
        self.admits = admits

    def expect(self, plan_or_record: ReducePlan | Record) -> None:
        """Learn the partition of a plan, so that its slices and results can be sized."""
        number = plan_or_record.number if isinstance(plan_or_record, ReducePlan) else plan_or_record.plan
        self.plans[(plan_or_record.round, number)] = plan_or_record.partition
        self._plan_came.tell()

    def forget_before(self, round_: int) -> None:
        """Drop the plans of rounds before ``round_``."""
        self.plans = {key: plan for key, plan in self.plans.items() if key[0] >= round_}

    async def take(
        self, data: bytes, head: Callable[[], Head], patience: Callable[[], float]
    ) -> tuple[Frame, Tensor | None]:
        """Check a frame as ``check`` does; wait up to ``patience`` seconds for the plan of a slice.

        A slice that is dropped comes from nobody else, and the plan may be behind many bytes of the leader's own.
        """
        deadline: float | None = None
        while True:
            came = self._plan_came.coming()
            try:
                return await self._offload(self.check, data, head())
            except PlanUnknown:
                deadline = anyio.current_time() + patience() if deadline is None else deadline
                with anyio.CancelScope(deadline=deadline) as wait:
                    await came.wait()
                if wait.cancelled_caught:
                    raise PlanUnknown("slice or result of a plan that never came; drop it") from None

    def check(self, data: bytes, head: Head) -> tuple[Frame, Tensor | None]:
        """Check a frame now; return it and what it decodes to, None where it is gathered and its parts are kept
        instead.

        Raises PlanUnknown when its plan has not come.
        """
        frame = parse(data, lambda header: self.max_nbytes(header, head))
        if frame.header.kind != FrameKind.SLICE:  # nobody asks for a slice by its hash
            _ = frame.hash  # kept in the frame: the event loop need not stop to hash megabytes
        body, _ = self.tail.split(frame)  # raises, too
        if frame.header.kind not in GATHERED:
            return frame, self.codec.decode(body, self.shapes_of(frame.header), frame.header.channels)
        if self.unpacked.get(frame) is None:  # pushed, and fetched besides
            self._unpack(frame, body, frame.header.sender in head.members)
        return frame, None

    def _unpack(self, frame: Frame, body: memoryview, keep: bool) -> None:
        """Read a gathered frame once: what is checked and measured is what the outer step adds."""
        known = None if self.readings is None else self.readings.get(frame.hash)
        payloads, measure, decoded = self._read(frame.header, body) if known is None else (*known, ())
        if self.readings is not None and known is None:
            self.readings.add(frame.hash, payloads, measure)
        if measure is not None:
            self.unpacked.measures.add(frame.hash, measure)
        if keep:
            self.unpacked.add(frame, payloads)
            self.unpacked.keep_decoded(frame, decoded)

    def _read(self, header: Header, body: memoryview) -> tuple[Payloads, Measure | None, Sequence[Decoded]]:
        """Read what a body holds, checked, and of a contribution its measure and what the change decodes to. Raises
        PayloadError.
        """
        codec, shapes = self.codec_of(header), self._shapes_of_one(header)
        payloads = codec.unpack(body, shapes * header.channels, header.channels)
        if header.kind != FrameKind.CONTRIBUTION:
            codec.check(payloads)
            return payloads, None, ()
        change, states = payloads[: len(shapes)], payloads[len(shapes) :]
        measure, decoded = Measure.of_payloads(codec, change)
        codec.of(1).check(states)
        return payloads, measure, decoded

    def shapes_of(self, header: Header) -> Shapes:
        """Return the shapes that a frame's body holds, by what this peer knows. Raises PayloadError."""
        if header.fragment >= len(self.schema.fragments):
            raise PayloadError(f"frame for fragment {header.fragment} of {len(self.schema.fragments)}; drop it")
        if header.channels > (1 if header.kind == FrameKind.MERGE else self.channels):
            raise PayloadError(f"{header.channels} channels in a {header.kind.name}, more than the method has; drop it")
        return self._shapes_of_one(header) * header.channels

    def _shapes_of_one(self, header: Header) -> FixedShapes:
        """Return the shapes of one channel."""
        shapes = self.codec.cut(self.schema.fragments[header.fragment])
        if header.kind in (FrameKind.CONTRIBUTION, FrameKind.MERGE, FrameKind.SWAP):
            return shapes
        partition = self.plans.get((header.round, header.plan))
        if partition is None:
            raise PlanUnknown(f"frame of plan {header.plan} in round {header.round}, which is not known here")
        if header.part >= len(partition) or header.parts != len(partition):
            raise PayloadError(f"frame for part {header.part} of {len(partition)}, as one of {header.parts}; drop it")
        if partition[-1][2] != self.schema.fragments[header.fragment].numel:
            raise PayloadError(f"plan {header.plan} does not cover fragment {header.fragment}; drop it and its frames")
        owner, start, stop = partition[header.part]
        if header.kind == FrameKind.RESULT and header.sender != owner:
            raise PayloadError(f"result of part {header.part} by a peer that does not own it; drop it")
        return range_shapes(start, stop)

    def codec_of(self, header: Header) -> Codec:
        """Return the codec of a frame: parameters merge uncompressed; everything else travels as the manifest says."""
        return self.merge_codec if header.kind == FrameKind.MERGE else self.codec

    def limit(self) -> int:
        """Return the bytes of the largest body that can be valid, over all fragments and kinds."""
        shapes = [self.codec.cut(fragment) for fragment in self.schema.fragments]
        sent = max(self.codec.max_body_nbytes(one * self.channels, self.channels) for one in shapes)
        return max(sent, *map(self.merge_codec.max_body_nbytes, shapes)) + self.tail.nbytes(0)

    def max_nbytes(self, header: Header, head: Head) -> int:
        """Return the bytes that the body of ``header`` may have. Raises PayloadError for one that belongs to nothing
        here.
        """
        if header.run != head.run:
            raise PayloadError(f"frame of run {header.run.hex()[:12]}, this is {head.run.hex()[:12]}; drop it")
        if header.kind != FrameKind.SWAP and not head.round < header.round <= head.round + AHEAD:
            raise PayloadError(f"frame of round {header.round} while round {head.round + 1} is open; drop it")
        if header.sender not in head.members and (header.kind == FrameKind.SLICE or not self.admits(header.sender)):
            raise PayloadError(f"{header.kind.name.lower()} of a peer that is no member; drop it")
        codec, shapes = self.codec_of(header), self.shapes_of(header)
        return codec.max_body_nbytes(shapes, header.channels) + self.tail.nbytes_of(header)


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


# ---- the ways in and out ----


class Pushes:
    """The frames of this peer on their way to others. A round that is over drops those that it does not name."""

    def __init__(self, me: PeerId, transport: Transport, broadcast: ChunkedBroadcast, on_failed: OnFailed) -> None:
        self._me, self._transport, self._broadcast, self._on_failed = me, transport, broadcast, on_failed
        self._under_way: dict[anyio.CancelScope, Frame] = {}
        self._times: dict[bytes, tuple[float, float | None]] = {}  # by frame: since when, and until when
        self._offered_at: dict[PeerId, float] = {}  # when others first offered in this round
        self._had_first: dict[int, float] = {}  # when the first of their frames was here, by round

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

    def note_offer(self, peer: PeerId) -> None:
        """Note that a member offers in this round, which it says again and again: its frame has begun to leave."""
        self._offered_at.setdefault(peer, anyio.current_time())

    def note_frame(self, round_: int) -> None:
        """Note that a frame of somebody else for this round is here."""
        self._had_first.setdefault(round_, anyio.current_time())

    def seconds(self, frame: bytes | None) -> float | None:
        """Return the seconds that pushing a frame took, or takes so far; None: it was not pushed lately."""
        if frame is None or frame not in self._times:
            return None
        began, ended = self._times[frame]
        return (anyio.current_time() if ended is None else ended) - began

    def end_round(self, record: Record, committed: float) -> None:
        """Drop the frames of a round that is over but those it names: they would slow the next one.

        ``committed``: when this peer heard of the commit. Where by then nobody's frame was here, its downlink is taken
        for a thin one, and what it waited for since says nothing of how its own frame went.
        """
        named, there = {ref.frame for ref in record.frames}, {ref.peer for ref in record.frames}
        others = set(record.members) - {self._me}
        last = max((self._offered_at.get(peer, 0.0) for peer in others), default=0.0) if others <= there else math.inf
        had_first = self._had_first.get(record.round, math.inf)
        ended = anyio.current_time() if had_first < committed else committed
        for frame, (began, _) in self._times.items():
            seconds = ended - began if frame in named else math.inf
            self._broadcast.note_seconds_to_commit(frame, seconds, late=last - began)
        self._offered_at = {}
        self._had_first = {round_: at for round_, at in self._had_first.items() if round_ > record.round}
        self.cancel(lambda frame: frame.header.round <= record.round and frame.hash not in named)
        self._times = {frame: times for frame, times in self._times.items() if times[1] is None}

    def cancel(self, useless: Callable[[Frame], bool]) -> None:
        """Call off the frames on their way that are ``useless``."""
        for scope, frame in list(self._under_way.items()):
            if useless(frame):
                scope.cancel()


class FrameIO:
    """The ways of one peer to the others, and the ``Receiver`` of what comes by them."""

    def __init__(
        self, state: LocalState, swarm: SwarmAccess, steps: Steps, watch: PeerWatch, readings: Readings | None
    ) -> None:
        self.state, self.steps, self.watch = state, steps, watch
        self.transport, self.directory, self.arrivals = swarm.transport, swarm.directory, Arrivals()
        self.said, self.passed_over = Said(), Counter[str]()  # and messages that were one too many, by their kind
        self._said: tuple[Message | None, bytes] = None, b""  # the last message: most go to everybody
        replica = state.replica
        self.inbox = Inbox(
            replica.schema,
            replica.codec,
            replica.merge_codec,
            state.offload,
            replica.tail,
            len(replica.method.channels()),
            replica.contents.unpacked,
            readings,
            admits=lambda peer: state.is_newcomer(peer) and not state.store.has_of(peer),
        )
        self.limit = HEADER_NBYTES + self.inbox.limit()  # bytes of a frame
        serve_requests(self.transport, CONTROL, self._on_control, limit=CONTROL_LIMIT)
        serve_requests(self.transport, broadcast.PUSH, self._on_push, limit=self.limit, watch=self._hold_push)
        self.broadcast = ChunkedBroadcast(self.transport, state.me, self.arrivals, swarm.lines_of, self)
        self.fetcher = FrameFetcher(
            self.transport, state.store, self.arrivals, self.broadcast, self, state.offload, self.limit
        )
        self.pushes = Pushes(state.me, self.transport, self.broadcast, self.unreachable)

    # ---- in ----

    def chain_head(self) -> Head | None:
        """Return the head of the chain, as ``Receiver`` asks."""
        return self.state.machine.head if self.state.running else None

    def max_nbytes(self, header: Header, head: Head) -> int:
        """Return the bytes that a body may have, as ``Receiver`` asks."""
        return self.inbox.max_nbytes(header, head)

    def spawn(self, work: Callable[..., object], *args: object) -> None:
        """Do work beside the rounds, as ``Receiver`` asks."""
        self.state.tasks.spawn(work, *args)

    async def take(self, data: bytes, wanted: bytes | None = None) -> None:
        """Check a frame's bytes and hold it, as ``Receiver`` asks."""
        state = self.state
        frame, decoded = await self.inbox.take(data, lambda: state.head, lambda: state.machine.state.patience())
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
        if frame.header.sender != self.state.me:
            self.pushes.note_frame(frame.header.round)
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
            if isinstance(message, Offer) and self._is_of_this_round(peer, message):
                self.pushes.note_offer(peer)
            await self.feed(peer, message)
        return b""

    def _is_of_this_round(self, peer: PeerId, offer: Offer) -> bool:
        head = self.state.head
        return offer.round == head.round + 1 and peer in head.members

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
        if state.running and peer not in state.head.members and not self.inbox.admits(peer):
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
        self.inbox.forget_before(round_ + 1)
        self.arrivals.keep(self.state.head.members)
        self.broadcast.forget_before(round_ + 1)
        self.fetcher.forget_before(round_ + 1)
