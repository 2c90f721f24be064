"""The heads this peer's chain went through: where it and another branch were last the same.

A fork is found as Bitcoin's nodes find one: name a few of our records, dense near the head and ever sparser behind it;
the other side answers with the newest of them it knows and what it committed after it. Nothing that it claims is
believed: every record must follow the one before and carry a majority's votes.

Source: the block locator of Nakamoto, "Bitcoin: A Peer-to-Peer Electronic Cash System", 2008, as its reference client
has it; the certificates are this project's.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce

from decentral.consensus.chain import Digest, Head, check_turn
from decentral.consensus.voting import Voting
from decentral.errors import PayloadError
from decentral.wire.frames import Frame
from decentral.wire.messages import Commit, Record

LENGTH = 1024  # heads remembered, about 0.5 MB: a branch that ran longer alone still heals, its own progress aside
DENSE = 8  # newest records that a locator names one by one
LOCATOR = 32  # records a locator names at most: 8 dense ones and gaps that double reach back 2**24 rounds

Place = tuple[int, Digest]  # round, hash of its record


class History:
    """The newest heads of one chain, oldest first; only ever of one branch."""

    def __init__(self, head: Head) -> None:
        self._heads: OrderedDict[int, Head] = OrderedDict({head.round: head})

    def add(self, head: Head) -> None:
        """The chain grew, or turns out to have come this way."""
        self._heads[head.round] = head
        self._heads.move_to_end(head.round)
        while len(self._heads) > LENGTH:
            self._heads.popitem(last=False)

    def switch(self, shared: Head | None, heads: Iterable[Head]) -> None:
        """Another branch from ``shared`` on; None: nothing is known to be shared."""
        known = [] if shared is None else [head for head in self._heads.values() if head.round <= shared.round]
        self._heads = OrderedDict((head.round, head) for head in (*known, *heads))

    def at(self, place: Place) -> Head | None:
        """The head at ``place`` if the chain went through it."""
        head = self._heads.get(place[0])
        return head if head is not None and head.hash == place[1] else None

    def outer_steps_at(self, round_: int) -> int:
        """Outer steps that the chain has made at a height; where that is not remembered, as if each record made one."""
        known = self._heads.get(round_)
        newest = next(reversed(self._heads.values()))
        return known.outer_step if known is not None else max(0, newest.outer_step + round_ - newest.round)

    def locator(self) -> list[Place]:
        """Places on the chain, newest first: each of the last few, then with doubling gaps, then the oldest."""
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
        """The first of ``places`` that the chain went through."""
        return next((head for place in places if (head := self.at(place)) is not None), None)


@dataclass(frozen=True, slots=True)
class Past:
    """What a peer's disk has of the way to its head: with it a restarted peer helps those behind as it did before."""

    heads: tuple[Head, ...] = ()  # oldest first, up to the head itself; empty: only the head is known
    commits: tuple[Commit, ...] = ()  # oldest first, up to the head's
    frames: tuple[Frame, ...] = ()  # of the newest commits, and of the record voted for


def retraced(starts: Mapping[Digest, Head], commits: Iterable[Commit], head: Head) -> Past:
    """The way to ``head`` through ``commits``, among which are those of branches given up; heads from a known start."""
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
    """By which a commit is known that somebody made up."""

    voting: Voting
    num_fragments: int

    def next(self, head: Head, commit: Commit) -> Head:
        """The head that ``commit`` leads to. Raises PayloadError unless it follows ``head`` and was voted for."""
        check_turn(commit.record, self.num_fragments)
        following = head.extended(commit.record)
        self.voting.check_certified(commit)
        return following

    def last(self, start: Head, commits: Iterable[Commit]) -> Head:
        """The head that they lead to, each from the one before. Raises as ``next`` does."""
        return reduce(self.next, commits, start)


def checked_branch(history: History, start: Head, commits: Sequence[Commit], claimed: Head, rules: Rules) -> Branch:
    """The branch that ``commits`` make from ``start``, a head of ours, up to ``claimed``.

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
