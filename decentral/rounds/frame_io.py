"""Frames and messages of one peer, checked as they come and sent as the machine asks; and a watch on the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import anyio
from torch import Tensor

from decentral.consensus.chain import Head
from decentral.dissemination import broadcast
from decentral.dissemination.broadcast import ChunkedBroadcast
from decentral.dissemination.pull import FrameFetcher
from decentral.dissemination.reassembly import Arrivals
from decentral.errors import PayloadError, TransportError
from decentral.rounds.local_state import LocalState, Steps, SwarmAccess
from decentral.transport.requests import notify, serve_requests
from decentral.wire.frames import Frame, FrameKind, Header
from decentral.wire.keys import PeerId
from decentral.wire.messages import Message, Record, decode, encode

# ---- frames and messages ----

CONTROL = "/decentral/control/1"
CONTROL_LIMIT = 1 << 20  # bytes; a record of 1,024 members with certificate is about 380 KB
SEND_TIMEOUT = 10.0  # s for a control message


class FrameIO:
    """One peer's ways to the others; a ``Receiver`` of what comes by them."""

    def __init__(self, state: LocalState, swarm: SwarmAccess, steps: Steps, watch: PeerWatch) -> None:
        self.state, self.steps, self.watch = state, steps, watch
        self.transport, self.arrivals = swarm.transport, Arrivals()
        self._said: tuple[Message | None, bytes] = None, b""  # the last message: most go to everybody
        self._pushes: dict[anyio.CancelScope, Frame] = {}
        self._pushed: dict[bytes, tuple[float, float | None]] = {}  # by frame: since when, and until when
        serve_requests(self.transport, CONTROL, self._on_control, limit=CONTROL_LIMIT)
        limit = state.frame_limit
        serve_requests(self.transport, broadcast.PUSH, self._on_push, limit=limit, watch=self.arrivals.push)
        self.broadcast = ChunkedBroadcast(self.transport, state.me, self.arrivals, swarm.lines_of, self)
        self.fetcher = FrameFetcher(
            self.transport, state.store, self.arrivals, self.broadcast, self, state.offload, limit
        )

    # ---- in ----

    def chain_head(self) -> Head | None:
        """See Receiver."""
        return self.state.machine.head if self.state.running else None

    def max_nbytes(self, header: Header, head: Head) -> int:
        """See Receiver."""
        return self.state.inbox.max_nbytes(header, head)

    def spawn(self, work: Callable[..., object], *args: object) -> None:
        """See Receiver."""
        self.state.tasks.spawn(work, *args)

    async def take(self, data: bytes, wanted: bytes | None = None) -> None:
        """See Receiver."""
        state = self.state
        frame, decoded = await state.inbox.take(data, lambda: state.head, lambda: state.machine.state.patience())
        if wanted is not None and frame.hash != wanted:
            raise PayloadError("a holder answered with another frame than the one asked for; drop it")
        match frame.header.kind, decoded:
            case FrameKind.SLICE, Tensor() as slice_N:
                state.slices.add(frame, slice_N)
            case FrameKind.SWAP, Tensor() as theirs_N:
                if state.partners is not None:
                    state.partners.take(frame, theirs_N, state.head)
            case _, result_N if frame.hash not in state.store:
                if result_N is not None:
                    state.results.add(frame, result_N)
                await self.hold(frame)

    async def hold(self, frame: Frame) -> None:
        """Hold a checked frame."""
        self.state.keep(frame)
        await self.steps.take(lambda now: self.state.machine.hold(frame.hash, frame.header, now))

    async def feed(self, peer: PeerId, message: Message) -> None:
        """Hand the machine a message as if ``peer`` had just sent it."""
        await self.steps.take(lambda now: self.state.machine.receive(peer, message, now))

    async def unreachable(self, peer: PeerId) -> None:
        """A send to ``peer`` failed."""
        await self.steps.take(lambda now: self.state.machine.unreachable(peer, now))

    async def _on_control(self, peer: PeerId, data: bytes) -> bytes:
        if not self.state.running:
            return b""  # not in step yet: nothing that is said now concerns this peer
        message = decode(data)
        self.watch.heard(peer, anyio.current_time())
        await self.feed(peer, message)
        return b""

    async def _on_push(self, peer: PeerId, data: bytes) -> bytes:
        if not self.state.running:
            return b""
        self.watch.heard(peer, anyio.current_time())
        await self.take(data)
        return b""

    # ---- out ----

    async def send(self, to: PeerId, message: Message) -> None:
        """Say something to one peer; the machine is told when it cannot be reached."""
        try:
            await notify(self.transport, to, CONTROL, self._encoded(message), timeout=SEND_TIMEOUT)
        except TransportError:
            await self.unreachable(to)

    def _encoded(self, message: Message) -> bytes:
        if self._said[0] is not message:
            self._said = message, encode(message)
        return self._said[1]

    @property
    def num_pushes(self) -> int:
        """Frames on their way to others."""
        return len(self._pushes)

    async def push(self, frame: Frame, members: Sequence[PeerId]) -> None:
        """Give a frame to all ``members`` but this peer, unless its round ends before."""
        others = [peer for peer in members if peer != self.state.me]
        began = anyio.current_time()
        self._pushed[frame.hash] = began, None
        with anyio.CancelScope() as scope:
            self._pushes[scope] = frame
            try:
                await self.broadcast.give(frame, others, self.unreachable)
            finally:
                del self._pushes[scope]
                self._pushed[frame.hash] = began, anyio.current_time()

    def sending(self, frame: bytes | None) -> float | None:
        """Seconds that pushing a frame took, or takes so far; None: it was not pushed lately."""
        if frame is None or frame not in self._pushed:
            return None
        began, ended = self._pushed[frame]
        return (anyio.current_time() if ended is None else ended) - began

    def end_pushes(self, record: Record) -> None:
        """A round that is over wants no frames but those it names: what is still on its way would slow the next one."""
        named = {ref.frame for ref in record.frames}
        self.cancel_pushes(lambda frame: frame.header.round <= record.round and frame.hash not in named)
        self._pushed = {frame: times for frame, times in self._pushed.items() if times[1] is None}

    def cancel_pushes(self, useless: Callable[[Frame], bool]) -> None:
        """Call off what is on its way and ``useless``."""
        for scope, frame in list(self._pushes.items()):
            if useless(frame):
                scope.cancel()

    def tidy(self, round_: int) -> None:
        """Drop what belongs to rounds up to ``round_`` and is of no use to those who missed them."""
        self.state.tidy(round_)
        self.broadcast.forget_before(round_ + 1)


