"""Whose votes count: all members of a small epoch, and of a large one a committee that is drawn anew for each epoch.

Were all to vote, each commit would carry more than ``N / 2`` votes to N peers. A committee has 21 seats however many
members there are. The draw puts the members in the order of a keyed hash, whose key is made of the run, the epoch and
all its members; the first 21 vote. So everybody makes it from a record alone, whoever has joined or lagged behind, and
nobody can choose an identity that is drawn without drawing all the others anew.

When those who are given up leave no majority of the committee, the first 21 of the members that are left vote instead:
in an epoch of 21 or fewer those are simply all that are left. docs/protocol.md, section 10, has the proof.

Source: rendezvous hashing as in ``chain.leaders``; sortition by hash after Gilad et al., "Algorand: Scaling Byzantine
Agreements for Cryptocurrencies", 2017, without its secrecy, as members are trusted here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice

from decentral.consensus.chain import Head, leaders, majority
from decentral.wire.keys import PeerId
from decentral.wire.messages import Commit, Record, verify_certificate

SEATS = 21  # of peers that are away a tenth of the time, a majority of them is missing once in 700,000 draws


@dataclass(frozen=True, slots=True)
class Voting:
    """The rules by which votes count. All peers of a run have the same."""

    seats: int = SEATS  # fewer in tests, where large swarms take long

    def committee(self, of: Head | Record) -> tuple[PeerId, ...]:
        """Who votes on the record after a head, or on a record, while enough of them are there; sorted."""
        return _first(self.seats, of.run, of.epoch, of.members)

    def voters(self, of: Head | Record, gone: Collection[PeerId]) -> tuple[PeerId, ...]:
        """The committee; or those who vote in its place, once those gone for good leave no majority of it."""
        committee = self.committee(of)
        if keeps_majority(committee, gone):
            return committee
        return _first(self.seats, of.run, of.epoch, of.members, frozenset(gone))

    def voters_on(self, record: Record) -> tuple[PeerId, ...]:
        """Whose votes count for ``record``, which says itself whom it gives up."""
        return self.voters(record, dropped_by(record))

    def drops_majority(self, record: Record) -> bool:
        """Whether ``record`` is made by the few who are left."""
        return not keeps_majority(self.committee(record), dropped_by(record))

    def leaders(self, head: Head) -> list[PeerId]:
        """The members in the order in which they lead the next round's ballots: the committee before the others."""
        committee = frozenset(self.committee(head))
        return sorted(leaders(head), key=lambda peer: peer not in committee)

    def check_certified(self, commit: Commit) -> None:
        """Raise PayloadError unless a majority of those whose votes count signed the record."""
        voters = self.voters_on(commit.record)
        verify_certificate(commit, voters, majority(voters))


VOTING = Voting()


@lru_cache(maxsize=64)
def _first(
    seats: int, run: bytes, epoch: int, members: tuple[PeerId, ...], gone: frozenset[PeerId] = frozenset()
) -> tuple[PeerId, ...]:
    """As many of ``members`` without ``gone`` as there are seats, first in the draw of the epoch; sorted."""
    left = members if len(members) <= seats else draw(run, epoch, members)
    return tuple(sorted(islice((peer for peer in left if peer not in gone), seats)))


def draw(run: bytes, epoch: int, members: tuple[PeerId, ...]) -> tuple[PeerId, ...]:
    """The members of an epoch in the order in which they take the seats."""
    text = b"committee" + run + epoch.to_bytes(8, "little") + b"".join(members)
    key = hashlib.blake2b(text, digest_size=32).digest()
    return tuple(sorted(members, key=lambda peer: hashlib.blake2b(peer, key=key, digest_size=16).digest()))


def keeps_majority(voters: Sequence[PeerId], gone: Iterable[PeerId]) -> bool:
    """Whether more than half of ``voters`` are left without those gone."""
    return 2 * len(set(voters).difference(gone)) > len(voters)


def dropped_by(record: Record) -> frozenset[PeerId]:
    """The members that the next epoch does without."""
    return frozenset(record.members).difference(record.next_members)
