"""The state of one peer in a round: what was seen of it, what is kept for later, what the shell is asked to do.

Plain data and small queries. The roles of a round (`decentral.consensus.voter`, `.leader`, `.learner`) are objects
that are given a ``RoundState``.
"""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from decentral.consensus import chain
from decentral.consensus.chain import VOTING, Branch, Head, History, Place, Presence, Voting
from decentral.consensus.paxos import (
    PLANS_PER_BALLOT,
    Acceptor,
    Ballot,
    Farewells,
    Partition,
    Refusals,
    check_proposed,
    shows_farewell,
    shows_promise,
)
from decentral.consensus.timing import FIRST_REST, Deadline, Paces, Takes, Unsent, allowance, unmeasured
from decentral.errors import PayloadError
from decentral.wire import messages as m
from decentral.wire.frames import FrameKind, Header, claims_of
from decentral.wire.keys import Digest, PeerId, Signer, peer_name, verify

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
        """The members whose offers start from our anchor and whose frames are here, in peer order.

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
        """Whether what a peer offered is here; asked with every event, so each frame is compared once."""
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
        """The offers among ``usable`` that were not before."""
        new = [peer for peer in usable if peer not in self.arrived]
        self.arrived.update(new)
        return [self.offers[peer] for peer in new]

    def ready(self, usable: Sequence[PeerId], head: Head, presence: Presence, deadline: Deadline, now: float) -> bool:
        """All who are there have offered, or the deadline is over and waiting longer helps nobody."""
        if not usable or self.first_offer is None:
            return False
        if now >= self.first_offer + deadline.ceiling:
            return True
        here = set(usable)
        missing = (peer for peer in head.members if peer not in here and peer not in head.newcomers)
        if not any(presence.present(peer) for peer in missing):
            return True
        if now < deadline.at(self.opened, self.first_offer):
            return False
        return 2 * len(usable) >= sum(map(presence.present, head.members))


def _describes(offer: m.Offer, peer: PeerId, header: Header, kind: FrameKind, states: int) -> bool:
    """Whether an offer says of a frame what the frame says of itself: else nobody could vote for it."""
    found = (header.sender, header.epoch, header.round, header.fragment, header.base)
    said = (peer, offer.epoch, offer.round, offer.fragment, offer.base)
    return found == said and (header.kind, header.states) == (kind, states) and claims_match(header, offer)


def claims_match(header: Header, said: m.Offer | m.FrameRef) -> bool:
    """Whether what is said of a frame, which its weight may follow from, is what its sender signed with it."""
    signed = (header.steps, header.tokens, header.claims)
    return signed == (said.steps, said.tokens, claims_of(said.based, said.summary))


def references(peers: Iterable[PeerId], offers: Mapping[PeerId, m.Offer]) -> tuple[m.FrameRef, ...]:
    """The offers of ``peers`` as a record names them, in peer order."""
    said = ((peer, offers[peer]) for peer in sorted(peers))
    return tuple(
        m.FrameRef(peer, offer.frame, 0, offer.steps, offer.tokens, offer.based, offer.summary) for peer, offer in said
    )


def fits(header: Header, ref: m.FrameRef, record: m.Record, kind: FrameKind, states: int = 0) -> bool:
    """Whether a held frame is the one the record means: every field that changes its meaning is compared.

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
        """Strangers may be members of the round it belongs to, but cost nothing to make: few of theirs fit."""
        kept = (sender, type(message).__name__)
        strangers = sum(peer not in members for peer, _ in self._kept)
        if sender in members or kept in self._kept or strangers < MOST_OF_STRANGERS:
            self._kept[kept] = message

    def take_all(self) -> list[tuple[PeerId, m.Message]]:
        """All of them, oldest first; none is left."""
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
    holders: tuple[PeerId, ...]
    record: m.Record | None = None  # that names it; of a reduce it says how large a result is, if the plan never came


@dataclass(frozen=True, slots=True)
class SendSlices:
    """Send each owner of ``plan`` its slice of this peer's contribution, and reduce the partition owned here."""

    plan: m.ReducePlan


@dataclass(frozen=True, slots=True)
class Decide:
    """Log the commit durably, then apply it, then call ``applied``. Every named frame is held."""

    commit: m.Commit


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
    """Read by the round machine and by the training thread; told the run's age on the swarm's."""

    minutes: float | None = None  # None: the run ends by its rounds
    is_up: bool = False
    _left: float = math.inf  # s

    def tell(self, age: float) -> None:
        """The run has lasted ``age`` seconds."""
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
    """Until when this peer only listens. ``excused``: it was away for so long that the others could give it up."""

    def __init__(self, since: float, until: float, *, excused: bool) -> None:
        self.since, self.until, self.excused = since, until, excused
        self._answered: set[PeerId] = set()

    def answered(self, peer: PeerId) -> None:
        """``peer`` said since where it stands, and that is where this peer stands."""
        self._answered.add(peer)

    def is_over(self, members: Iterable[PeerId], now: float) -> bool:
        """Tell whether all ``members`` have, or waiting longer helps nobody."""
        return now >= self.until or self._answered.issuperset(members)


