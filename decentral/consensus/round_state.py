"""The state of one peer in a round: what was seen of it, what is kept for later, what the shell is asked to do.

Plain data and small queries. The roles of a round (`decentral.consensus.voter`, `.leader`, `.learner`) and the
judgement of records (`.acceptance`) are functions of a ``RoundState``.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from decentral.consensus.chain import VOTING, Branch, Head, History, Presence, Voting
from decentral.consensus.paxos import (
    Acceptor,
    Ballot,
    Farewells,
    Partition,
    Refusals,
)
from decentral.consensus.timing import Deadline, Paces, Takes, Unsent, allowance, no_measurement
from decentral.wire import messages as m
from decentral.wire.frames import FrameKind, Header, claims_of
from decentral.wire.keys import Digest, PeerId, Signer

# ---- offers and frames of the round ----
#
# From what one peer has seen of them, and from who is there, it follows whether to go on.


class SeenOfRound:
    """Offers and frames of one round, as one peer has seen them."""

    def __init__(self, opened: float) -> None:
        self.opened = opened
        self.offers: dict[PeerId, m.Offer] = {}
        self.offered_at: dict[PeerId, float] = {}
        self.first_offer: float | None = None
        self.arrived: set[PeerId] = set()
        self._described: dict[PeerId, Header] = {}  # held, of whom the offer says what the frame does
        self.quorum_since: float | None = None  # since when as many were usable as a quorum is
        self.ask_at: dict[Digest, float] = {}  # when a frame that is missing will be asked for

    def add(self, peer: PeerId, offer: m.Offer, now: float) -> bool:
        """Take the first offer of a peer; an equivocating second one is ignored."""
        if peer in self.offers:
            return False
        self.offers[peer] = offer
        self.offered_at[peer] = now
        self.first_offer = now if self.first_offer is None else self.first_offer
        return True

    def usable(self, head: Head, held: Mapping[Digest, Header], kind: FrameKind, states: int = 0) -> list[PeerId]:
        """Return the members whose offers start from our anchor and whose frames are here, in peer order.

        ``kind``: of the frames that a record names; results are not there before a plan. ``states``: channels beside
        the change that a contribution has in this round.
        """
        if not self.offers:
            return []  # as with most ticks: peers train
        return [
            peer
            for peer in head.members
            if (offer := self.offers.get(peer)) is not None
            and offer.base == head.anchor
            and (kind == FrameKind.RESULT or self._is_held(offer, peer, held, kind, states))
        ]

    def _is_held(
        self, offer: m.Offer, peer: PeerId, held: Mapping[Digest, Header], kind: FrameKind, states: int
    ) -> bool:
        """Tell whether the frame that a peer offered is here; asked with every event, so each frame is compared
        once.
        """
        header = held.get(offer.frame)
        if header is None:
            return False
        if self._described.get(peer) is header:
            return True
        if not _describes(offer, peer, header, kind, states):
            return False
        self._described[peer] = header
        return True

    def newly(self, usable: Iterable[PeerId]) -> list[m.Offer]:
        """Return the offers among ``usable`` that were not before."""
        new = [peer for peer in usable if peer not in self.arrived]
        self.arrived.update(new)
        return [self.offers[peer] for peer in new]

    def ready(
        self,
        usable: Sequence[PeerId],
        expected: Sequence[PeerId],
        newcomers: Container[PeerId],
        deadline: Deadline,
        now: float,
    ) -> bool:
        """Tell whether all ``expected`` ones have offered, or the deadline is over and waiting longer helps nobody."""
        if self.first_offer is None:
            return False
        if now >= self.first_offer + deadline.ceiling:
            return True
        here = set(usable)
        if all(peer in here or peer in newcomers for peer in expected):
            return True
        if now < deadline.at(self.opened, self.first_offer):
            return False
        return 2 * len(usable) >= len(expected)


def _describes(offer: m.Offer, peer: PeerId, header: Header, kind: FrameKind, states: int) -> bool:
    """Tell whether an offer says of a frame what the frame says of itself: else nobody could vote for it."""
    found = (header.sender, header.epoch, header.round, header.fragment, header.base)
    said = (peer, offer.epoch, offer.round, offer.fragment, offer.base)
    return found == said and (header.kind, header.states) == (kind, states) and claims_match(header, offer)


def claims_match(header: Header, said: m.Offer | m.FrameRef) -> bool:
    """Tell whether what is said of a frame, which its weight may follow from, is what its sender signed with it."""
    signed = (header.steps, header.tokens, header.claims)
    return signed == (said.steps, said.tokens, claims_of(said.based, said.summary))


def references(peers: Iterable[PeerId], offers: Mapping[PeerId, m.Offer]) -> tuple[m.FrameRef, ...]:
    """Write the offers of ``peers`` as a record names them, in peer order."""
    said = ((peer, offers[peer]) for peer in sorted(peers))
    return tuple(
        m.FrameRef(peer, offer.frame, 0, offer.steps, offer.tokens, offer.based, offer.summary) for peer, offer in said
    )


def fits(header: Header, ref: m.FrameRef, record: m.Record, kind: FrameKind, states: int = 0) -> bool:
    """Tell whether a held frame is the one the record means: every field that changes its meaning is compared.

    ``kind``: of what records of this run name; of another, it could not be decoded once it is committed. ``states``:
    channels beside the change that what the record names has in its outer step.
    """
    return (
        (header.kind, header.sender, header.round, header.epoch) == (kind, ref.peer, record.round, record.epoch)
        and (header.fragment, header.base, header.part) == (record.fragment, record.base, ref.part)
        and (kind == FrameKind.RESULT) == bool(record.contributors)
        and (kind != FrameKind.RESULT or header.plan == record.plan)
        and header.states == states
        and claims_match(header, ref)
    )


# ---- messages that came too early ----
#
# They are of rounds that are yet to come here, and are kept until their round is open.

MOST_OF_STRANGERS = 32  # messages kept of peers that are no members yet: 32 MiB, were all the largest


class EarlyMessages:
    """The newest message of each kind by each peer."""

    def __init__(self) -> None:
        self._kept: dict[tuple[PeerId, str], m.Message] = {}

    def keep(self, sender: PeerId, message: m.Message, members: Container[PeerId]) -> None:
        """Keep a message. Strangers may be members of its round, but cost nothing to make: few of theirs fit."""
        kept = (sender, type(message).__name__)
        strangers = sum(peer not in members for peer, _ in self._kept)
        if sender in members or kept in self._kept or strangers < MOST_OF_STRANGERS:
            self._kept[kept] = message

    def take_all(self) -> list[tuple[PeerId, m.Message]]:
        """Take all messages, oldest first; none is left."""
        taken = list(self)
        self.clear()
        return taken

    def clear(self) -> None:
        """Forget all."""
        self._kept.clear()

    def __iter__(self) -> Iterator[tuple[PeerId, m.Message]]:
        return ((peer, message) for (peer, _), message in self._kept.items())


# ---- effects, for the shell to carry out ----
#
# Data only, of what the round machine asks for; the shell carries it out in order.


@dataclass(frozen=True, slots=True)
class Send:
    """Send ``message`` to one peer; a failure comes back as ``unreachable``."""

    to: PeerId
    message: m.Message


@dataclass(frozen=True, slots=True)
class Persist:
    """Make the acceptor durable before any later effect is carried out."""

    acceptor: Acceptor


@dataclass(frozen=True, slots=True)
class Fetch:
    """Get a frame from any of these holders, likeliest first; it comes back as ``hold``."""

    frame: Digest
    owner: PeerId  # the peer that made it and may be sending it now
    round: int  # in which it is needed, and no longer
    holders: tuple[PeerId, ...]
    record: m.Record | None = None  # that names it; of a reduce it says how large a result is, if the plan never came


@dataclass(frozen=True, slots=True)
class SendSlices:
    """Send each owner of ``plan`` its slice of this peer's contribution, and reduce the partition owned here."""

    plan: m.ReducePlan


