"""Frames and messages of one peer: what comes in is checked and given to the machine, what it asks for goes out.

All machine calls happen under one lock, and their effects are carried out in order before the next call, so what a
peer says never runs ahead of what it has made durable.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import anyio
import anyio.abc
from torch import Tensor

from decentral.consensus.acceptor import Acceptor
from decentral.consensus.chain import Digest, Head
from decentral.consensus.effects import Effect
from decentral.consensus.history import Past
from decentral.consensus.machine import RoundMachine
from decentral.consensus.round_state import RoundTerms
from decentral.dissemination import gather
from decentral.dissemination.arrivals import Arrivals
from decentral.dissemination.broadcast import ChunkedBroadcast, LinesOf, all_equal
from decentral.dissemination.fetcher import FrameFetcher
from decentral.dissemination.store import FrameStore
from decentral.errors import DecentralError, PayloadError, TransportError
from decentral.flow.offload import Offload, in_thread
from decentral.replica.contribution import Contribution
from decentral.replica.measures import Measure
from decentral.replica.outbox import Outbox
from decentral.replica.reduction import Results
from decentral.replica.replica import Replica
from decentral.replica.scrutiny import Scrutiny
from decentral.rounds.inbox import Inbox
from decentral.swarm.directory import Directory
from decentral.transport import Transport
from decentral.transport.requests import notify, serve_requests
from decentral.wire.frames import HEADER_NBYTES, Frame, FrameKind
from decentral.wire.keys import PeerId, Signer
from decentral.wire.messages import (
    Commit,
    Message,
    Record,
    decode,
    encode,
)

CONTROL = "/decentral/control/1"
CONTROL_LIMIT = 1 << 20  # bytes; a record of 1,024 members with certificate is about 380 KB
KEEP_ROUNDS = 64  # rounds of frames kept for those who missed them
SEND_TIMEOUT = 10.0  # s for a control message


@dataclass(frozen=True, slots=True)
class CommittedUpdate:
    """One commit as the training side sees it."""

    record: Record | None  # None: adopted from a snapshot
    head: Digest  # hash of the chain's head after it
    fragment: int
    before_N: Tensor | None  # None: only the membership changed
    after_N: Tensor | None
    contribution: Contribution | None  # this peer's, when the record names it
    anchor: Digest = b""  # digest of this peer's anchor after it, over all fragments
    owed_steps: int = 0  # inner steps of this peer on a branch that is given up, less those that the new one took
    rounds: int = 1  # outer steps of the fragment from ``before_N`` to ``after_N``
    buffers_B: Tensor | None = None  # the model's buffers after it; None: the live ones stay
    taken_N: Tensor | None = None  # bool: where this peer's progress is in the anchor already, sent by a life before


@dataclass(slots=True)
class Ledger:
    """Where commits and acceptor state become durable. In tests it may keep them in memory."""

    append: Callable[[Commit, Sequence[bytes]], None]
    save_acceptor: Callable[[bytes], None]
    keep: Callable[[Record, Sequence[bytes]], None] = lambda record, frames: None  # frames of a record voted for
    adopt: Callable[[Head, Mapping[str, Tensor]], None] = lambda head, tensors: None  # a snapshot, before it is used
    swap_begins: Callable[[], None] = lambda: None  # from now on a partner may hold what the last checkpoint owes


class FrameIO(ABC):
    """Holds the machine, its frames and its ways to the others."""

    machine: RoundMachine  # made when ``run`` starts, at the head that is known by then

    @abstractmethod
    async def _carry_out(self, effects: list[Effect]) -> None:
        """Do what the machine asks for, in order."""

    @abstractmethod
    def _take_slice(self, frame: Frame, decoded: Tensor) -> None:
        """Take a checked slice of a reduce."""

    def __init__(
        self,
        *,
        signer: Signer,
        head: Head,
        terms: RoundTerms,
        replica: Replica,
        inbox: Inbox,
        transport: Transport,
        directory: Directory,
        ledger: Ledger,
        on_advance: Callable[[CommittedUpdate], None],
        on_event: Callable[[str, dict[str, object]], None],
        lease: float,
        shrink_after: float,
        acceptor: Acceptor | None = None,
        reserve: int = 1 << 28,
        offload: Offload = in_thread,
        lines_of: LinesOf = all_equal,
    ) -> None:
        """``lines_of`` tells what peers can send, as far as is known."""
        self.offload, self.lines_of = offload, lines_of
        self.signer, self.me = signer, signer.peer
        self.terms, self.replica, self.inbox = terms, replica, inbox
        self.transport, self.directory, self.ledger = transport, directory, ledger
        self.on_advance, self.on_event = on_advance, on_event
        self.lease, self.shrink_after = lease, shrink_after
        self.store = FrameStore(reserve)
        self.outbox = Outbox(replica.codec, reserve)
        self.arrivals = Arrivals()
        self.pending: Contribution | None = None
        self.catch_up: Callable[[PeerId], None] = lambda peer: None
        self.on_swap: Callable[[Frame, Tensor], None] = lambda frame, decoded: None
        self.contributed = 0
        self._inherits = False  # whether an earlier life may have sent what no record has named yet
        self._reclaimed = False  # whether progress was given to a branch, too, that was given up and may come back
        self.allowed = 0.0  # s that what was offered for the round may be under way
        self.pressed: tuple[Digest, float] | None = None  # head after which the others wait for this peer, seconds left
        self.stopping = False
        self._pushes: dict[anyio.CancelScope, Frame] = {}
        self._heard: dict[PeerId, float] = {}
        self._looked: float | None = None
        self._asked_since: float | None = None
        self._rivals: dict[PeerId, float] = {}
        self._fatal: DecentralError | None = None
        self._slices: dict[tuple[int, int], dict[PeerId, Tensor]] = {}
        self._tails: dict[tuple[int, int], dict[PeerId, Tensor]] = {}  # the buffers that came with slices
        self._slice_came = anyio.Event()
        self._results = Results()
        self._left: dict[Digest, Tensor] = {}  # by the results made here in this round, what each leaves to owe
        self.scrutiny = Scrutiny()
        self._measured: dict[tuple[int, int], dict[PeerId, Measure]] = {}  # (round, plan) -> slices of a part of ours
        self._lock = anyio.Lock(fast_acquire=True)
        self._start: tuple[Head, Acceptor | None, Past] = (head, acceptor, Past())
        self._group: anyio.abc.TaskGroup | None = None
        self._over = False
        limit = HEADER_NBYTES + inbox.limit()
        serve_requests(transport, CONTROL, self._on_control, limit=CONTROL_LIMIT)
        serve_requests(transport, gather.PUSH, self._on_push, limit=limit, watch=self.arrivals.push)
        self.frame_limit = limit
        self.spreading = ChunkedBroadcast(
            transport,
            self.me,
            self.arrivals,
            lines_of,
            lambda: self.machine.head if self._group is not None else None,
            inbox.max_nbytes,
            self.take,
            self._spawn,
        )
        self.asking = FrameFetcher(
            transport, self.store, self.arrivals, self.spreading, lines_of, self.take, offload, self.frame_limit
        )

    @property
    def head(self) -> Head:
        """Where this peer's chain stands."""
        return self.machine.head if self._group is not None else self._start[0]

    @property
    def running(self) -> bool:
        """Whether this peer is in step with a chain; before that, its head is only a placeholder."""
        return self._group is not None

    @property
    def is_member(self) -> bool:
        """Whether this peer votes in the round in progress."""
        return self.me in self.head.members

    @property
    def given_up(self) -> frozenset[PeerId]:
        """Peers without whom the chain went on although they were half of it or more; they may go on elsewhere."""
        return self.machine.given_up if self._group is not None else frozenset()

    def begin_at(self, head: Head, acceptor: Acceptor | None = None, past: Past | None = None) -> None:
        """Stand at ``head`` when ``run`` starts: learnt from a verified snapshot, or replayed from the journal.

        ``past``: what is known of the way there, and the frames of the record that ``acceptor`` voted for, which the
        others may have from nobody else.
        """
        self._start = (head, acceptor, past or Past())
        self._inherits = self._reclaimed = past is not None

    async def feed(self, peer: PeerId, message: Message) -> None:
        """Hand the machine a message as if ``peer`` had just sent it."""
        await self._step(lambda now: self.machine.receive(peer, message, now))

    async def unreachable(self, peer: PeerId) -> None:
        """A send to ``peer`` failed."""
        await self._step(lambda now: self.machine.unreachable(peer, now))

    async def hold(self, frame: Frame) -> None:
        """Hold a checked frame."""
        self._keep(frame)
        await self._step(lambda now: self.machine.hold(frame.hash, frame.header, now))

    async def take(self, data: bytes, wanted: bytes | None = None) -> None:
        """Check a frame's bytes and hold it. Raises PayloadError."""
        frame, decoded = await self.inbox.take(data, lambda: self.head, lambda: self.machine.patience())
        if wanted is not None and frame.hash != wanted:
            raise PayloadError("a holder answered with another frame than the one asked for; drop it")
        if frame.header.kind == FrameKind.SLICE:
            self._take_slice(frame, decoded)
        elif frame.header.kind == FrameKind.SWAP:
            self.on_swap(frame, decoded)
        elif frame.hash not in self.store:
            if frame.header.kind == FrameKind.RESULT:
                self._results.add(frame, decoded)
            await self.hold(frame)

    async def _step(self, call: Callable[[float], list[Effect]]) -> None:
        async with self._lock:
            effects = call(anyio.current_time())
            if not effects:
                return
            with anyio.CancelScope(shield=True):  # a caller that goes away must not leave a commit half done
                try:
                    await self._carry_out(effects)
                except DecentralError as error:
                    self._fatal = error  # a full disk, say: the machine has moved on and the disk has not
                    raise

    def _keep(self, frame: Frame) -> None:
        for dropped in self.store.add(frame):
            self.machine.held.pop(dropped, None)

    def _tidy(self, round_: int) -> None:
        """Drop what belongs to rounds up to ``round_`` and is of no use to those who missed them."""
        self.store.forget_before(round_ - KEEP_ROUNDS)
        self._make_room()
        self.inbox.forget_before(round_ + 1)
        self.spreading.forget_before(round_ + 1)
        self._slices, self._tails, self._left = {}, {}, {}
        self._results.forget()
        self._measured = {}

    def _make_room(self) -> None:
        """A new round is open: two frames per member are what it can need, a contribution and a result."""
        head = self.machine.head
        self.store.open(head.round + 1, 2 * self.frame_limit * len(head.members))

    def _stored(self, frame: bytes) -> Frame:
        found = self.store.get(frame)
        assert found is not None, "the machine decides only on frames that are held"
        return found

    def _spawn(self, work: Callable[..., object], *args: object) -> None:
        if self._group is not None and not self._over:  # a message may come while the others' handlers are ended
            self._group.start_soon(self._guarded, work, *args)

    async def _guarded(self, work: Callable[..., object], *args: object) -> None:
        """A failed send or a bad answer must not end the peer; it is counted and the timers above go on."""
        try:
            await work(*args)  # type: ignore[misc]
        except DecentralError as error:
            self.on_event("dropped", {"what": getattr(work, "__name__", "task"), "why": str(error)})

    async def _send(self, to: PeerId, message: Message) -> None:
        try:
            await notify(self.transport, to, CONTROL, encode(message), timeout=SEND_TIMEOUT)
        except TransportError:
            await self.unreachable(to)

    async def _push(self, frame: Frame, members: Sequence[PeerId]) -> None:
        others = [peer for peer in members if peer != self.me]
        with anyio.CancelScope() as scope:
            self._pushes[scope] = frame
            try:
                await self.spreading.give(frame, others, self.unreachable)
            finally:
                del self._pushes[scope]

    def _end_pushes(self, record: Record) -> None:
        """A round that is over wants no frames but those it names: what is still on its way would slow the next one."""
        named = {ref.frame for ref in record.frames}
        self._cancel_pushes(lambda frame: frame.header.round <= record.round and frame.hash not in named)

    def _cancel_pushes(self, useless: Callable[[Frame], bool]) -> None:
        for scope, frame in list(self._pushes.items()):
            if useless(frame):
                scope.cancel()

    async def _on_control(self, peer: PeerId, data: bytes) -> bytes:
        if self._group is None:
            return b""  # not in step yet: nothing that is said now concerns this peer
        message = decode(data)
        self._heard[peer] = anyio.current_time()
        await self.feed(peer, message)
        return b""

    async def _on_push(self, peer: PeerId, data: bytes) -> bytes:
        if self._group is None:
            return b""
        self._heard[peer] = anyio.current_time()
        await self.take(data)
        return b""
