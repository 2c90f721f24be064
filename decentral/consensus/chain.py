"""The chain of commits: what its next record must look like, whose votes decide it, who is a member after it.

Every record names its predecessor's hash, so two peers with the same head hash have applied the same frames in the
same order. Where two chains of one run meet, their histories tell from where on they differ.
"""

from __future__ import annotations

import hashlib
import statistics
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, reduce
from itertools import islice, pairwise
from typing import Any

from decentral.errors import PayloadError
from decentral.wire.frames import Frame
from decentral.wire.keys import Digest, PeerId, peer_name
from decentral.wire.messages import MAX_PEERS, Commit, FrameRef, Offer, Record, verify_certificate

# ---- heads, and the records that may follow ----
#
# When a majority was given up and lives on elsewhere, two chains of one run meet again: the heavier one wins. Weight
# is what the chain's records say of the training behind it, so everybody computes the same. Nothing of it costs a byte
# on the wire.

NOTHING: Digest = bytes(32)  # in the place of a digest where there is none
TYPICAL_TIMES = 2  # one contribution counts as at most so many typical ones: a claim of 1e18 tokens wins no fork
MOST_TOKENS = 1 << 40  # per contribution, whatever is typical: sums stay far inside 64 bits


Weight = tuple[int, int, int, Digest]  # of a head: tokens, outer steps, round, hash


@dataclass(frozen=True, slots=True)
class Head:
    """The place where a peer's chain stands. ``anchor`` is None while the newest record is still being applied."""

    run: Digest
    epoch: int  # number of the membership below
    round: int  # height of the newest record; 0 is the genesis
    outer_step: int  # records so far that moved the anchor
    hash: Digest  # of the newest record
    anchor: Digest | None  # digest of the anchor after it
    members: tuple[PeerId, ...]  # who takes part in the next record, sorted
    newcomers: frozenset[PeerId] = frozenset()  # came in since the anchor last moved: half a phase behind
    final: bool = False
    tokens: int = 0  # committed so far, as ``count_tokens`` counts them
    contributions: int = 0  # committed so far

    @property
    def weight(self) -> Weight:
        """Order two branches that are equally legitimate (see ``rank_of``): committed tokens;
        without any, outer steps; the rest breaks ties.

        It rises with every record, so a chain is always heavier than its own past.
        """
        return self.tokens, self.outer_step, self.round, self.hash

    @classmethod
    def genesis(cls, run: Digest, schema: Digest, anchor: Digest, founder: PeerId) -> Head:
        """Make the head of the chain of a run that nobody has joined yet."""
        seed = hashlib.blake2b(b"genesis" + run + schema + anchor + founder, digest_size=32).digest()
        return cls(run, 0, 0, 0, seed, anchor, (founder,))

    def extended(self, record: Record) -> Head:
        """Return the head after ``record``; the anchor's digest follows once the record is applied.

        Raises PayloadError when the record does not continue this chain.
        """
        check_succession(self, record)
        joined = set(record.next_members) - set(self.members)
        moved = moves_anchor(record)
        return replace(
            self,
            epoch=record.epoch + (record.next_members != self.members),
            round=record.round,
            outer_step=record.outer_step + moved,
            hash=record.hash,
            anchor=None if moved else self.anchor,
            members=record.next_members,
            newcomers=frozenset() if moved or not self.outer_step else self.newcomers | joined,
            final=record.final,
            tokens=self.tokens + count_tokens(self, record),
            contributions=self.contributions + len(contributions(record)),
        )

    def to_dict(self) -> dict[str, Any]:
        """Write plain JSON, for checkpoints and snapshots. Raises no error; the anchor must be known."""
        assert self.anchor is not None
        return {
            "run": self.run.hex(),
            "epoch": self.epoch,
            "round": self.round,
            "outer_step": self.outer_step,
            "hash": self.hash.hex(),
            "anchor": self.anchor.hex(),
            "members": [peer.hex() for peer in self.members],
            "newcomers": sorted(peer.hex() for peer in self.newcomers),
            "final": self.final,
            "tokens": self.tokens,
            "contributions": self.contributions,
        }

    @classmethod
    def from_dict(cls, found: object) -> Head:
        """Read ``to_dict`` back. Raises PayloadError: the bytes may come from a peer."""
        try:
            assert isinstance(found, dict)
            digests = [bytes.fromhex(found[key]) for key in ("run", "hash", "anchor")]
            members = tuple(bytes.fromhex(peer) for peer in found["members"])
            newcomers = frozenset(bytes.fromhex(peer) for peer in found["newcomers"])
            numbers = [int(found[key]) for key in ("epoch", "round", "outer_step", "tokens", "contributions")]
            final = bool(found["final"])
        except (AssertionError, KeyError, TypeError, ValueError, OverflowError) as error:
            raise PayloadError(f"head of the chain: {error!r} where JSON of ours was due; drop it") from None
        sound = all(len(d) == 32 for d in (*digests, *members)) and 0 < len(members) <= MAX_PEERS
        if not sound or any(not 0 <= n < 2**63 for n in numbers) or list(members) != sorted(set(members)):
            raise PayloadError("head of the chain: digests, members or numbers out of bounds; drop it")
        run, hash_, anchor = digests
        epoch, round_, outer_step, *counts = numbers
        return cls(run, epoch, round_, outer_step, hash_, anchor, members, newcomers, final, *counts)

    def fragment(self, num_fragments: int) -> int:
        """Return the fragment that the next anchor-moving record carries."""
        return self.outer_step % num_fragments