# ---- what every role stands on ----
#
# The chain's head, what was seen of the round, what is to be done.

FETCH_AFTER = 1.0  # s a pushed frame may take before it is asked for: a fetch at once would send most frames twice
MOST_UNKNOWN = 1  # newcomers that a record lets in of whom a voter has heard nothing
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
    takes: Takes = unmeasured
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
        self.put_back: dict[Digest, tuple[PeerId, m.Commit]] = {}  # decided, and their frames are nowhere
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
        is_back = self.returning is None
        return is_back and not self.forgetful and not self.has_left and self.me in self.head.members

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

    def next_members(self, now: float) -> tuple[PeerId, ...]:
        """The membership that a record made now would set."""
        disputed = {peer for peer in self.refusals.disputed(now) if peer is not None}
        return self.presence.next_members(self.head, self.joiners, disputed)

    def ends_with(self, record: m.Record, now: float) -> bool:
        """Tell whether a record of ours with these frames is the run's last."""
        is_up = self.terms.clock.is_up and None not in self.refusals.disputed(now)
        return bool(record.frames) and (record.outer_step + 1 >= self.terms.rounds or is_up)

    # ---- what a record changes, and whether this peer stands behind it ----

    def takes(self, commit: m.Commit) -> bool:
        """Tell whether a commit is learned as it was signed. One that gives up a majority is so only where this peer
        has given up those peers itself, holds their farewells, was away for so long that it cannot know, or voted in
        later rounds that its disk forgot, with whomever it gave up in them. Who is no member has no chain of its own to
        go on with, and takes what drops nobody that is here. None ends the run before its terms do.

        Else one vote of one peer, which counts for a record that drops all the others, would end the run of them all.
        """
        record = commit.record
        if not self.terms.voting.drops_majority(record):
            return True
        if record.final and not self._ends_as_agreed(record):
            return False
        was_away = self.returning is not None and self.returning.excused
        if was_away or self.forgetful or record.hash in self.followed:
            return True
        said = self.farewelled(commit.farewells, record)
        return self.presence.may_drop(record, said) or (
            self.me not in self.head.members and not chain.dropped_by(record) - said & self.presence.known
        )

    def note_followers(self, commits: Sequence[m.Commit], places: Mapping[PeerId, Place]) -> None:
        """Give those whom a record of a chain gives up, and who stand on that chain themselves, do not ask that anybody
        hold on to them. ``places``: where those who are here stand.
        """
        if len(self.followed) > chain.LENGTH:
            self.followed.clear()  # they cost one vote each to make up
        beyond = {(commit.record.round, commit.record.hash) for commit in commits}
        for commit in commits:
            record = commit.record
            voters = self.terms.voting.committee(record)
            there = {peer for peer, place in places.items() if place in beyond}
            left_behind = chain.dropped_by(record).intersection(voters) - there - self.presence.given_up() - {self.me}
            if self.terms.voting.drops_majority(record) and not left_behind:
                self.followed.add(record.hash)
            beyond.discard((record.round, record.hash))  # who stands there has not taken those after it

    def farewelled(self, shown: Iterable[m.Shown], record: m.Record) -> frozenset[PeerId]:
        """Members that said farewell, as it is shown, and have neither offered nor voted since, nor come back."""
        timely = [one for one in shown if self.last_active.get(one.peer, 0) <= one.round <= record.round]
        return frozenset(
            one.peer
            for one in timely
            if self.came_back_in.get(one.peer, -1) < one.round and shows_farewell(one, record.run)
        )

    def objections(self, proposal: m.Proposal) -> tuple[frozenset[PeerId], bool]:
        """Name whom a proposed record drops or lets in without reason, or whose result cannot be a mean, as far as this
        peer can tell; and whether it ends the run without a reason, or does not although it should.
        """
        record = proposal.record
        said = self.farewelled(proposal.farewells, record)
        wrong = self.presence.would_drop(record, said)
        if not self.presence.may_drop(record, said):
            wrong |= chain.dropped_by(record) - self.presence.given_up() - said
        overlong = self.terms.overlong(record) if record.partition else frozenset()
        self.rests.update(dict.fromkeys(overlong, record.round + FIRST_REST))
        wrong |= overlong
        joined = frozenset(record.next_members).difference(record.members)
        wrong |= joined - self.joiners.keys() - self._shown_to_ask(proposal)
        return wrong, not self._ends_as_agreed(record)

    def _shown_to_ask(self, proposal: m.Proposal) -> frozenset[PeerId]:
        """Newcomers whose signed requests the leader shows, and whose lease is here; and one of whom nothing is here,
        for it may reach nobody but the leader. More would be as many as a leader cares to make up.
        """
        run, known = proposal.record.run, self.presence.known
        asked = {
            one.peer
            for one in proposal.requests
            if verify(one.peer, one.signature, m.join_text(run, one.round, one.digest))
        }
        unknown = asked - known - self.joiners.keys() - set(proposal.record.members)
        return frozenset(asked if len(unknown) <= MOST_UNKNOWN else asked & known)

    def _ends_as_agreed(self, record: m.Record) -> bool:
        by_rounds = chain.moves_anchor(record) and record.outer_step + 1 >= self.terms.rounds
        if not record.final:
            return not by_rounds
        return by_rounds or (chain.moves_anchor(record) and self.terms.clock.is_nearly_up)

    def is_carried_on(self, proposal: m.Proposal) -> bool:
        """Tell whether its leader shows that it is bound to the record: a majority has promised its ballot, so many of
        them have accepted the record that it may be chosen, and not only who proposed it says so.

        Then it is voted for as it stands. It may have been chosen when its changes were right, and a voter that asks
        again would find that whom it drops is back. The word of who proposed it, or of who made a result that is no
        mean, is enough where all others who might know better are given up.
        """
        record, run = proposal.record, proposal.record.run
        if not self.presence.may_drop(record, self.farewelled(proposal.farewells, record)):
            return False  # of the few who are left each has to stand behind that
        voters = self.terms.voting.voters_on(record)
        shown = [one for one in proposal.promises if one.peer in voters and one.epoch == record.epoch]
        shown = [one for one in shown if one.round == record.round and shows_promise(one, run, proposal.ballot)]
        for_it = [one for one in shown if one.accepted == record.hash]
        if len(shown) < chain.majority(voters) or chain.is_refuted(voters, len(shown) - len(for_it)) or not for_it:
            return False
        if record.partition and (liars := self.terms.overlong(record)):
            answered = {one.peer for one in shown} | {self.me}
            alone = {one.peer for one in for_it} <= liars and not set(voters) - answered <= self.presence.given_up()
            if alone or self._is_denied(record, voters, shown):
                return False
        if len(for_it) > 1 or self.leader_of(for_it[0].accepted_ballot) != for_it[0].peer:
            return True
        return set(voters) - {one.peer for one in shown} <= self.presence.given_up()

    def _is_denied(self, record: m.Record, voters: Sequence[PeerId], shown: Iterable[m.Shown]) -> bool:
        """Tell whether no majority can have accepted a record whose result is no mean, as this peer sees it: who made
        that is the liar, so that the others and this peer are taken at their word.
        """
        against = {one.peer for one in shown if one.accepted != record.hash}
        if self.acceptor.accepted != record:
            against.add(self.me)
        return len(voters) - len(against.intersection(voters)) < chain.majority(voters)

    def check_proposed(self, proposal: m.Proposal) -> None:
        """Raise PayloadError unless the leader of its ballot signed it."""
        check_proposed(proposal.record, proposal.ballot, proposal.signature, self.leader_of)

    def active(self, peer: PeerId, round_: int) -> None:
        """``peer`` offered or voted in a round: what it said of its leaving before is void."""
        self.last_active[peer] = max(round_, self.last_active.get(peer, 0))

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
        """``peer`` spoke after its farewell: whoever shows it from now on shows what is void."""
        if peer in self.head.members:
            self.came_back_in[peer] = self.head.round + 1
        self.presence.leaving.discard(peer)
        self.farewells.forget(peer)

    def memory_begins(self) -> Head:
        """The oldest head from which every commit is kept; the newest where none is."""
        oldest = self.head
        while (commit := self.recent.get(oldest.round)) is not None:
            before = self.history.at((oldest.round - 1, commit.record.previous))
            if before is None:
                break
            oldest = replace(before, anchor=commit.record.base)
        return oldest

    def remember(self, start: Head, heads: Sequence[Head], commits: Sequence[m.Commit], most: int) -> None:
        """Take up the way that led to where memory begins: from ``start``, with the commits that made ``heads``, of
        which the last is that place.
        """
        for head in reversed((start, *heads[:-1])):
            self.history.add_before(head)
        for commit in reversed(commits):
            if len(self.recent) < most:
                self.recent[commit.record.round] = commit
                self.recent.move_to_end(commit.record.round, last=False)

    def stall(self, now: float) -> None:
        """There is work since ``now``, or since before."""
        self.stalled_since = now if self.stalled_since is None else self.stalled_since

    def note_result(self, frame: Digest, header: Header) -> None:
        """Book a held frame if it is an owner's result of the round in progress."""
        if header.kind == FrameKind.RESULT and header.round == self.head.round + 1:
            ref = m.FrameRef(header.sender, frame, header.part, header.steps, header.tokens, self.head.outer_step)
            self.results.setdefault((header.plan, header.part, header.sender), ref)

    def carries_out(self, plan: m.ReducePlan) -> None:
        """Remember what results of ``plan`` are made for."""
        self.plans[plan.number] = _plan_digest(plan)

    def is_as_planned(self, record: m.Record) -> bool:
        """Whether the results that ``record`` names were made for its ranges and contributors, as far as is known here.

        With other ranges they could not be laid together once it is committed.
        """
        if not record.contributors or (known := self.plans.get(record.plan)) is None:
            return True
        ballot, parts = record.plan // PLANS_PER_BALLOT, (record.contributors, record.partition)
        return known == _plan_digest(m.ReducePlan(record.epoch, record.round, ballot, record.plan, *parts))

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


def _plan_digest(plan: m.ReducePlan) -> Digest:
    return hashlib.blake2b(m.encode(plan), digest_size=32).digest()
