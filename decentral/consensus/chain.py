"""The chain of commits: who leads, how many votes decide, what the next record must look like.

Every record names its predecessor's hash, so two peers with the same head hash have applied the same frames in
the same order. Nothing here costs a byte on the wire.

When a majority was given up and lives on elsewhere, two chains of one run meet again: the heavier one wins. Weight is
what the chain's records say of the training behind it, so everybody computes the same.
"""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from decentral.errors import PayloadError
from decentral.wire.keys import PeerId, peer_name
from decentral.wire.messages import MAX_PEERS, FrameRef, Offer, Record

Digest = bytes

NOTHING: Digest = bytes(32)
TYPICAL_TIMES = 2  # one contribution counts as at most so many typical ones: a claim of 1e18 tokens wins no fork
MOST_TOKENS = 1 << 40  # per contribution, whatever is typical: sums stay far inside 64 bits


@dataclass(frozen=True, slots=True)
class Head:
    """Where a peer's chain stands. ``anchor`` is None while the newest record is still being applied."""

    run: Digest
    epoch: int  # number of the membership below
    round: int  # height of the newest record; 0 is the genesis
    outer_step: int  # records so far that moved the anchor
    hash: Digest  # of the newest record
    anchor: Digest | None  # digest of the anchor after it
    members: tuple[PeerId, ...]  # who takes part in the next record, sorted
    newcomers: frozenset[PeerId] = frozenset()  # came in since the anchor last moved: half a phase behind
    final: bool = False
    tokens: int = 0  # committed so far, as ``counted_tokens`` counts them
    contributions: int = 0  # committed so far

    @property
    def weight(self) -> tuple[int, int, int, Digest]:
        """What decides between two branches: committed tokens; without any, outer steps; the rest breaks ties.

        It rises with every record, so a chain is always heavier than its own past.
        """
        return self.tokens, self.outer_step, self.round, self.hash

    @classmethod
    def genesis(cls, run: Digest, schema: Digest, anchor: Digest, founder: PeerId) -> Head:
        """The chain of a run that nobody has joined yet."""
        seed = hashlib.blake2b(b"genesis" + run + schema + anchor + founder, digest_size=32).digest()
        return cls(run, 0, 0, 0, seed, anchor, (founder,))

    def extended(self, record: Record) -> Head:
        """The head after ``record``; the anchor's digest follows once the record is applied.

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
            tokens=self.tokens + counted_tokens(self, record),
            contributions=self.contributions + len(contributions(record)),
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON, for checkpoints and snapshots. Raises no error; the anchor must be known."""
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
        """The fragment that the next anchor-moving record carries."""
        return self.outer_step % num_fragments


def moves_anchor(record: Record) -> bool:
    """Whether the record carries frames; the others only change the membership."""
    return bool(record.frames)


def contributions(record: Record) -> tuple[FrameRef, ...]:
    """Whose progress the record carries, one reference each: a gather's frames, or a reduce's contributors."""
    return record.contributors or record.frames


def counted_tokens(head: Head, record: Record) -> int:
    """The tokens that ``record`` adds to the chain of ``head``.

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
    """The members in the order in which they lead the next round's ballots.

    Rendezvous hashing over (run, round): every round another leader, and no message is needed to agree on it.
    """
    salt = head.run + (head.round + 1).to_bytes(8, "little")
    return sorted(head.members, key=lambda peer: hashlib.blake2b(salt + peer, digest_size=16).digest())


def majority(voters: Sequence[PeerId]) -> int:
    """The number of votes that any two quorums of ``voters`` cannot both have without sharing a peer."""
    return len(voters) // 2 + 1