# ---- a watch on the others ----
#
# At each look: which peers are silent, stand on another chain, or know what this peer's disk forgot.


class PeerWatch:
    """One peer's view of the others, from their leases and from when they were last heard."""

    def __init__(self, state: LocalState, swarm: SwarmAccess) -> None:
        self.state, self.directory = state, swarm.directory
        self.lease, self.shrink_after = swarm.lease, swarm.shrink_after
        self._heard: dict[PeerId, float] = {}
        self._looked: float | None = None
        self._asked_since: float | None = None
        self._rivals: dict[PeerId, float] = {}

    def heard(self, peer: PeerId, now: float) -> None:
        """Something came from ``peer``."""
        self._heard[peer] = now

    def absent(self, now: float) -> tuple[frozenset[PeerId], frozenset[PeerId]]:
        """Members not heard of for a lease, and for so long that they are given up."""
        self._leave_out_own_sleep(now)
        live, members = self.directory.live(), self.state.head.members
        for peer in members:
            if peer in live or peer not in self._heard:
                self._heard[peer] = now
        silent = {peer: now - self._heard[peer] for peer in members if peer != self.state.me}
        expired = frozenset(peer for peer, s in silent.items() if s > self.lease / 2)
        return expired, frozenset(peer for peer in expired if silent[peer] > self.shrink_after)

    def _leave_out_own_sleep(self, now: float) -> None:
        """Time in which this process stood still is nobody else's silence.

        A laptop that was shut for longer than ``shrink_after`` gave up all the others the moment it woke, and
        committed a round of its own that they had committed long ago.
        """
        slept = now - (now if self._looked is None else self._looked)
        self._looked = now
        if slept > self.lease / 2:
            self._heard = {peer: min(now, heard + slept) for peer, heard in self._heard.items()}

    def look_who_remembers(self, now: float) -> None:
        """Rounds that this peer's disk forgot, or a vote that binds it in vain: once all members were here for a lease
        and nobody stood further, go on without. All that time they are asked for what is missing.
        """
        round_, head = self.state.machine.state, self.state.head
        if not (round_.forgetful or round_.is_bound_in_vain) or not self._nobody_stands_further():
            self._asked_since = None
            return
        self._asked_since = now if self._asked_since is None else self._asked_since
        if now - self._asked_since > self.lease:
            round_.forget() if round_.forgetful else round_.forget_what_it_accepted()
            self._asked_since = None
            self.state.on_event("forgot", {"round": head.round})

    def _nobody_stands_further(self) -> bool:
        """Whether all members that are not given up are here, and nobody who is here is further than this peer."""
        head, live = self.state.head, self.directory.live()
        asked = set(head.members) - {self.state.me, *self.state.machine.state.presence.given_up()}
        return asked <= live.keys() and all(lease.round <= head.round for lease in live.values())

    def look_for_other_chains(self, now: float) -> None:
        """A peer two rounds ahead, or one round for long: we missed a commit. One that stays on another branch: either
        must adopt. A member may stand there, too, that left us out in the same round.

        Branches come from a partition, or from a chain that was given up and came back; comparing them is the
        catch-up's work, and both sides start it, so it does not matter which is the longer.
        """
        head, rivals = self.state.head, {}
        for peer, lease in self.directory.live().items():
            if lease.round > head.round + 1:
                self.state.catch_up.ask(peer)
            elif lease.digest != head.hash and (lease.round >= head.round or self._is_outside(peer)):
                rivals[peer] = self._rivals.get(peer, now)
        for peer, since in rivals.items():
            if now - since > self.lease:
                rivals[peer] = now
                self.state.catch_up.ask(peer)
        self._rivals = rivals

    def _is_outside(self, peer: PeerId) -> bool:
        return peer not in self.state.head.members and peer not in self.state.machine.state.joiners

    def lacks_the_end(self, peer: PeerId) -> bool:
        """Whether a peer is here and has not reached this peer's head, as far as it said."""
        lease, machine = self.directory.live().get(peer), self.state.machine
        if lease is None or peer in machine.state.presence.leaving:
            return False
        return max(lease.round, machine.state.stands_at.get(peer, 0)) < self.state.head.round