def moves_anchor(record: Record) -> bool:
    """Tell whether the record carries frames; the others only change the membership."""
    return bool(record.frames)


def contributions(record: Record) -> tuple[FrameRef, ...]:
    """Return a reference to each peer's progress that the record carries: a gather's frames, or a reduce's
    contributors.
    """
    return record.contributors or record.frames


def count_tokens(head: Head, record: Record) -> int:
    """Return the tokens that ``record`` adds to the chain of ``head``.

    Tokens are claims, so each counts for at most ``TYPICAL_TIMES`` the mean of those before it; the first ones are
    held against the lower median of their own record. Integers only: the same on every peer.
    """
    claims = [min(ref.tokens, MOST_TOKENS) for ref in contributions(record)]
    if not claims:
        return 0
    typical = head.tokens // head.contributions if head.tokens else statistics.median_low(claims)
    return sum(min(claim, TYPICAL_TIMES * max(1, typical)) for claim in claims)


def check_succession(head: Head, record: Record) -> None:
    """Raise PayloadError unless ``record`` is the one that may follow ``head``."""
    wanted = (head.run, head.epoch, head.round + 1, head.outer_step, head.hash, head.members)
    found = (record.run, record.epoch, record.round, record.outer_step, record.previous, record.members)
    if wanted != found:
        raise PayloadError(
            f"record of round {record.round}, epoch {record.epoch} does not follow round {head.round}, "
            f"epoch {head.epoch}: another predecessor, membership or step; fetch the chain from its sender"
        )
    if head.anchor is not None and record.base != head.anchor:
        raise PayloadError(
            f"record of round {record.round} starts from anchor {record.base.hex()[:12]}, ours is "
            f"{head.anchor.hex()[:12]}: one of us diverged; re-sync from a snapshot"
        )
    if not record.next_members:
        raise PayloadError(f"record of round {record.round} leaves no member; drop it and its sender")
    check_known([ref.peer for ref in record.frames], head.members)
    check_contributors(contributions(record), head.members)
    check_age(contributions(record), head.outer_step)


def check_turn(record: Record, num_fragments: int) -> None:
    """Raise PayloadError for a record of another fragment than the one whose turn it is: the step says which."""
    if record.fragment != record.outer_step % num_fragments:
        raise PayloadError(f"fragment {record.fragment} in step {record.outer_step}: not its turn; drop the record")


def check_contributors(refs: Sequence[FrameRef], members: Collection[PeerId]) -> None:
    """Raise PayloadError when a stranger is named, or a member twice: each weighs in the mean, and in the chain."""
    named = [ref.peer for ref in refs]
    check_known(named, members)
    if len(set(named)) != len(named):
        raise PayloadError(f"{len(named)} contributions of {len(set(named))} peers; drop it and its sender")


def check_age(progress: Iterable[FrameRef | Offer], outer_step: int, most: int | None = None) -> None:
    """Raise PayloadError when some was begun from an anchor yet to come, or more than ``most`` outer steps ago."""
    for age in (outer_step - each.based for each in progress):
        if age < 0:
            raise PayloadError(f"progress from an anchor {-age} outer steps ahead of the round; drop it and its sender")
        if most is not None and age > most:
            raise PayloadError(f"progress from {age} outer steps ago, {most} are the most that count here; drop it")


