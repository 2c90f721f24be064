"""Single-decree Paxos for one round: the acceptor's state, the leader's ballot, the votes of members that leave.

Source: Lamport, "Paxos Made Simple", 2001, section 2.
"""

from __future__ import annotations

import struct
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from decentral.consensus.chain import Voting, is_refuted, majority
from decentral.errors import PayloadError
from decentral.wire import messages as m
from decentral.wire.keys import PeerId, Signer, verify
from decentral.wire.messages import (
    NO_SIGNATURE,
    Certificate,
    Commit,
    Farewell,
    FrameRef,
    Promise,
    Proposal,
    Record,
    ReducePlan,
    Refusal,
    Shown,
    decode_record,
    encode_record,
    hash_of,
)

# ---- what this peer promised and accepted ----
#
# Two quorums share a peer, so a value that some quorum accepted is seen by every later leader, who must carry it
# on. The state is made durable before any answer leaves, or a restarted peer could vote twice.

_NUMBERS = struct.Struct("<Qqq")  # round, promised, accepted ballot (-1: none)
_SIGNED = b"acceptor 2\0"  # begins a state that has the proposer's signature; no older one has so high a round


@dataclass(frozen=True, slots=True)
class Acceptor:
    """The promise and the vote of one peer in a round. Immutable: a changed acceptor is a new one, so the durable copy
    and the live one cannot drift apart.
    """

    round: int
    promised: int = 0  # no smaller ballot is answered any more; ballot 0 needs no promise
    accepted_ballot: int = -1
    accepted: Record | None = None
    proposed: bytes = NO_SIGNATURE  # of who proposed that; zeros also in a state of before it was signed

    def continues(self, round_: int, head: bytes) -> bool:
        """Tell whether this is the state of the round after ``round_`` on the chain whose head is ``head``."""
        return self.round == round_ + 1 and (self.accepted is None or self.accepted.previous == head)

    def promise(self, ballot: int) -> Acceptor | None:
        """Promise ``ballot``, or None when a higher one was promised already."""
        if ballot < self.promised:
            return None
        return replace(self, promised=ballot)

    def accept(self, ballot: int, record: Record, proposed: bytes) -> Acceptor | None:
        """Accept ``record``, or None when a higher ballot was promised or this one holds another record."""
        if ballot < self.promised or ballot < self.accepted_ballot:
            return None
        if ballot == self.accepted_ballot and record != self.accepted:
            return None
        return Acceptor(self.round, ballot, ballot, record, proposed)

    def to_bytes(self) -> bytes:
        """Write the durable form."""
        head = _SIGNED + _NUMBERS.pack(self.round, self.promised, self.accepted_ballot) + self.proposed
        return head if self.accepted is None else head + encode_record(self.accepted)

    @classmethod
    def from_bytes(cls, data: bytes) -> Acceptor:
        """Read the durable form back, of this version or the one before. Raises PayloadError on a damaged one."""
        is_signed = data.startswith(_SIGNED)
        numbers = data.removeprefix(_SIGNED)
        start = _NUMBERS.size + (len(NO_SIGNATURE) if is_signed else 0)
        if len(numbers) < start:
            raise PayloadError(f"acceptor state of {len(data)} bytes is cut short; remove the file")
        round_, promised, ballot = _NUMBERS.unpack_from(numbers)
        proposed = numbers[_NUMBERS.size : start] if is_signed else NO_SIGNATURE
        rest = numbers[start:]
        return cls(round_, promised, ballot, _read_accepted(rest) if rest else None, proposed)


def _read_accepted(data: bytes) -> Record:
    try:
        return decode_record(data)
    except PayloadError as error:
        raise PayloadError(
            f"acceptor state does not parse ({str(error).partition(';')[0]}): it is damaged, or another version of "
            "decentral wrote it; go on with that version, or begin in another folder"
        ) from None


# ---- the leader's side of a ballot ----
#
# It has promises, the plan of a reduce, the proposal, the votes.

Results = Mapping[tuple[int, int, PeerId], FrameRef]  # by plan, part and sender
Partition = tuple[tuple[PeerId, int, int], ...]  # owner, start, stop: as a plan and a record name the ranges

