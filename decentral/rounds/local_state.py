"""The state that the parts of one peer's rounds share, what it is made from, and what it tells training and disk."""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import anyio
import anyio.abc
from torch import Tensor

from decentral.consensus.chain import Head, Past
from decentral.consensus.machine import RoundMachine
from decentral.consensus.paxos import Acceptor
from decentral.consensus.round_state import Effect, RoundTerms
from decentral.dissemination.pull import FrameStore
from decentral.dissemination.spread import LinesOf, all_equal
from decentral.errors import DecentralError
from decentral.flow.waiting import Offload, in_thread
from decentral.replica.contents import Readings
from decentral.replica.contribution import Contribution, Outbox
from decentral.replica.measures import Measure
from decentral.replica.pair_step import GossipStep
from decentral.replica.reduction import Sums
from decentral.replica.replica import OuterStep, Replica
from decentral.rounds.partners import Partners
from decentral.swarm.directory import Directory
from decentral.transport import Transport
from decentral.wire.frames import Frame
from decentral.wire.keys import Digest, PeerId, Signer, peer_name
from decentral.wire.messages import Commit, Record

# Shape suffixes: N = elements of one fragment, B = elements of all shared buffers, C = channels; flat float32.

# ---- the state and its parts ----

KEEP_ROUNDS = 64  # rounds of frames kept for those who missed them


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnParts:
    """The parts that this peer has of its own."""

    signer: Signer
    head: Head
    acceptor: Acceptor | None = None
    away: float = 0.0  # s since this peer's disk was written last, where it begins from that
    terms: RoundTerms
    replica: Replica
    ledger: Ledger
    partners: Partners | None = None  # where peers gossip
    offload: Offload = in_thread
    readings: Readings | None = None  # of other peers of this process, in a simulation
    reserve: int = 1 << 28  # bytes of frames kept and unpacked, and of what may be owed again


@dataclass(frozen=True, slots=True, kw_only=True)
class SwarmAccess:
    """The ways to the others, and how long they may be silent."""

    transport: Transport
    directory: Directory
    lease: float  # s
    shrink_after: float  # s
    lines_of: LinesOf = all_equal  # what peers can send, as far as is known
    clock: Callable[[], float] = anyio.current_time  # s; goes on while the machine sleeps, where there is one that does


@dataclass(frozen=True, slots=True, kw_only=True)
class Listeners:
    """The functions that are called when something happens."""

    on_update: Callable[[CommittedUpdate], None]
    on_event: Callable[[str, dict[str, object]], None]
    observers: tuple[RoundObserver, ...] = ()


class RoundObserver(Protocol):
    """An onlooker, which changes nothing. ``known``: what the round itself measured; None: nothing."""

    def see_commit(
        self,
        record: Record,
        frames: Mapping[bytes, Frame],
        step: OuterStep,
        mine: Contribution | None,
        known: Mapping[PeerId, Measure] | None,
    ) -> None:
        """Look at a step that is installed and booked, before its update is told. ``mine``: if it is named."""

    async def name_contributors(
        self, record: Record, frames: Mapping[bytes, Frame], known: Mapping[PeerId, Measure] | None
    ) -> None:
        """Look at the contributors of a commit, beside the rounds."""

    def see_pair(self, mine: Contribution, mine_CN: Tensor, theirs_CN: Tensor, taken: GossipStep) -> None:
        """Look at a gossip step that a pair took, before it is booked."""


