"""What one peer's rounds hold, and what they are made from. The roles beside it are given it and act on it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from decentral.consensus.chain import Digest, Head, Past
from decentral.consensus.machine import RoundMachine
from decentral.consensus.paxos import Acceptor
from decentral.consensus.round_state import RoundTerms
from decentral.dissemination.broadcast import LinesOf, all_equal
from decentral.dissemination.pull import FrameStore
from decentral.flow.offload import Offload, in_thread
from decentral.replica.contribution import Contribution, Outbox
from decentral.replica.figures import Figures
from decentral.replica.measures import Measure
from decentral.replica.reduction import Results
from decentral.replica.replica import Replica
from decentral.rounds.catchup.requests import CatchUpRequests
from decentral.rounds.inbox import Inbox
from decentral.rounds.pairs.partners import Partners
from decentral.rounds.slices import Slices
from decentral.rounds.steps import Tasks
from decentral.rounds.updates import CommittedUpdate, Ledger
from decentral.swarm.directory import Directory
from decentral.transport import Transport
from decentral.wire.frames import HEADER_NBYTES, Frame
from decentral.wire.keys import PeerId, Signer

KEEP_ROUNDS = 64  # rounds of frames kept for those who missed them


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnParts:
    """What this peer has of its own."""

    signer: Signer
    head: Head
    acceptor: Acceptor | None = None
    terms: RoundTerms
    replica: Replica
    inbox: Inbox
    ledger: Ledger
    partners: Partners | None = None  # where peers gossip
    offload: Offload = in_thread
    reserve: int = 1 << 28  # bytes of frames kept and unpacked, and of what may be owed again


@dataclass(frozen=True, slots=True, kw_only=True)
class SwarmAccess:
    """Its ways to the others, and how long they may be silent."""

    transport: Transport
    directory: Directory
    lease: float  # s
    shrink_after: float  # s
    lines_of: LinesOf = all_equal  # what peers can send, as far as is known


@dataclass(frozen=True, slots=True, kw_only=True)
class Listeners:
    """What is called when something happens."""

    on_update: Callable[[CommittedUpdate], None]
    on_event: Callable[[str, dict[str, object]], None]
    on_figures: Callable[[Figures], None] = lambda figures: None  # before the update of the same round


class LocalState:
    """One peer's part in its run. Roles keep what only they look at."""

    machine: RoundMachine  # made when the rounds begin, at the head that is known by then

    def __init__(self, parts: OwnParts, listeners: Listeners) -> None:
        self.signer, self.me, self.terms = parts.signer, parts.signer.peer, parts.terms
        self.replica, self.inbox, self.ledger = parts.replica, parts.inbox, parts.ledger
        self.partners, self.offload = parts.partners, parts.offload
        self.on_update, self.on_event = listeners.on_update, listeners.on_event
        self.on_figures = listeners.on_figures
        self.tasks = Tasks(listeners.on_event)
        self.catch_up = CatchUpRequests()
        self.store = FrameStore(parts.reserve - parts.replica.contents.unpacked.capacity)
        self.frame_limit = HEADER_NBYTES + parts.inbox.limit()
        self.outbox = Outbox(parts.replica.codec, parts.reserve)
        self.pending: Contribution | None = None
        self.contributed = 0
        self.inherits = False  # whether a previous incarnation may have sent what no record has named yet
        self.reclaimed = False  # whether progress was given to a branch, too, that was given up and may come back
        self.slices, self.results = Slices(parts.replica.tail), Results()
        self.left: dict[Digest, Tensor] = {}  # by the results made here in this round, what each leaves to owe
        self.measured: dict[tuple[int, int], dict[PeerId, Measure]] = {}  # (round, plan) -> slices of a part of ours
        self._start: tuple[Head, Acceptor | None, Past] = (parts.head, parts.acceptor, Past())

    @property
    def head(self) -> Head:
        """Where this peer's chain stands."""
        return self.machine.head if self.running else self._start[0]

    @property
    def running(self) -> bool:
        """Whether this peer is in step with a chain; before that, its head is only a placeholder."""
        return self.tasks.begun

    @property
    def is_member(self) -> bool:
        """Whether this peer votes in the round in progress."""
        return self.me in self.head.members

    @property
    def gossips(self) -> bool:
        """Whether each peer has its own replica, and there is no anchor to compare or to take over."""
        return self.partners is not None

    def begin_at(self, head: Head, acceptor: Acceptor | None = None, past: Past | None = None) -> None:
        """Stand at ``head`` when the rounds begin: learnt from a verified snapshot, or replayed from the journal.

        ``past``: what is known of the way there, and the frames of the record that ``acceptor`` voted for, which the
        others may have from nobody else.
        """
        self._start = (head, acceptor, past or Past())
        self.inherits = self.reclaimed = past is not None

    def begin(self, now: float) -> None:
        """Make the machine, at the head that is known by now."""
        head, acceptor, past = self._start
        self.machine = RoundMachine(self.signer, head, self.terms, now, acceptor)
        self.machine.remember(past)
        self.make_room()
        for frame in past.frames:
            self.keep(frame)

    # ---- frames ----

    def keep(self, frame: Frame) -> None:
        """Store a checked frame, in the place of others if need be."""
        for dropped in self.store.add(frame):
            self.machine.state.held.pop(dropped, None)

    def stored(self, frame: bytes) -> Frame:
        """A frame that is held."""
        found = self.store.get(frame)
        assert found is not None, "the machine decides only on frames that are held"
        return found

    def make_room(self) -> None:
        """A new round is open: two frames per member are what it can need, a contribution and a result."""
        head = self.machine.head
        self.store.open(head.round + 1, 2 * self.frame_limit * len(head.members))

    def tidy(self, round_: int) -> None:
        """Drop what belongs to rounds up to ``round_`` and is of no use to those who missed them."""
        self.store.forget_before(round_ - KEEP_ROUNDS)
        self.make_room()
        self.inbox.forget_before(round_ + 1)
        self.replica.contents.unpacked.forget_before(round_ + 1)
        self.slices.forget()
        self.results.forget()
        self.left, self.measured = {}, {}