PLANS_PER_BALLOT = 1 << 16


@dataclass(slots=True)
class Planned:
    """The plan of a reduce that is being carried out, and which peers let it down."""

    plan: ReducePlan
    since: float
    complaints: dict[PeerId, frozenset[PeerId]] = field(default_factory=dict)  # by owner

    def blame(self, owner: PeerId, number: int, peers: Iterable[PeerId]) -> None:
        """Book an owner's complaint that slices never came; only for the plan that is being carried out, and its
        contributors.
        """
        if number == self.plan.number and owner in self.owners:
            named = {ref.peer for ref in self.plan.contributors}.intersection(peers) - {owner}
            self.complaints[owner] = self.complaints.get(owner, frozenset()) | named

    @property
    def owners(self) -> frozenset[PeerId]:
        """Return the peers that sum the ranges of the plan."""
        return frozenset(owner for owner, _, _ in self.plan.partition)

    @property
    def blamed(self) -> frozenset[PeerId]:
        """Return the peers that the next plan does without, so that none of these complaints is left.

        Nobody can tell which of two is at fault, owner or contributor. Who takes part in most complaints is; of one
        complaint the contributor: so an owner that blames everybody leaves alone.
        """
        pairs = {(owner, peer) for owner, peers in self.complaints.items() for peer in peers}
        out: set[PeerId] = set()
        while pairs:
            counts = Counter(peer for pair in pairs for peer in pair)
            most = max(counts.values())
            worst = {peer for peer, count in counts.items() if count == most}
            worst = {peer for _, peer in pairs} if most == 1 else worst
            out |= worst
            pairs = {pair for pair in pairs if worst.isdisjoint(pair)}
        return frozenset(out)

    def silent_owners(self, held: Results, but: PeerId) -> set[PeerId]:
        """Return the owners whose result is not here."""
        parts = enumerate(self.plan.partition)
        return {owner for part, (owner, _, _) in parts if (self.plan.number, part, owner) not in held and owner != but}

    def has_failed(self, absent: Collection[PeerId], patience: float, now: float) -> bool:
        """Tell whether somebody the plan needs is away, was blamed by an owner, or took too long."""
        needed = {ref.peer for ref in self.plan.contributors} | self.owners
        return bool(needed & (set(absent) | self.blamed)) or self.is_late(patience, now)

    def is_late(self, patience: float, now: float) -> bool:
        """Tell whether the plan took too long; each attempt has twice the time of the last."""
        attempt = self.plan.number % PLANS_PER_BALLOT
        return now >= self.since + patience * 2.0 ** min(attempt, 6)

    def asks_the_same(self, plan: ReducePlan) -> bool:
        """Tell whether ``plan`` differs in nothing but its number."""
        return (plan.contributors, plan.partition) == (self.plan.contributors, self.plan.partition)


