"""The leader's side of one ballot: promises, the plan of a reduce, the proposal, the votes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from decentral.consensus.acceptor import Acceptor
from decentral.consensus.chain import majority
from decentral.consensus.voting import Voting
from decentral.wire.keys import PeerId
from decentral.wire.messages import Certificate, Commit, FrameRef, Promise, Proposal, Record, ReducePlan

Partition = tuple[tuple[PeerId, int, int], ...]

PLANS_PER_BALLOT = 1 << 16


@dataclass(slots=True)
class Planned:
    """The plan of a reduce that is being carried out, and which peers let it down."""

    plan: ReducePlan
    since: float
    blamed: set[PeerId] = field(default_factory=set)

    def blame(self, number: int, peers: Iterable[PeerId]) -> None:
        """An owner says whose slices never came; only for the plan that is being carried out."""
        if number == self.plan.number:
            self.blamed.update(peers)

    def silent_owners(self, held: Mapping[tuple[int, int], FrameRef], but: PeerId) -> set[PeerId]:
        """Owners whose result is not here."""
        parts = enumerate(self.plan.partition)
        return {owner for part, (owner, _, _) in parts if (self.plan.number, part) not in held and owner != but}

    def failed(self, absent: Collection[PeerId], patience: float, now: float) -> bool:
        """Whether somebody the plan needs is away, was blamed by an owner, or took too long."""
        needed = {ref.peer for ref in self.plan.contributors} | {owner for owner, _, _ in self.plan.partition}
        return bool(needed & (set(absent) | self.blamed)) or self.late(patience, now)

    def late(self, patience: float, now: float) -> bool:
        """Whether it took too long; each attempt has twice the time of the last."""
        attempt = self.plan.number % PLANS_PER_BALLOT
        return now >= self.since + patience * 2.0 ** min(attempt, 6)

    def asks_the_same(self, plan: ReducePlan) -> bool:
        """Whether ``plan`` differs in nothing but its number."""
        return (plan.contributors, plan.partition) == (self.plan.contributors, self.plan.partition)


@dataclass(slots=True)
class Ballot:
    """One ballot led by this peer."""

    ballot: int
    voting: Voting
    promises: dict[PeerId, Promise] = field(default_factory=dict)
    farewells: dict[PeerId, tuple[int, Record | None]] = field(default_factory=dict)  # as good as promises
    planned: Planned | None = None
    proposal: Proposal | None = None
    votes: dict[PeerId, bytes] = field(default_factory=dict)
    parted: set[PeerId] = field(default_factory=set)  # said farewell since the ballot was opened
    sent_at: float = 0.0

    def prepared(self, voters: Sequence[PeerId]) -> bool:
        """Whether a quorum promised; ballot 0 has one proposer only and needs no promise."""
        return self.ballot == 0 or len(self.promises.keys() & set(voters)) >= majority(voters)

    def bound_value(self, own: Acceptor) -> Record | None:
        """The record that may be chosen, which this ballot must carry on; None when the leader is free.

        It is what was accepted in the highest ballot: its leader was bound in turn. If too few of the peers that vote
        on it can have accepted it, as the promises tell, nothing was chosen: so a record whose frames left with their
        owners, or that drops a peer that is back, ends no run.
        """
        heard = [*self._told().values(), (own.accepted_ballot, own.accepted)]
        record = max(heard, key=lambda pair: pair[0])[1]
        return record if record is not None and self._may_be_chosen(record) else None

    def _may_be_chosen(self, record: Record) -> bool:
        voters, told = self.voting.voters_on(record), self._told()
        against = [peer for peer in voters if peer in told and told[peer][1] != record]
        return len(voters) - len(against) >= majority(voters)

    def _told(self) -> dict[PeerId, tuple[int, Record | None]]:
        """What each peer that said so has accepted, and in which ballot."""
        promised = {peer: (promise.accepted_ballot, promise.accepted) for peer, promise in self.promises.items()}
        return promised | self.farewells

    def next_plan_number(self) -> int:
        """Numbers rise within a ballot and over ballots, so results of an old plan are never mixed in."""
        if self.planned is None:
            return self.ballot * PLANS_PER_BALLOT
        return self.planned.plan.number + 1

    def elected(self) -> Commit | None:
        """The commit, once a majority of those who vote has signed."""
        if self.proposal is None:
            return None
        voters = self.voting.voters_on(self.proposal.record)
        votes = tuple(sorted((peer, sig) for peer, sig in self.votes.items() if peer in voters))
        if len(votes) < majority(voters):
            return None
        return Commit(self.proposal.record, Certificate(self.ballot, votes))


def results_of(plan: ReducePlan, held: Mapping[tuple[int, int], FrameRef]) -> tuple[FrameRef, ...] | None:
    """The owners' result frames of ``plan`` if every partition is here, in record order."""
    refs = [held.get((plan.number, part)) for part in range(len(plan.partition))]
    found = [ref for ref in refs if ref is not None]
    if len(found) < len(refs):
        return None
    return tuple(sorted(found, key=lambda ref: (ref.peer, ref.part)))