def check_known(peers: Sequence[PeerId], members: Collection[PeerId]) -> None:
    """Raise PayloadError when one of them is no member."""
    strangers = set(peers) - set(members)
    if strangers:
        raise PayloadError(f"{peer_name(min(strangers))} is named and is no member; drop it and its sender")


def leaders(head: Head) -> list[PeerId]:
    """Return the members in the order in which they lead the next round's ballots.

    Rendezvous hashing over (run, round): every round another leader, and no message is needed to agree on it.
    """
    salt = head.run + (head.round + 1).to_bytes(8, "little")
    return sorted(head.members, key=lambda peer: hashlib.blake2b(salt + peer, digest_size=16).digest())


LIARS_FROM = 4  # voters, of whom one may lie about what it accepted


def majority(voters: Sequence[PeerId]) -> int:
    """Return the number of votes that any two quorums of ``voters`` cannot both have without sharing a peer."""
    return len(voters) // 2 + 1


def enough_promises(voters: Sequence[PeerId]) -> int:
    """Return how many promises share two peers with every majority, so that a peer that hides what it accepted hides
    nothing. Of three or fewer voters that would be all, and one that is away would end the run: there a majority is
    enough.
    """
    return majority(voters) if len(voters) < LIARS_FROM else len(voters) + 2 - majority(voters)


def is_refuted(voters: Sequence[PeerId], against: int) -> bool:
    """Tell whether so many voters have accepted something else, or nothing, that no majority accepted it: one more than
    that takes, as one of them may lie.
    """
    return len(voters) - against + (len(voters) >= LIARS_FROM) < majority(voters)


# ---- whose votes count ----
#
# All members of a small epoch vote, and of a large one a committee that is drawn anew for each epoch.
#
# Were all to vote, each commit would carry more than ``N / 2`` votes to N peers. A committee has 21 seats however many
# members there are. The draw puts the members in the order of a keyed hash, whose key is made of the run, the epoch
# and all its members; the first 21 vote. So everybody makes it from a record alone, whoever has joined or lagged
# behind, and nobody can choose an identity that is drawn without drawing all the others anew.
#
# When those who are given up leave no majority of the committee, the first 21 of the members that are left vote
# instead: in an epoch of 21 or fewer those are simply all that are left. docs/protocol.md, section 10, has the proof.
#
# Source: rendezvous hashing as in ``leaders`` above; sortition by hash after Gilad et al., "Algorand: Scaling
# Byzantine Agreements for Cryptocurrencies", 2017, without its secrecy, as members are trusted here.

SEATS = 21  # of peers that are away a tenth of the time, a majority of them is missing once in 700,000 draws


@dataclass(frozen=True, slots=True)
class Voting:
    """The rules by which votes count. All peers of a run have the same."""

    seats: int = SEATS  # fewer in tests, where large swarms take long

    def committee(self, of: Head | Record) -> tuple[PeerId, ...]:
        """Return the peers that vote on the record after a head, or on a record, while enough are there; sorted."""
        return _fill_seats(self.seats, of.run, of.epoch, of.members)

    def voters(self, of: Head | Record, gone: Collection[PeerId]) -> tuple[PeerId, ...]:
        """Return the committee; or the peers that vote in its place, once those gone for good leave no majority of
        it.
        """
        committee = self.committee(of)
        if keeps_majority(committee, gone):
            return committee
        return _fill_seats(self.seats, of.run, of.epoch, of.members, frozenset(gone))

    def let_in_by(self, head: Head, live: Collection[PeerId]) -> Collection[PeerId]:
        """Return whom of those that are here an outsider asks to be let in: all of a small swarm, and of a large one
        the committee, which leads and votes first, if one of it is here. Of 256 that came together each asked all
        others, again after each commit.
        """
        first = [peer for peer in self.committee(head) if peer in live] if len(live) > self.seats else []
        return first or live

    def voters_on(self, record: Record) -> tuple[PeerId, ...]:
        """Return the peers whose votes count for ``record``, which says itself whom it gives up."""
        return self.voters(record, removals(record))

    def drops_majority(self, record: Record) -> bool:
        """Tell whether ``record`` is made by the few peers that are left."""
        return not keeps_majority(self.committee(record), removals(record))

    def shrinks_to(self, head: Head, members: Collection[PeerId]) -> bool:
        """Tell whether the record from ``head`` to these members was made by the few who were left."""
        return not keeps_majority(self.committee(head), frozenset(head.members).difference(members))

    def leaders(self, head: Head) -> list[PeerId]:
        """Return the members in the order in which they lead the next ballots: the committee before the others."""
        committee = frozenset(self.committee(head))
        return sorted(leaders(head), key=lambda peer: peer not in committee)

    def check_certified(self, commit: Commit) -> None:
        """Raise PayloadError unless a majority of those whose votes count signed the record."""
        voters = self.voters_on(commit.record)
        verify_certificate(commit, voters, majority(voters))