@dataclass(slots=True)
class Ballot:
    """A ballot that this peer leads."""

    ballot: int
    voting: Voting
    promises: dict[PeerId, Promise] = field(default_factory=dict)
    overtaken: dict[PeerId, Promise] = field(default_factory=dict)  # of higher ballots: they tell as much
    farewells: dict[PeerId, tuple[int, Record | None]] = field(default_factory=dict)  # as good as promises
    planned: Planned | None = None
    proposal: Proposal | None = None
    votes: dict[PeerId, bytes] = field(default_factory=dict)
    parted: set[PeerId] = field(default_factory=set)  # said farewell since the ballot was opened
    opened: float = 0.0
    sent_at: float = 0.0
    unfit: bool = False  # its record broke a rule of the protocol: nothing is proposed

    def is_prepared(self, voters: Sequence[PeerId], least: int) -> bool:
        """Tell whether so many of ``voters`` promised; ballot 0 has one proposer only and needs no promise."""
        return self.ballot == 0 or len(self.heard() & set(voters)) >= least

    def heard(self) -> set[PeerId]:
        """Return the peers that said what they had accepted and accept nothing of lower ballots any more."""
        return {*self.promises, *self.overtaken}

    def bound_value(self, own: Acceptor) -> tuple[int, Record] | None:
        """Return the record that may be chosen, which this ballot must carry on, and the ballot it was accepted in;
        None when the leader is free.

        It is what was accepted in the highest ballot: its leader was bound in turn. If too few of the peers that vote
        on it can have accepted it, as the promises tell, nothing was chosen there: so a record whose frames left with
        their owners, or that drops a peer that is back, ends no run. Then the next highest is looked at, for nobody who
        was honest about that ballot was free because of it.
        """
        heard = [*self._list_accepted().values(), (own.accepted_ballot, own.accepted)]
        for ballot, record in sorted(heard, key=lambda pair: pair[0], reverse=True):
            if record is not None and self._may_be_chosen(record):
                return ballot, record
        return None

    def stands_alone(self, record: Record, proposer: PeerId, own: Acceptor, me: PeerId) -> bool:
        """Tell whether nobody but its proposer says to have accepted ``record``: more answers may show that it is
        free.
        """
        told = self._list_accepted() | {me: (own.accepted_ballot, own.accepted)}
        return not any(accepted == record for peer, (_, accepted) in told.items() if peer != proposer)

    def _may_be_chosen(self, record: Record) -> bool:
        voters, told = self.voting.voters_on(record), self._list_accepted()
        against = [peer for peer in voters if peer in told and told[peer][1] != record]
        return not is_refuted(voters, len(against))

    def _list_accepted(self) -> dict[PeerId, tuple[int, Record | None]]:
        """Return the record that each peer has accepted, and in which ballot, as far as they said."""
        said = self.overtaken | self.promises
        promised = {peer: (promise.accepted_ballot, promise.accepted) for peer, promise in said.items()}
        return promised | self.farewells

    def shown(self, voters: Collection[PeerId]) -> tuple[Shown, ...]:
        """Return the promises of ``voters``, for those who are asked to vote for what is carried on."""
        said = sorted(self.promises.items())
        return tuple(
            Shown(peer, p.epoch, p.round, p.accepted_ballot, hash_of(p.accepted), p.signature)
            for peer, p in said
            if peer in voters
        )

    def next_plan_number(self) -> int:
        """Return a number that rises within a ballot and over ballots, so results of an old plan are never mixed in."""
        if self.planned is None:
            return self.ballot * PLANS_PER_BALLOT
        return self.planned.plan.number + 1

    def elect(self) -> Commit | None:
        """Return the commit, once a majority of those who vote has signed."""
        if self.proposal is None:
            return None
        voters = self.voting.voters_on(self.proposal.record)
        votes = tuple(sorted((peer, sig) for peer, sig in self.votes.items() if peer in voters))
        if len(votes) < majority(voters):
            return None
        said = self.proposal.farewells if self.voting.drops_majority(self.proposal.record) else ()
        return Commit(self.proposal.record, Certificate(self.ballot, votes), said)


def results_of(plan: ReducePlan, held: Results) -> tuple[FrameRef, ...] | None:
    """Return the owners' result frames of ``plan`` if every partition is here, in record order. No other peer's: a
    leader that took another peer's for an owner's had a record that could not be written, and ended.
    """
    refs = [held.get((plan.number, part, owner)) for part, (owner, _, _) in enumerate(plan.partition)]
    found = [ref for ref in refs if ref is not None]
    if len(found) < len(refs):
        return None
    return tuple(sorted(found, key=lambda ref: (ref.peer, ref.part)))


# ---- the votes of members that leave ----
#
# They say how they voted, so that those that stay need not guess.
#
# A peer that has said farewell votes no more. So what it says is a promise for every ballot of the round, and, as it
# is signed, a vote that counts: the few that are left commit what the others had chosen, or know that they chose
# nothing.
#
# Five peers were stopped within a second; three had just chosen a record, and the last one to be stopped, which had
# not heard of it, counted itself as all that was left and chose another.


