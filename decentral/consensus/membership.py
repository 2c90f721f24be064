"""The members of the next epoch: without peers that left or whose lease ran out, with peers that asked to come in."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from decentral.consensus.chain import Head
from decentral.consensus.voting import Voting, dropped_by, keeps_majority
from decentral.wire.keys import PeerId
from decentral.wire.messages import MAX_PEERS, Record


@dataclass(slots=True)
class Presence:
    """Which peers can be waited for, as far as this peer can tell. A hint for speed; safety never rests on it."""

    me: PeerId
    voting: Voting
    expired: frozenset[PeerId] = frozenset()  # lease ran out
    gone: frozenset[PeerId] = frozenset()  # lease ran out long enough ago to give the peer up
    leaving: set[PeerId] = field(default_factory=set)  # said goodbye
    unreachable: set[PeerId] = field(default_factory=set)  # the last send failed

    def present(self, peer: PeerId) -> bool:
        """Whether a message to ``peer`` may be expected to arrive and be answered."""
        away = peer in self.expired or peer in self.leaving or peer in self.unreachable
        return peer == self.me or not away

    def heard(self, peer: PeerId) -> None:
        """``peer`` just spoke, so the last failed send says nothing any more."""
        self.unreachable.discard(peer)

    def given_up(self) -> frozenset[PeerId]:
        """Those whose votes are not waited for when too few others are left."""
        return self.gone | frozenset(self.leaving)

    def next_members(self, head: Head, joiners: Iterable[PeerId]) -> tuple[PeerId, ...]:
        """The membership that a record made now would set, sorted."""
        away = {peer for peer in head.members if peer in self.leaving or peer in self.expired} - {self.me}
        if not keeps_majority(self.voting.committee(head), away):
            away &= self.given_up()  # no majority would be left: drop only those who left or are gone for good
        kept = set(head.members) - away
        joined = sorted(peer for peer in {*joiners} - kept if self.present(peer))
        return tuple(sorted({*kept, *joined[: MAX_PEERS - len(kept)]}))  # a record names no more

    def may_drop(self, record: Record) -> bool:
        """Whether to vote for whom ``record`` drops: if no majority stays to vote, only when we gave them up, too."""
        return not self.voting.drops_majority(record) or dropped_by(record) <= self.given_up()

    def is_majority_here(self, voters: tuple[PeerId, ...]) -> bool:
        """Whether those vote, rather than the few who are left."""
        return keeps_majority(voters, self.given_up())