class LocalState:
    """The state that is read or changed by more than one part of a peer's rounds; each part keeps what only it looks
    at.
    """

    machine: RoundMachine  # made when the rounds begin, at the head that is known by then
    frame_limit: int  # bytes; known by then, too

    def __init__(self, parts: OwnParts, listeners: Listeners) -> None:
        self.signer, self.me, self.terms = parts.signer, parts.signer.peer, parts.terms
        self.replica, self.ledger = parts.replica, parts.ledger
        self.partners, self.offload = parts.partners, parts.offload
        self.on_update, self.on_event = listeners.on_update, listeners.on_event
        self.observers = listeners.observers
        self.tasks = Tasks(listeners.on_event)
        self.catch_up = CatchUpRequests(AGAIN_AT_MOST)
        self.store = FrameStore(parts.reserve - parts.replica.contents.unpacked.capacity)
        self.outbox = Outbox(parts.replica.codec, parts.reserve)
        self.pending: Contribution | None = None
        self.contributed = 0
        self.resumed = False  # whether it begins where a previous incarnation stood
        self.inherits = False  # whether a previous incarnation may have sent what no record has named yet
        self.reclaimed = False  # whether progress was given to a branch, too, that was given up and may come back
        self.left_out: LeftOut | None = None  # until this peer is a member again
        self.went_on: WentOn | None = None  # without those in `given_up`; None: before this process
        self.sums = Sums(parts.replica.tail)
        self._start: tuple[Head, Acceptor | None, Past] = (parts.head, parts.acceptor, Past())

    @property
    def head(self) -> Head:
        """Return the head of this peer's chain."""
        return self.machine.head if self.running else self._start[0]

    @property
    def running(self) -> bool:
        """Tell whether this peer is in step with a chain; before that, its head is only a placeholder."""
        return self.tasks.begun

    @property
    def is_member(self) -> bool:
        """Tell whether this peer votes in the round in progress."""
        return self.me in self.head.members

    @property
    def given_up(self) -> frozenset[PeerId]:
        """Return the peers without whom the chain went on although they were half of it or more; they may go on
        elsewhere.
        """
        return self.machine.state.given_up if self.running else frozenset()

    def is_newcomer(self, peer: PeerId) -> bool:
        """Tell whether a peer that is no member has asked to be let in."""
        return self.running and peer in self.machine.state.joiners

    @property
    def gossips(self) -> bool:
        """Tell whether each peer has its own replica, and there is no anchor to compare or to take over."""
        return self.partners is not None

    def begin_at(self, head: Head, acceptor: Acceptor | None = None, past: Past | None = None) -> None:
        """Stand at ``head`` when the rounds begin: learnt from a verified snapshot, or replayed from the journal.

        ``past``: what is known of the way there, and the frames of the record that ``acceptor`` voted for, which the
        others may have from nobody else.
        """
        self._start = (head, acceptor, past or Past())
        self.resumed = self.inherits = self.reclaimed = past is not None

    def begin(self, now: float, frame_limit: int) -> None:
        """Make the machine, at the head that is known by now, and room for frames of so many bytes."""
        self.frame_limit = frame_limit
        head, acceptor, past = self._start
        self.terms = replace(self.terms, overlong=self._overlong)
        self.machine = RoundMachine(self.signer, head, self.terms, now, acceptor)
        self.machine.remember(past)
        self.make_room()
        for frame in past.frames:
            self.keep(frame)

    def note_members(self, before: Collection[PeerId], leader: PeerId | None, now: float) -> None:
        """Note a change of the membership from ``before``. A peer that said farewell has left, and was not left out.

        ``leader``: of the commit that changed it; None: a branch was adopted.
        """
        if self.is_member:
            self.left_out = None
        elif self.me in before and not self.machine.state.has_left:
            head = self.head
            self.left_out = LeftOut(head.outer_step, now, leader)
            told = None if leader is None else peer_name(leader)
            where = {"round": head.round, "epoch": head.epoch, "outer_step": head.outer_step}
            self.on_event("left_out", {**where, "leader": told})

    # ---- frames ----

    def keep(self, frame: Frame) -> None:
        """Store a checked frame, in the place of others if need be."""
        for dropped in self.store.add(frame):
            self.machine.state.held.pop(dropped, None)

    def find_stored(self, frame: bytes) -> Frame:
        """Return a frame that is held."""
        found = self.store.get(frame)
        assert found is not None, "the machine decides only on frames that are held"
        return found

    def _overlong(self, record: Record) -> frozenset[PeerId]:
        """Return the owners whose results, as ``record`` names them, are far too long for this peer's slices."""
        pending = self.pending
        return frozenset() if pending is None else self.sums.overlong(record, pending.gradient_N, self.me)

    def make_room(self) -> None:
        """Make room for a new round: it can need two frames per member, a contribution and a result."""
        head = self.machine.head
        self.store.open(head.round + 1, 2 * self.frame_limit * len(head.members), frozenset(head.members))

    def tidy(self, round_: int) -> None:
        """Drop what belongs to rounds up to ``round_`` and is of no use to those who missed them."""
        self.store.forget_before(round_ - KEEP_ROUNDS)
        self.make_room()
        self.replica.contents.unpacked.forget_before(round_ + 1)
        self.sums.forget()