@dataclass(frozen=True, slots=True)
class Decide:
    """Log the commit durably, then apply it, then call ``note_applied``. Every named frame is held."""

    commit: m.Commit
    known_since: float  # s; its frames may have come much later


@dataclass(frozen=True, slots=True)
class CatchUpWith:
    """This peer missed commits: fetch them from ``peer``, which is ahead, or is on another branch."""

    peer: PeerId


@dataclass(frozen=True, slots=True)
class Mistake:
    """Tell that this peer made something wrong, and why: rounds go on without it."""

    what: str
    error: Exception


Effect = Send | Persist | Fetch | SendSlices | Decide | CatchUpWith | Mistake

# ---- the clock of a run that ends by time ----
#
# By it one part of a peer tells all the others when the time is up.


CLOCKS_DIFFER = 10.0  # s that the run may be younger here than where its end is proposed; a tenth of a short run


@dataclass(slots=True)
class RunClock:
    """The end of a run by time: set on the swarm's thread, read by the round machine and by the training thread."""

    minutes: float | None = None  # None: the run ends by its rounds
    is_up: bool = False
    _left: float = math.inf  # s

    def tell(self, age: float) -> None:
        """Set the clock: the run has lasted ``age`` seconds."""
        if self.minutes is not None:
            self._left = 60 * self.minutes - age
            self.is_up = self._left <= 0

    @property
    def is_nearly_up(self) -> bool:
        """Tell whether another peer may say that the time is up."""
        return self.is_up or (self.minutes is not None and self._left <= min(CLOCKS_DIFFER, 6 * self.minutes))