VOTING = Voting()


@lru_cache(maxsize=64)
def _fill_seats(
    seats: int, run: bytes, epoch: int, members: tuple[PeerId, ...], gone: frozenset[PeerId] = frozenset()
) -> tuple[PeerId, ...]:
    """Return as many of ``members`` without ``gone`` as there are seats, first in the draw of the epoch; sorted."""
    left = members if len(members) <= seats else draw(run, epoch, members)
    return tuple(sorted(islice((peer for peer in left if peer not in gone), seats)))


def draw(run: bytes, epoch: int, members: tuple[PeerId, ...]) -> tuple[PeerId, ...]:
    """Return the members of an epoch in the order in which they take the seats."""
    text = b"committee" + run + epoch.to_bytes(8, "little") + b"".join(members)
    key = hashlib.blake2b(text, digest_size=32).digest()
    return tuple(sorted(members, key=lambda peer: hashlib.blake2b(peer, key=key, digest_size=16).digest()))


def keeps_majority(voters: Sequence[PeerId], gone: Iterable[PeerId]) -> bool:
    """Tell whether more than half of ``voters`` are left without those gone."""
    return 2 * len(set(voters).difference(gone)) > len(voters)


def removals(record: Record) -> frozenset[PeerId]:
    """Return the members that the next epoch does without."""
    return frozenset(record.members).difference(record.next_members)


# ---- members of the next epoch ----
#
# Peers that left or whose lease ran out are members no more; peers that asked to come in are.


@dataclass(slots=True)
class Presence:
    """The peers that can be waited for, as far as this peer can tell. A hint for speed; safety never rests on it."""

    me: PeerId
    voting: Voting
    missed: frozenset[PeerId] = frozenset()  # nothing is heard of them now
    expired: frozenset[PeerId] = frozenset()  # lease ran out
    gone: frozenset[PeerId] = frozenset()  # lease ran out long enough ago to give the peer up
    known: frozenset[PeerId] = frozenset()  # have a live lease, and answered where it says that they are
    parts: Mapping[PeerId, range] = field(default_factory=dict)  # fragments of those that do not train all of them
    leaving: set[PeerId] = field(default_factory=set)  # said goodbye
    unreachable: set[PeerId] = field(default_factory=set)  # the last send failed

    def present(self, peer: PeerId) -> bool:
        """Tell whether a message to ``peer`` may be expected to arrive and be answered."""
        away = peer in self.expired or peer in self.leaving or peer in self.unreachable
        return peer == self.me or not away

    def trains(self, peer: PeerId, fragment: int) -> bool:
        """Tell whether ``peer`` trains a fragment, by its own word."""
        return peer not in self.parts or fragment in self.parts[peer]

    def may_offer(self, peer: PeerId, fragment: int) -> bool:
        """Tell whether a contribution of ``peer`` to a fragment may be expected."""
        return self.present(peer) and self.trains(peer, fragment)

    def heard(self, peer: PeerId) -> None:
        """``peer`` just spoke, so the last failed send says nothing any more."""
        self.unreachable.discard(peer)

    def given_up(self) -> frozenset[PeerId]:
        """Return the peers whose votes are not waited for when too few others are left."""
        return self.gone | frozenset(self.leaving)

    def next_members(
        self, head: Head, joiners: Iterable[PeerId], disputed: Collection[PeerId] = ()
    ) -> tuple[PeerId, ...]:
        """Return the membership that a record made now would set, sorted; those ``disputed`` stay what they are."""
        away = {peer for peer in head.members if peer in self.leaving or peer in self.expired} - {self.me, *disputed}
        if not keeps_majority(self.voting.committee(head), away):
            away &= self.given_up()  # no majority would be left: drop only those who left or are gone for good
        kept = set(head.members) - away
        joined = sorted(peer for peer in {*joiners} - kept - {*disputed} if self.present(peer))
        return tuple(sorted({*kept, *joined[: MAX_PEERS - len(kept)]}))  # a record names no more

    def may_drop(self, record: Record, farewells: Collection[PeerId] = ()) -> bool:
        """Tell whether this peer stands behind whom ``record`` drops, if no majority stays to vote: it gave them up
        itself, or they said farewell. Of whom does not vote a few more may be dropped: nobody needs their word.
        """
        if not self.voting.drops_majority(record):
            return True
        voters = frozenset(self.voting.committee(record))
        return removals(record) & voters <= self.given_up() | frozenset(farewells) | {self.me}

    def would_drop(self, record: Record, farewells: Collection[PeerId] = ()) -> frozenset[PeerId]:
        """Return the members that ``record`` drops although this peer hears of them: it is one of those itself."""
        return removals(record) - self.missed - self.expired - self.leaving - frozenset(farewells)

    def is_majority_here(self, voters: tuple[PeerId, ...]) -> bool:
        """Tell whether a majority of ``voters`` votes, rather than the few peers that are left."""
        return keeps_majority(voters, self.given_up())