# ---- a commit, for training and disk ----
#
# To the training side a commit is an update, to the disk a line of its journal.


@dataclass(frozen=True, slots=True)
class Decision:
    """The way a commit came about, as this peer saw it; seconds of the loop's clock."""

    leader: PeerId
    ballot: int  # 0: the round's first leader; each above is a change of leader
    votes: int  # that prove it
    sending: float | None  # s until the others had this peer's frame, or so far; None: none was pushed
    applying: float  # s that the outer step took


@dataclass(frozen=True, slots=True)
class LeftOut:
    """The commit since which this peer is no member, without having said farewell."""

    outer_step: int  # made with it
    since: float  # s of the loop's clock
    leader: PeerId | None  # of the ballot that decided it; None: on a branch that was adopted, at that step or before


@dataclass(frozen=True, slots=True)
class WentOn:
    """The commit since which the run goes on here without half of its voters or more."""

    outer_step: int  # made before it
    since: float  # s of the loop's clock


@dataclass(frozen=True, slots=True)
class CommittedUpdate:
    """A commit as the training side sees it."""

    record: Record | None  # None: adopted from a snapshot
    head: Digest  # hash of the chain's head after it
    fragment: int
    before_N: Tensor | None  # None: only the membership changed
    after_N: Tensor | None
    contribution: Contribution | None  # this peer's, when the record names it
    anchor: Digest = b""  # digest of this peer's anchor after it, over all fragments
    reclaimed_steps: int = 0  # inner steps of this peer on a branch that is given up, less those that the new one took
    rounds: int = 1  # outer steps of the fragment from ``before_N`` to ``after_N``
    buffers_B: Tensor | None = None  # the model's buffers after it; None: the live ones stay
    state: Mapping[str, Tensor] = field(default_factory=dict)  # the method's after it, if the inner optimizer needs it
    channels: frozenset[str] = frozenset()  # that the contributions had
    unmoved: bool = False  # the commit moved nothing: what it took is given up
    adopted: bool = False  # a snapshot was taken over, for this move or for one that it was joined with
    parted: int | None = None  # adopted: the outer step after which our branch is given up; None: it is not
    whole: bool = True  # False: moves of other fragments to the same head follow
    took: bool = False  # adopted: what this peer had in flight was taken, and ``before_N`` is without what it measured
    taken_N: Tensor | None = None  # bool: where progress is in the anchor already, sent by a previous incarnation
    decision: Decision | None = None  # None: adopted


@dataclass(slots=True)
class Ledger:
    """The functions that make commits and acceptor state durable. In tests it may keep them in memory."""

    append: Callable[[Commit, Sequence[bytes]], None]
    save_acceptor: Callable[[bytes], None]
    keep: Callable[[Record, Sequence[bytes]], None] = lambda record, frames: None  # frames of a record voted for
    adopt: Callable[[Head, Mapping[str, Tensor]], None] = lambda head, tensors: None  # a snapshot, before it is used
    swap_begins: Callable[[], None] = lambda: None  # from now on a partner may hold what the last checkpoint owes
    set_aside: Callable[[Head, Mapping[str, Tensor]], None] = lambda head, tensors: None  # before an unchecked snapshot


# ---- steps of the machine ----
#
# They are taken one at a time; sends, fetches and reduces go on beside them, and may fail without ending the peer.
#
# What a step asks for is done, in order, before the next is taken: so what a peer says never runs ahead of what it has
# made durable.

CarryOut = Callable[[list[Effect]], Awaitable[None]]
OnEvent = Callable[[str, dict[str, object]], None]
logger = logging.getLogger("decentral.rounds")


class Steps:
    """The steps of one peer's machine; whoever changes what a step reads or decides holds ``lock``."""

    def __init__(self, carry_out: CarryOut) -> None:
        self._carry_out = carry_out
        self.lock = anyio.Lock(fast_acquire=True)
        self.failure: Exception | None = None  # a full disk, say: the machine has moved on and the disk has not

    async def take(self, call: Callable[[float], list[Effect]]) -> None:
        """Call the machine, with the time, and do what it asks for."""
        async with self.lock:
            effects = call(anyio.current_time())
            if not effects:
                return
            with anyio.CancelScope(shield=True):  # a caller that goes away must not leave a commit half done
                try:
                    await self._carry_out(effects)
                except Exception as error:
                    self.failure = error
                    raise

    def check(self) -> None:
        """Raise what an earlier step failed with."""
        if self.failure is not None:
            raise self.failure