# ---- a peer that comes back ----
#
# It slept, was restarted, or was on another branch. What the others did meanwhile it hears from them, and not before
# it has heard all of them, or has waited for as long as one that is here may be silent, does its vote count again: two
# of three that woke together would else decide on a round which the third had decided long ago.


class Returning:
    """The time until which this peer only listens. ``excused``: it was away for so long that the others could give it
    up.
    """

    def __init__(self, since: float, until: float, *, excused: bool) -> None:
        self.since, self.until, self.excused = since, until, excused
        self._answered: set[PeerId] = set()

    def note_answer(self, peer: PeerId) -> None:
        """Note that ``peer`` has said since where it stands, and that is where this peer stands."""
        self._answered.add(peer)

    def is_over(self, members: Iterable[PeerId], now: float) -> bool:
        """Tell whether all ``members`` have answered, or waiting longer helps nobody."""
        return now >= self.until or self._answered.issuperset(members)


# ---- what every role stands on ----
#
# The chain's head, what was seen of the round, what is to be done.

FETCH_AFTER = 1.0  # s a pushed frame may take before it is asked for: a fetch at once would send most frames twice
RESEND_AFTER = 3.0  # s before a message without an answer is sent again


@dataclass(frozen=True, slots=True)
class RoundTerms:
    """The part of the manifest that the machine needs to know."""

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
    takes: Takes = no_measurement
    quorum: int = 0  # contributions with which a round goes on without the rest; 0: all who are present
    grace: float = 0.0  # s after they were there in which more are taken
    offered: FrameKind = FrameKind.CONTRIBUTION  # what peers offer; where they gossip, MERGE
    states: Callable[[int], int] = lambda outer_step: 0  # channels beside the change of a contribution to that step
    max_staleness: int = 0  # outer steps that a contribution may be older than one that is in time
    clock: RunClock = field(default_factory=RunClock)  # of a run that ends by time
    voting: Voting = VOTING
    lease: float = 20.0  # s for which a peer counts as here after it said so
    overlong: Callable[[m.Record], frozenset[PeerId]] = lambda record: frozenset()  # owners of results that are no mean

    @property
    def enough(self) -> int:
        """Return the contributions that are a quorum; 0 when there is none to wait for."""
        return max(self.quorum, self.min_peers) if self.quorum else 0

    @property
    def named(self) -> FrameKind:
        """Return the kind of frames that records name."""
        return self.offered if self.partition is None else FrameKind.RESULT