class Farewells:
    """The last word of each member that said one."""

    def __init__(self, voting: Voting) -> None:
        self._voting = voting
        self._said: dict[PeerId, Farewell] = {}

    def take(self, sender: PeerId, farewell: Farewell) -> None:
        """Book a farewell that ``check_farewell`` has passed."""
        self._said[sender] = farewell

    def since(self, peer: PeerId) -> int:
        """Return the round in which ``peer`` stood when it said farewell; -1 when it did not."""
        said = self._said.get(peer)
        return -1 if said is None else said.round

    def forget(self, peer: PeerId) -> None:
        """Forget the farewell of a peer that is back."""
        self._said.pop(peer, None)

    def keep(self, peers: Collection[PeerId]) -> None:
        """Forget the farewells of all others."""
        self._said = {peer: farewell for peer, farewell in self._said.items() if peer in peers}

    def votes(self, round_: int, but: Collection[PeerId]) -> dict[PeerId, tuple[int, Record | None]]:
        """Return the ballot and the record that each accepted last in ``round_``; -1 and None for nothing.

        ``but``: those who have been away for so long that nobody waits for the frames of their votes any more.
        """
        said = {peer: farewell for peer, farewell in self._said.items() if farewell.round <= round_ and peer not in but}
        nothing = (-1, None)
        return {peer: (f.accepted_ballot, f.accepted) if f.round == round_ else nothing for peer, f in said.items()}

    def shown(self, record: Record) -> tuple[Shown, ...]:
        """Return the farewells of voters that ``record`` drops, for whoever has not heard them."""
        dropped = frozenset(record.members).difference(record.next_members)
        voters = self._voting.committee(record)
        said = ((peer, self._said[peer]) for peer in voters if peer in dropped and peer in self._said)
        return tuple(
            Shown(peer, f.epoch, f.round, f.accepted_ballot, hash_of(f.accepted), f.signature) for peer, f in said
        )

    def elect(self, own: Acceptor, signer: Signer) -> Commit | None:
        """Return the commit that those who left had voted for, with or without our own vote."""
        votes: dict[tuple[int, Record], dict[PeerId, bytes]] = defaultdict(dict)
        for peer, said in self._said.items():
            if said.round == own.round and said.accepted is not None:
                votes[said.accepted_ballot, said.accepted][peer] = said.vote
        for (ballot, record), signatures in votes.items():
            if (own.accepted_ballot, own.accepted) == (ballot, record):
                signatures[signer.peer] = signer.sign(_text(record, ballot))
            voters = self._voting.voters_on(record)
            counted = tuple(sorted((peer, signature) for peer, signature in signatures.items() if peer in voters))
            if len(counted) >= majority(voters):
                return Commit(record, Certificate(ballot, counted), self.shown(record))
        return None


def farewell(acceptor: Acceptor, run: bytes, epoch: int, signer: Signer) -> Farewell:
    """Make the last word of the peer whose acceptor and key these are."""
    record, ballot = acceptor.accepted, acceptor.accepted_ballot
    epoch = epoch if record is None else record.epoch
    vote = NO_SIGNATURE if record is None else signer.sign(_text(record, ballot))
    text = m.farewell_text(run, epoch, acceptor.round, ballot, hash_of(record))
    return Farewell(epoch, acceptor.round, ballot, record, acceptor.proposed, vote, signer.sign(text))


def promise(acceptor: Acceptor, run: bytes, epoch: int, ballot: int, signer: Signer) -> Promise:
    """Make the answer to the leader of ``ballot`` of the peer whose acceptor and key these are."""
    record, accepted = acceptor.accepted, acceptor.accepted_ballot
    text = m.promise_text(run, epoch, acceptor.round, ballot, accepted, hash_of(record))
    return Promise(epoch, acceptor.round, ballot, accepted, record, acceptor.proposed, signer.sign(text))


