"""Single-decree Paxos for one round: the acceptor's state, the leader's ballot, the votes of members that leave.

Source: Lamport, "Paxos Made Simple", 2001, section 2.
"""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from decentral.consensus.chain import Voting, majority
from decentral.errors import PayloadError
from decentral.wire.keys import PeerId, Signer, verify
from decentral.wire.messages import (
    Certificate,
    Commit,
    Farewell,
    FrameRef,
    Promise,
    Proposal,
    Record,
    ReducePlan,
    decode_record,
    encode_record,
    vote_text,
)

# ---- what this peer promised and accepted ----
#
# Two quorums share a peer, so a value that some quorum accepted is seen by every later leader, who must carry it
# on. The state is made durable before any answer leaves, or a restarted peer could vote twice.

_NUMBERS = struct.Struct("<Qqq")  # round, promised, accepted ballot (-1: none)


@dataclass(frozen=True, slots=True)
class Acceptor:
    """Immutable: a changed acceptor is a new one, so the durable copy and the live one cannot drift apart."""

    round: int
    promised: int = 0  # no smaller ballot is answered any more; ballot 0 needs no promise
    accepted_ballot: int = -1
    accepted: Record | None = None

    def continues(self, round_: int, head: bytes) -> bool:
        """Whether this is the state of the round after ``round_`` on the chain whose head is ``head``."""
        return self.round == round_ + 1 and (self.accepted is None or self.accepted.previous == head)

    def promise(self, ballot: int) -> Acceptor | None:
        """Promise ``ballot``, or None when a higher one was promised already."""
        if ballot < self.promised:
            return None
        return Acceptor(self.round, ballot, self.accepted_ballot, self.accepted)

    def accept(self, ballot: int, record: Record) -> Acceptor | None:
        """Accept ``record``, or None when a higher ballot was promised or this one holds another record."""
        if ballot < self.promised or ballot < self.accepted_ballot:
            return None
        if ballot == self.accepted_ballot and record != self.accepted:
            return None
        return Acceptor(self.round, ballot, ballot, record)

    def to_bytes(self) -> bytes:
        """The durable form."""
        head = _NUMBERS.pack(self.round, self.promised, self.accepted_ballot)
        return head if self.accepted is None else head + encode_record(self.accepted)

    @classmethod
    def from_bytes(cls, data: bytes) -> Acceptor:
        """Read the durable form back. Raises PayloadError on a damaged one, and on one of another version."""
        if len(data) < _NUMBERS.size:
            raise PayloadError(f"acceptor state of {len(data)} bytes is cut short; remove the file")
        round_, promised, ballot = _NUMBERS.unpack_from(data)
        rest = data[_NUMBERS.size :]
        return cls(round_, promised, ballot, _accepted_record(rest) if rest else None)


def _accepted_record(data: bytes) -> Record:
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

Partition = tuple[tuple[PeerId, int, int], ...]  # owner, start, stop: as a plan and a record name the ranges

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
        """Book one. Raises PayloadError when its vote is not signed by its sender."""
        record = farewell.accepted
        if record is not None and not verify(sender, farewell.signature, _text(record, farewell.accepted_ballot)):
            raise PayloadError(f"farewell in round {farewell.round}: its vote is not signed by its sender; drop it")
        self._said[sender] = farewell

    def since(self, peer: PeerId) -> int:
        """The round in which ``peer`` stood when it said farewell; -1 when it did not."""
        said = self._said.get(peer)
        return -1 if said is None else said.round

    def forget(self, peer: PeerId) -> None:
        """It is back."""
        self._said.pop(peer, None)

    def keep(self, peers: Collection[PeerId]) -> None:
        """Forget all others."""
        self._said = {peer: farewell for peer, farewell in self._said.items() if peer in peers}

    def votes(self, round_: int, but: Collection[PeerId]) -> dict[PeerId, tuple[int, Record | None]]:
        """The ballot and the record that each accepted last in ``round_``; -1 and None for nothing.

        ``but``: those who have been away for so long that nobody waits for the frames of their votes any more.
        """
        said = {peer: farewell for peer, farewell in self._said.items() if farewell.round <= round_ and peer not in but}
        nothing = (-1, None)
        return {peer: (f.accepted_ballot, f.accepted) if f.round == round_ else nothing for peer, f in said.items()}

    def elected(self, own: Acceptor, signer: Signer) -> Commit | None:
        """The commit that those who left had voted for, with or without our own vote."""
        votes: dict[tuple[int, Record], dict[PeerId, bytes]] = defaultdict(dict)
        for peer, said in self._said.items():
            if said.round == own.round and said.accepted is not None:
                votes[said.accepted_ballot, said.accepted][peer] = said.signature
        for (ballot, record), signatures in votes.items():
            if (own.accepted_ballot, own.accepted) == (ballot, record):
                signatures[signer.peer] = signer.sign(_text(record, ballot))
            voters = self._voting.voters_on(record)
            counted = tuple(sorted((peer, signature) for peer, signature in signatures.items() if peer in voters))
            if len(counted) >= majority(voters):
                return Commit(record, Certificate(ballot, counted))
        return None


def farewell(acceptor: Acceptor, signer: Signer) -> Farewell:
    """The last word of the peer whose acceptor and key these are."""
    record, ballot = acceptor.accepted, acceptor.accepted_ballot
    signature = bytes(64) if record is None else signer.sign(_text(record, ballot))
    return Farewell(acceptor.round, ballot, record, signature)


def _text(record: Record, ballot: int) -> bytes:
    return vote_text(record.run, record.epoch, record.round, ballot, record.hash)