class RoundState:
    """The knowledge and the promises of one peer in the round in progress, and what it wants done because of them."""

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
        self.refusals = Refusals()
        self.last_active: dict[PeerId, int] = {}  # rounds in which members are known to have offered or voted
        self.came_back_in: dict[PeerId, int] = {}  # rounds in which members took back that they leave
        self.returning: Returning | None = None  # since this peer came back
        self.has_left = False  # and votes no more
        self.stands_at: dict[PeerId, int] = {}  # rounds that members said they have reached
        self.rests: dict[PeerId, int] = {}  # owners of false results, and the round up to which no plan has them
        self.joiners: dict[PeerId, m.JoinRequest] = {}
        self.recent: OrderedDict[int, m.Commit] = OrderedDict()
        self.history = History(head)
        self.followed: set[Digest] = set()  # records that give up peers, who follow them all the same
        self.given_up: frozenset[PeerId] = frozenset()  # dropped without a majority left, and not back
        self.held: dict[Digest, Header] = {}
        self.unsent = Unsent()
        self.early = EarlyMessages()
        self.remembered = acceptor  # as the disk had it when this process began
        self.objected: tuple[tuple[Digest, int] | None, float | None] = None, None  # record and ballot, since when
        self.offer_told_at = 0.0  # when this peer's offer was last sent
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
        self.round = SeenOfRound(now)
        self.results: dict[tuple[int, int, PeerId], m.FrameRef] = {}
        self.leading: Ballot | None = None
        self.proposal: tuple[PeerId, m.Proposal] | None = None
        self.prepares: dict[PeerId, m.Prepare] = {}  # by leaders whose turn it is not yet
        self.taken_early: dict[PeerId, int] = {}  # how many of each were promised before its turn
        self.refused_ballot = -1  # the newest that cannot end in a decision, for its record is refused
        self.refusals.forget_ballots()
        self.decided: tuple[PeerId, m.Commit] | None = None
        self.decided_since = 0.0
        # decided, and their frames are nowhere; who told of them, and when
        self.put_back: dict[Digest, tuple[PeerId, m.Commit, float]] = {}
        self.stalled_since: float | None = None
        self.promised_since: tuple[int, float] | None = None  # the ballot that is promised, and since when
        self.planned_number = -1
        self.plans: dict[int, Digest] = {}  # by number, those that were carried out here
        self.held = {frame: header for frame, header in self.held.items() if header.round > head.round}
        for frame, header in self.held.items():
            self.note_result(frame, header)

    def switch(self, head: Head, branch: Branch, now: float) -> None:
        """Stand at ``head`` of another branch, or so far ahead that what lies between is unmeasured.

        What was promised on the old branch binds nobody here: records name their predecessor, so none can be of both.
        """
        self.history.switch(branch.shared, (*branch.heads, head))
        self.recent.clear()
        self.early.clear()
        self.given_up = frozenset()
        self.restart(head, now)

    def _last_vote(self, head: Head) -> Acceptor | None:
        """Return the acceptor of before this process began, if it was for the round after ``head``."""
        kept = self.remembered
        return kept if kept is not None and kept.continues(head.round, head.hash) else None

    @property
    def forgetful(self) -> bool:
        """Tell whether this peer voted in later rounds than it remembers commits of: its disk lost the end of the
        chain.

        It may have been the one peer that the quorum of a forgotten round and the next quorum share, so it takes part
        in no ballot until it has caught up, or until ``forget``.
        """
        return self.remembered is not None and self.remembered.round > self.head.round + 1

    def forget(self) -> None:
        """Go on without the forgotten rounds: nobody else knows of them either."""
        self.remembered = None

    @property
    def is_bound_in_vain(self) -> bool:
        """Tell whether this peer voted for a record that nobody votes for any more: it drops members that came back, or
        names frames that this peer has no longer, as after a part of its disk is lost.

        It may be committed, so every later leader proposes it again.
        """
        accepted = self.acceptor.accepted
        if accepted is None:
            return False
        return not self.presence.may_drop(accepted) or any(ref.frame not in self.held for ref in accepted.frames)

    def forget_what_it_accepted(self) -> None:
        """Go on without the accepted record: nobody stands behind it, and nobody has its frames."""
        self.persist(Acceptor(self.acceptor.round, self.acceptor.promised))
        self.proposal = None

    @property
    def may_vote(self) -> bool:
        """Tell whether this peer's word counts in the ballots of the round."""
        is_back = self.returning is None
        return is_back and not self.forgetful and not self.has_left and self.me in self.head.members

    @property
    def reduces(self) -> bool:
        """Tell whether owners average slices, so that no frame is there before a plan."""
        return self.terms.partition is not None

    def leader_of(self, ballot: int) -> PeerId:
        """Return the peer that leads ``ballot`` of the round in progress."""
        return self._leaders[ballot % len(self._leaders)]

    @property
    def voters(self) -> tuple[PeerId, ...]:
        """Return the peers whose promises and votes decide, as far as is known here who is given up."""
        return self.terms.voting.voters(self.head, self.presence.given_up())

    def expects(self, peer: PeerId) -> bool:
        """Tell whether a contribution of ``peer`` to the round in progress may come."""
        return peer in self.head.members and self.presence.may_offer(peer, self.fragment)

    @property
    def fragment(self) -> int:
        """Return the fragment whose turn it is."""
        return self.head.fragment(self.terms.num_fragments)

    def is_untrained(self, now: float) -> bool:
        """Tell whether the turn has to pass without those who train its fragment: nobody does who is here, or none of
        them has offered anything for a ceiling longer than is usual.
        """
        presence, away = self.presence, self.presence.expired | self.presence.leaving
        if not presence.parts:
            return False
        if not any(peer not in away and presence.trains(peer, self.fragment) for peer in self.head.members):
            return True
        usual = self.terms.ceiling if self.deadline.typical is None else self.deadline.typical
        return self.round.first_offer is None and now > self.round.opened + usual + self.terms.ceiling

    def expected(self) -> list[PeerId]:
        """Return the members whose contributions to the round in progress may come."""
        fragment = self.fragment
        return [peer for peer in self.head.members if self.presence.may_offer(peer, fragment)]

    def patience(self, plans: float = 1.0) -> float:
        """Return the seconds to wait for what it takes ``plans`` plans of a reduce to get; its slices alone are half of
        one.
        """
        return self.terms.patience + (plans * self.allowed() if self.reduces else 0.0)

    def allowed(self, peers: Iterable[PeerId] | None = None) -> float:
        """Return the seconds that the slowest of ``peers`` has for what it offered; None: of all that have."""
        members, takes = self.head.members, self.terms.takes
        copies = 2 if self.reduces else len(members) - 1  # slices and results: about two bodies
        asked = self.round.offers if peers is None else peers
        found = [(offer.nbytes, peer) for peer in asked if (offer := self.round.offers.get(peer)) is not None]
        if peers is None and found and len(self.offerers) < len(members):  # of the others only their lines are known
            found += [(max(found)[0], peer) for peer in members if peer not in self.offerers]
        return max((allowance(nbytes, copies, takes(nbytes, peer, members)) for nbytes, peer in found), default=0.0)

    def stall(self, now: float) -> None:
        """Note that there is work since ``now``, or since before."""
        self.stalled_since = now if self.stalled_since is None else self.stalled_since

    def note_result(self, frame: Digest, header: Header) -> None:
        """Book a held frame if it is an owner's result of the round in progress."""
        if header.kind == FrameKind.RESULT and header.round == self.head.round + 1:
            ref = m.FrameRef(header.sender, frame, header.part, header.steps, header.tokens, self.head.outer_step)
            self.results.setdefault((header.plan, header.part, header.sender), ref)

    def persist(self, acceptor: Acceptor) -> None:
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