def check_farewell(sender: PeerId, farewell: Farewell, run: bytes, leader_of: LeaderOf | None) -> None:
    """Raise PayloadError unless ``sender`` signed it, its vote, and its proposer what it says that it accepted.

    ``leader_of`` None: it is of a round that is over, whose leaders nobody needs to know; what was accepted then binds
    nobody.
    """
    record, ballot = farewell.accepted, farewell.accepted_ballot
    text = m.farewell_text(run, farewell.epoch, farewell.round, ballot, hash_of(record))
    if not verify(sender, farewell.signature, text):
        raise PayloadError(f"farewell in round {farewell.round} is not signed by its sender; drop it")
    if record is None:
        return
    if not verify(sender, farewell.vote, _text(record, ballot)):
        raise PayloadError(f"farewell in round {farewell.round}: its vote is not signed by its sender; drop it")
    if leader_of is not None:
        check_proposed(record, ballot, farewell.proposed, leader_of)


def check_promise(sender: PeerId, promise: Promise, run: bytes, leader_of: LeaderOf) -> None:
    """Raise PayloadError unless ``sender`` signed it, and its proposer what it says that it accepted."""
    record, accepted = promise.accepted, promise.accepted_ballot
    text = m.promise_text(run, promise.epoch, promise.round, promise.ballot, accepted, hash_of(record))
    if not verify(sender, promise.signature, text):
        raise PayloadError(f"promise in round {promise.round} is not signed by its sender; drop it")
    if record is not None:
        check_proposed(record, accepted, promise.proposed, leader_of)


LeaderOf = Callable[[int], PeerId]  # of a ballot of the round in progress


def check_proposed(record: Record, ballot: int, proposed: bytes, leader_of: LeaderOf) -> None:
    """Raise PayloadError unless the leader of ``ballot`` signed ``record``: nobody accepts what nobody proposed."""
    if not verify(leader_of(ballot), proposed, _text(record, ballot)):
        raise PayloadError(
            f"record of round {record.round} is said to be accepted in ballot {ballot}, whose leader did not sign it; "
            "drop it and its sender"
        )


def shows_farewell(shown: Shown, run: bytes) -> bool:
    """Tell whether the peer that is named said that farewell."""
    text = m.farewell_text(run, shown.epoch, shown.round, shown.accepted_ballot, shown.accepted)
    return verify(shown.peer, shown.signature, text)


def shows_promise(shown: Shown, run: bytes, ballot: int) -> bool:
    """Tell whether the peer that is named promised ``ballot`` in those words."""
    text = m.promise_text(run, shown.epoch, shown.round, ballot, shown.accepted_ballot, shown.accepted)
    return verify(shown.peer, shown.signature, text)


def _text(record: Record, ballot: int) -> bytes:
    return m.vote_text(record.run, record.epoch, record.round, ballot, record.hash)


# ---- what the voters refuse ----
#
# A leader that drops a peer which others hear, or lets in one that they have not heard, is told so. One word stops
# nobody: a change is left out once so many refuse it that no majority is left to vote for it.


class Refusals:
    """The newest refusal of each voter, and the changes that are left out since."""

    def __init__(self) -> None:
        self._said: dict[PeerId, Refusal] = {}
        self._disputed: dict[PeerId | None, float] = {}  # until when; None: that the run is over

    def take(self, sender: PeerId, refusal: Refusal) -> None:
        """Book a voter's refusal."""
        self._said[sender] = refusal

    def end(self, ballot: int, record: Record, voters: Sequence[PeerId], now: float, lease: float) -> bool:
        """Tell whether so many refuse ``record`` in ``ballot`` that it cannot be chosen; then what they refuse is
        disputed: whom to drop for a lease, whom to let in for a part of one, as newcomers are soon known to all.
        """
        said = (self._said[peer] for peer in voters if peer in self._said)
        against = [one for one in said if (one.ballot, one.record) == (ballot, record.hash)]
        if len(voters) - len(against) >= majority(voters):
            return False
        for one in against:
            for peer in one.peers:
                self._disputed[peer] = now + (lease if peer in record.members else lease / 4)
            if one.final:
                self._disputed[None] = now + lease
        return True

    def disputed(self, now: float) -> frozenset[PeerId | None]:
        """Return the members and newcomers that stay what they are for now; None among them: the run is not over."""
        self._disputed = {peer: until for peer, until in self._disputed.items() if now < until}
        return frozenset(self._disputed)

    def forget_ballots(self) -> None:
        """Forget the refusals of a round that is over; what is disputed stays so."""
        self._said = {}
