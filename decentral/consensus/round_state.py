"""What every role of a round stands on: the chain's head, what was seen of the round, what is to be done.

Plain data and small queries. The roles are objects that are given it: offers, voter, leader, learner, attendance.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from decentral.consensus import chain
from decentral.consensus.acceptor import Acceptor
from decentral.consensus.allowance import Takes, Unsent, allowance, unknown
from decentral.consensus.ballot import PLANS_PER_BALLOT, Ballot, Partition
from decentral.consensus.chain import Digest, Head
from decentral.consensus.collection import Collection, claims_match
from decentral.consensus.deadline import Deadline
from decentral.consensus.early import EarlyMessages
from decentral.consensus.effects import CatchUpWith, Effect, Persist, Send
from decentral.consensus.farewells import Farewells
from decentral.consensus.history import Branch, History
from decentral.consensus.membership import Presence
from decentral.consensus.paces import Paces
from decentral.consensus.run_clock import RunClock
from decentral.consensus.voting import VOTING, Voting
from decentral.errors import PayloadError
from decentral.wire import messages as m
from decentral.wire.frames import FrameKind, Header
from decentral.wire.keys import PeerId, Signer, peer_name

FETCH_AFTER = 1.0  # s a pushed frame may take before it is asked for: a fetch at once would send most frames twice
RESEND_AFTER = 3.0  # s before a message without an answer is sent again


@dataclass(frozen=True, slots=True)
class RoundTerms:
    """What the machine needs to know of the manifest."""

    num_fragments: int
    rounds: int  # outer steps after which the run is done
    min_peers: int  # members below which nothing is committed
    floor: float  # s, least slack given to late offers
    ceiling: float  # s, longest wait after the first offer
    patience: float  # s a leader may take before the next one tries; doubles with every ballot
    partition: Callable[[int, tuple[PeerId, ...]], Partition] | None = None  # reduce: (fragment, owners) -> ranges
    steps: int = 0  # inner steps of a full contribution
    overlaps: bool = False  # whether peers train on while a round is in flight
    largest: int = 1 << 40  # bytes of the largest frame that can be valid
    takes: Takes = unknown
    quorum: int = 0  # contributions with which a round goes on without the rest; 0: all who are present
    grace: float = 0.0  # s after they were there in which more are taken
    offered: FrameKind = FrameKind.CONTRIBUTION  # what peers offer; where they gossip, MERGE
    states: Callable[[int], int] = lambda outer_step: 0  # channels beside the change of a contribution to that step
    max_staleness: int = 0  # outer steps that a contribution may be older than one that is in time
    clock: RunClock = field(default_factory=RunClock)  # of a run that ends by time
    voting: Voting = VOTING

    @property
    def enough(self) -> int:
        """Contributions that are a quorum; 0 when there is none to wait for."""
        return max(self.quorum, self.min_peers) if self.quorum else 0

    @property
    def named(self) -> FrameKind:
        """The frames that records name."""
        return self.offered if self.partition is None else FrameKind.RESULT


class RoundState:
    """Where one peer stands in the round in progress, and what it knows of the others."""

    def __init__(
        self, signer: Signer, head: Head, terms: RoundTerms, now: float, acceptor: Acceptor | None = None
    ) -> None:
        self.signer = signer
        self.me = signer.peer
        self.terms = terms
        self.deadline = Deadline(terms.floor, terms.ceiling)
        self.paces = Paces(terms.steps, overlaps=terms.overlaps)
        self.presence = Presence(self.me, terms.voting)
        self.farewells = Farewells(terms.voting)
        self.has_left = False  # and votes no more
        self.stands_at: dict[PeerId, int] = {}  # rounds that members said they have reached
        self.joiners: dict[PeerId, m.JoinRequest] = {}
        self.recent: OrderedDict[int, m.Commit] = OrderedDict()
        self.history = History(head)
        self.given_up: frozenset[PeerId] = frozenset()  # dropped without a majority left, and not back
        self.held: dict[Digest, Header] = {}
        self.unsent = Unsent()
        self.early = EarlyMessages()
        self.remembered = acceptor  # as the disk had it when this process began
        self.effects: list[Effect] = []
        self.restart(head, now)

    def restart(self, head: Head, now: float) -> None:
        """Stand at ``head`` with nothing seen of the next round: at start, after a commit, after a catch-up."""
        self.head = head
        self._leaders = self.terms.voting.leaders(head)
        self.committee = self.terms.voting.committee(head)  # see Voting; who votes while a majority of them is there
        self.offerers = head.members if self.me in self.committee else self.committee  # whose offers come here
        self.paces.keep(head.members)
        self.acceptor = self._last_vote(head) or Acceptor(head.round + 1)
        self.round = Collection(now)
        self.results: dict[tuple[int, int], m.FrameRef] = {}
        self.leading: Ballot | None = None
        self.proposal: tuple[PeerId, m.Proposal] | None = None
        self.decided: tuple[PeerId, m.Commit] | None = None
        self.stalled_since: float | None = None
        self.promised_since: tuple[int, float] | None = None  # the ballot that is promised, and since when
        self.planned_number = -1
        self.plans: dict[int, Digest] = {}  # by number, those that were carried out here
        self.held = {frame: header for frame, header in self.held.items() if header.round > head.round}
        for frame, header in self.held.items():
            self.note_result(frame, header)

    def switch(self, head: Head, branch: Branch, now: float) -> None:
        """Stand at ``head`` of another branch, or so far ahead that what lies between is unknown.

        What was promised on the old branch binds nobody here: records name their predecessor, so none can be of both.
        """
        self.history.switch(branch.shared, (*branch.heads, head))
        self.recent.clear()
        self.early.clear()
        self.given_up = frozenset()
        self.restart(head, now)

    def _last_vote(self, head: Head) -> Acceptor | None:
        """What was promised and accepted before this process began, if it was for the round after ``head``."""
        kept = self.remembered
        return kept if kept is not None and kept.continues(head.round, head.hash) else None

    @property
    def forgetful(self) -> bool:
        """Whether this peer voted in later rounds than it remembers commits of: its disk lost the end of the chain.

        It may have been the one peer that the quorum of a forgotten round and the next quorum share, so it takes part
        in no ballot until it has caught up, or until ``forget``.
        """
        return self.remembered is not None and self.remembered.round > self.head.round + 1

    def forget(self) -> None:
        """Nobody else knows of the forgotten rounds either: go on without them."""
        self.remembered = None

    @property
    def is_bound_in_vain(self) -> bool:
        """Whether this peer voted for a record that nobody votes for any more: it drops members that came back, or
        names frames that this peer has no longer, as after a part of its disk is lost.

        It may be committed, so every later leader proposes it again.
        """
        accepted = self.acceptor.accepted
        if accepted is None:
            return False
        return not self.presence.may_drop(accepted) or any(ref.frame not in self.held for ref in accepted.frames)

    def forget_what_it_accepted(self) -> None:
        """Nobody stands behind that record, and nobody has its frames: ballots go on without it."""
        self.become(Acceptor(self.acceptor.round, self.acceptor.promised))
        self.proposal = None

    @property
    def may_vote(self) -> bool:
        """Whether this peer's word counts in the ballots of the round."""
        return not self.forgetful and not self.has_left and self.me in self.head.members

    @property
    def reduces(self) -> bool:
        """Whether owners average slices, so that no frame is there before a plan."""
        return self.terms.partition is not None

    def leader_of(self, ballot: int) -> PeerId:
        """The peer that leads ``ballot`` of the round in progress."""
        return self._leaders[ballot % len(self._leaders)]

    @property
    def voters(self) -> tuple[PeerId, ...]:
        """Whose promises and votes decide, as far as is known here who is given up."""
        return self.terms.voting.voters(self.head, self.presence.given_up())

    def next_members(self) -> tuple[PeerId, ...]:
        """The membership that a record made now would set."""
        return self.presence.next_members(self.head, self.joiners)

    def succeeds(self, record: m.Record, sender: PeerId) -> bool:
        """Whether ``record`` continues our chain; if not, one of us is on another branch and the shell compares."""
        try:
            chain.check_succession(self.head, record)
        except PayloadError:
            self.effects.append(CatchUpWith(sender))
            return False
        return True

    def check_age(self, progress: Iterable[m.FrameRef | m.Offer]) -> None:
        """Raise PayloadError unless all of it may be committed in this round, as every peer finds alike."""
        chain.check_age(progress, self.head.outer_step, self.terms.max_staleness)

    def check_acceptable(self, record: m.Record) -> None:
        """Raise PayloadError for a record that no peer of this run accepts: nobody is bound by what one says it did."""
        chain.check_age(chain.contributions(record), record.outer_step, self.terms.max_staleness)
        chain.check_turn(record, self.terms.num_fragments)
        for ref in record.frames:
            if ref.frame in self.held and not claims_match(self.held[ref.frame], ref):
                raise PayloadError(f"a record says of the frame of {peer_name(ref.peer)} what it did not sign; drop it")

    def check_own(self, contributors: Iterable[m.FrameRef]) -> None:
        """Raise PayloadError where this peer's contribution is said to be what it did not offer.

        Nobody is asked to believe this peer: votes of a majority that was told otherwise are binding all the same.
        """
        mine = self.round.offers.get(self.me)
        for ref in contributors:
            if mine is not None and ref.peer == self.me and ref.frame == mine.frame and not _as_offered(ref, mine):
                raise PayloadError("a record or plan says of this peer's contribution what it did not offer; drop it")

    def patience(self, plans: float = 1.0) -> float:
        """Seconds to wait for what it takes ``plans`` plans of a reduce to get; its slices alone are half of one."""
        return self.terms.patience + (plans * self.allowed() if self.reduces else 0.0)

    def allowed(self, peers: Iterable[PeerId] | None = None) -> float:
        """Seconds that the slowest of ``peers`` has for what it offered; None: of all that have."""
        members, takes = self.head.members, self.terms.takes
        copies = 2 if self.reduces else len(members) - 1  # slices and results: about two bodies
        asked = self.round.offers if peers is None else peers
        found = [(offer.nbytes, peer) for peer in asked if (offer := self.round.offers.get(peer)) is not None]
        if peers is None and found and len(self.offerers) < len(members):  # of the others only their lines are known
            found += [(max(found)[0], peer) for peer in members if peer not in self.offerers]
        return max((allowance(nbytes, copies, takes(nbytes, peer, members)) for nbytes, peer in found), default=0.0)

    def is_back(self, peer: PeerId) -> None:
        """``peer`` spoke after its farewell."""
        self.presence.leaving.discard(peer)
        self.farewells.forget(peer)

    def stall(self, now: float) -> None:
        """There is work since ``now``, or since before."""
        self.stalled_since = now if self.stalled_since is None else self.stalled_since

    def note_result(self, frame: Digest, header: Header) -> None:
        """Book a held frame if it is an owner's result of the round in progress."""
        if header.kind == FrameKind.RESULT and header.round == self.head.round + 1:
            ref = m.FrameRef(header.sender, frame, header.part, header.steps, header.tokens, self.head.outer_step)
            self.results.setdefault((header.plan, header.part), ref)

    def carries_out(self, plan: m.ReducePlan) -> None:
        """Remember what results of ``plan`` are made for."""
        self.plans[plan.number] = _digest_of(plan)

    def is_as_planned(self, record: m.Record) -> bool:
        """Whether the results that ``record`` names were made for its ranges and contributors, as far as is known here.

        With other ranges they could not be laid together once it is committed.
        """
        if not record.contributors or (known := self.plans.get(record.plan)) is None:
            return True
        ballot, parts = record.plan // PLANS_PER_BALLOT, (record.contributors, record.partition)
        return known == _digest_of(m.ReducePlan(record.epoch, record.round, ballot, record.plan, *parts))

    def become(self, acceptor: Acceptor) -> None:
        """Promise or accept; durable before anything that is said after it."""
        self.acceptor = acceptor
        self.effects.append(Persist(acceptor))

    def send(self, to: PeerId, message: m.Message) -> None:
        """Say something to one peer."""
        self.effects.append(Send(to, message))

    def broadcast(self, message: m.Message, but: Iterable[PeerId] = ()) -> None:
        """Say something to every other member."""
        self.tell(self.head.members, message, but)

    def tell(self, peers: Iterable[PeerId], message: m.Message, but: Iterable[PeerId] = ()) -> None:
        """Say something to all of ``peers`` that are others, once."""
        skip = {self.me, *but}
        for peer in dict.fromkeys(peers):
            if peer not in skip:
                self.send(peer, message)


def _as_offered(ref: m.FrameRef, offer: m.Offer) -> bool:
    named = (ref.steps, ref.tokens, ref.based, ref.summary)
    return named == (offer.steps, offer.tokens, offer.based, offer.summary)


def _digest_of(plan: m.ReducePlan) -> Digest:
    return hashlib.blake2b(m.encode(plan), digest_size=32).digest()