# ---- histories and branches ----
#
# The heads that this peer's chain went through tell where it and another branch were last the same.
#
# A fork is found as Bitcoin's nodes find one: name a few of our records, dense near the head and ever sparser behind
# it; the other side answers with the newest of them it knows and what it committed after it. Nothing that it claims is
# believed: every record must follow the one before and carry a majority's votes.
#
# Source: the block locator of Nakamoto, "Bitcoin: A Peer-to-Peer Electronic Cash System", 2008, as its reference
# client has it; the certificates are this project's.

LENGTH = 1024  # heads remembered, about 0.5 MB: a branch that ran longer alone still heals, its own progress aside
DENSE = 8  # newest records that a locator names one by one
LOCATOR = 32  # records a locator names at most: 8 dense ones and gaps that double reach back 2**24 rounds

Place = tuple[int, Digest]  # round, hash of its record


class History:
    """The newest heads of one chain, oldest first; only ever of one branch."""

    def __init__(self, head: Head) -> None:
        self._heads: OrderedDict[int, Head] = OrderedDict({head.round: head})

    def add(self, head: Head) -> None:
        """Add a head: the chain grew, or turns out to have come this way."""
        self._heads[head.round] = head
        self._heads.move_to_end(head.round)
        while len(self._heads) > LENGTH:
            self._heads.popitem(last=False)

    def add_before(self, head: Head) -> None:
        """Add a head before the oldest one that is remembered."""
        if head.round not in self._heads and len(self._heads) < LENGTH:
            self._heads[head.round] = head
            self._heads.move_to_end(head.round, last=False)

    def switch(self, shared: Head | None, heads: Iterable[Head]) -> None:
        """Go over to another branch from ``shared`` on; None: nothing is known to be shared."""
        known = [] if shared is None else [head for head in self._heads.values() if head.round <= shared.round]
        self._heads = OrderedDict((head.round, head) for head in (*known, *heads))

    def at(self, place: Place) -> Head | None:
        """Return the head at ``place`` if the chain went through it."""
        head = self._heads.get(place[0])
        return head if head is not None and head.hash == place[1] else None

    def members(self) -> frozenset[PeerId]:
        """Return all peers that were members at the heads that are remembered."""
        return frozenset[PeerId]().union(*(head.members for head in self._heads.values()))

    def outer_steps_at(self, round_: int) -> int:
        """Return the outer steps that the chain had made at a height; where that is not remembered, as if each record
        made one.
        """
        known = self._heads.get(round_)
        newest = next(reversed(self._heads.values()))
        return known.outer_step if known is not None else max(0, newest.outer_step + round_ - newest.round)

    def locator(self) -> list[Place]:
        """Return places on the chain, newest first: each of the last few, then with doubling gaps, then the oldest."""
        heads = list(reversed(self._heads.values()))
        chosen, at, gap = list[Head](), 0, 1
        while at < len(heads) and len(chosen) < LOCATOR - 1:
            chosen.append(heads[at])
            gap *= 2 if len(chosen) >= DENSE else 1
            at += gap
        if chosen[-1] is not heads[-1]:
            chosen.append(heads[-1])
        return [(head.round, head.hash) for head in chosen]

    def newest_of(self, places: Iterable[Place]) -> Head | None:
        """Return the first of ``places`` that the chain went through."""
        return next((head for place in places if (head := self.at(place)) is not None), None)

    def since(self, shared: Head) -> list[Head]:
        """Return the way from ``shared``, a head of this chain, to its newest, both included."""
        return [shared, *(head for head in self._heads.values() if head.round > shared.round)]