class Tasks:
    """The tasks in the group that the rounds run in."""

    def __init__(self, on_event: OnEvent) -> None:
        self._on_event = on_event
        self._group: anyio.abc.TaskGroup | None = None
        self._over = False

    @property
    def begun(self) -> bool:
        """Tell whether the rounds have begun."""
        return self._group is not None

    def begin(self, group: anyio.abc.TaskGroup) -> None:
        """Run tasks in ``group`` from now on."""
        self._group = group

    def end(self) -> None:
        """Begin nothing any more."""
        self._over = True

    def spawn(self, work: Callable[..., object], *args: object) -> bool:
        """Do ``work(*args)`` beside the rounds; False when they end, and it is not done."""
        if self._group is None or self._over or self._group.cancel_scope.cancel_called:  # messages may come meanwhile
            return False
        self._group.start_soon(self._guard, work, *args)
        return True

    async def _guard(self, work: Callable[..., object], *args: object) -> None:
        """Do work that must not end the peer when a send fails or an answer is bad: that is told, and timers go on."""
        what = getattr(work, "__name__", "task")
        try:
            await work(*args)  # type: ignore[misc]
        except DecentralError as error:
            self._on_event("dropped", {"what": what, "why": str(error)})
        except Exception as error:  # noqa: BLE001  told with its traceback
            tell_unexpected(self._on_event, what, error)


def tell_unexpected(on_event: OnEvent, what: str, error: Exception) -> None:
    """Tell of a mistake of this package, which a peer's bytes may have led to: as in every handler, nobody ends a peer
    so.

    A step that was carried out by half does all the same, see ``Steps``.
    """
    logger.error("%s failed; rounds go on without it, and this is a bug: please report it", what, exc_info=error)
    on_event("unexpected", {"what": what, "why": f"{type(error).__name__}: {error}"})


# ---- peers to catch up with ----
#
# Any part that notices one says so; ``CatchUp`` does it, one at a time.


AGAIN_AFTER = 1.0  # s until one that led nowhere is asked for the second time
AGAIN_AT_MOST = 4.0  # s: it may have been behind itself, and the only one that is reached


class CatchUpRequests:
    """The newest request to catch up: the last asked wins, as a peer that is ahead is noticed again at the next look.

    A peer that led nowhere is passed over for a while, each time for twice as long: one that only says it is ahead was
    asked all the time, and so was the third of three branches, and never the second.
    """

    def __init__(self, longest: float) -> None:
        """``longest``: seconds for which one is passed over at most."""
        self._longest = longest
        self._peer: PeerId | None = None
        self._asked = anyio.Event()
        self._vain: dict[PeerId, tuple[float, float]] = {}  # passed over until then, for so many seconds

    def ask(self, peer: PeerId) -> None:
        """Catch up with ``peer`` soon."""
        if anyio.current_time() >= self._vain.get(peer, (-math.inf, 0.0))[0]:
            self._peer = peer
            self._asked.set()

    def led_on(self, peer: PeerId) -> None:
        """Note that a peer had what was missing."""
        self._vain.pop(peer, None)

    def led_nowhere(self, peer: PeerId) -> None:
        """Note that a peer was asked in vain."""
        now = anyio.current_time()
        _, seconds = self._vain.get(peer, (0.0, 0.0))
        seconds = min(self._longest, max(AGAIN_AFTER, 2 * seconds))
        self._vain = {other: kept for other, kept in self._vain.items() if now < kept[0] + self._longest}
        self._vain[peer] = now + seconds, seconds

    async def next(self) -> PeerId | None:
        """Wait for a request and take it; None when it was dropped meanwhile."""
        await self._asked.wait()
        self._asked = anyio.Event()
        peer, self._peer = self._peer, None
        return peer

    def drop(self) -> None:
        """Forget what was asked meanwhile: a peer that is ahead still is asked for again at the next tick."""
        self._peer = None