def rank_of(way: Sequence[Head], voting: Voting) -> tuple[Weight, ...]:
    """Rank a branch against others of a chain that parted at ``way[0]``: the greater tuple wins.

    The weights at which a branch gave up a majority, one after the other, and last its own. So where the oldest fork is
    between a record that a majority of the shared committee signed and one that was made by the few who were left, the
    first wins, however heavy the other has become; where both are of the same kind, the heavier. A tuple of a total
    order is one, and it rises with every record: docs/protocol.md, section 11.
    """
    parted = [one.weight for one, following in pairwise(way) if voting.shrinks_to(one, following.members)]
    return (*parted, way[-1].weight)


@dataclass(frozen=True, slots=True)
class Past:
    """The way to a peer's head, as far as its disk has it: with it a restarted peer helps those behind as it did
    before.
    """

    heads: tuple[Head, ...] = ()  # oldest first, up to the head itself; empty: only the head is known
    commits: tuple[Commit, ...] = ()  # oldest first, up to the head's
    frames: tuple[Frame, ...] = ()  # of the newest commits, and of the record voted for


def retrace(starts: Mapping[Digest, Head], commits: Iterable[Commit], head: Head) -> Past:
    """Return the way to ``head`` through ``commits``, among which are those of branches given up; heads from a known
    start.
    """
    by_hash = {commit.record.hash: commit for commit in commits}
    way, at = list[Commit](), head.hash
    while at in by_hash:
        way.append(by_hash[at])
        at = way[-1].record.previous
    way.reverse()
    for number, commit in enumerate(way):
        if commit.record.previous in starts:
            return Past(_heads_along(starts[commit.record.previous], way[number:], head), tuple(way))
    return Past((), tuple(way))


def _heads_along(start: Head, commits: Sequence[Commit], head: Head) -> tuple[Head, ...]:
    heads = [start]
    for commit in commits:
        heads.append(heads[-1].extended(commit.record))
    return (*heads[:-1], head)


@dataclass(frozen=True, slots=True)
class Branch:
    """Another chain of this run, checked record by record."""

    shared: Head | None  # the newest head both chains went through; None: not known
    heads: tuple[Head, ...] = ()  # after it, up to the one that is adopted
    records: tuple[Record, ...] = ()  # that made them


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules that a commit must follow, by which an invented one is known."""

    voting: Voting
    num_fragments: int

    def next(self, head: Head, commit: Commit) -> Head:
        """Return the head that ``commit`` leads to. Raises PayloadError unless it follows ``head`` and was voted
        for.
        """
        check_turn(commit.record, self.num_fragments)
        following = head.extended(commit.record)
        self.voting.check_certified(commit)
        return following

    def last(self, start: Head, commits: Iterable[Commit]) -> Head:
        """Return the head that ``commits`` lead to, each from the one before. Raises as ``next`` does."""
        return reduce(self.next, commits, start)


def check_branch(history: History, start: Head, commits: Sequence[Commit], claimed: Head, rules: Rules) -> Branch:
    """Return the branch that ``commits`` make from ``start``, a head of ours, up to ``claimed``.

    Raises PayloadError when a record does not follow, lacks a majority's votes, or does not lead to the claimed head.
    """
    shared, heads, records, head = start, list[Head](), list[Record](), start
    for commit in commits:
        head = rules.next(head, commit)
        if (ours := history.at((head.round, head.hash))) is not None:
            shared, heads, records = ours, [], []
            continue
        heads.append(head)
        records.append(commit.record)
        if head.hash == claimed.hash:
            break
    if replace(head, anchor=claimed.anchor) != claimed:
        raise PayloadError(
            f"its chain does not lead to the head of round {claimed.round} that it claims; drop it and ask another"
        )
    return Branch(shared, tuple(heads), tuple(records))
