"""Small messages around a round: offers, plans, which peers are missing, joining and leaving.

Crosses the wire: 0 to 180 bytes each, a plan 89 per contributor and its summary, and 48 per range.
"""

from __future__ import annotations

from dataclasses import dataclass

from decentral.wire.codecs import U32, U64, Hash
from decentral.wire.records import FrameRefs, Partition, Peers, Summary, broken_ranges


@dataclass(frozen=True, slots=True)
class Offer:
    """Its sender has a contribution to the round, and this is its frame."""

    epoch: U64
    round: U64
    fragment: U32
    base: Hash  # digest of the anchor it starts from
    frame: Hash
    nbytes: U64  # of the frame
    steps: U32
    tokens: U64
    based: U64 = 0  # outer step of the anchor that the progress was begun from; the round's own if it is in time
    summary: Summary = b""  # what the method says of it besides, for the record to tell everybody alike


@dataclass(frozen=True, slots=True)
class ReducePlan:
    """Who reduces what in this round: every owner averages exactly these contributors."""

    epoch: U64
    round: U64
    ballot: U32
    number: U32
    contributors: FrameRefs
    partition: Partition

    def check(self) -> str | None:
        """The rule across fields that this plan breaks."""
        if not self.partition or not self.contributors:
            return "a plan without contributors or without a partition"
        return broken_ranges(self.partition)


@dataclass(frozen=True, slots=True)
class Missing:
    """An owner tells the leader whose slices of the plan never came."""

    epoch: U64
    round: U64
    plan: U32
    peers: Peers


@dataclass(frozen=True, slots=True)
class JoinRequest:
    """Its sender stands at this round with this anchor and asks to be a member."""

    round: U64
    digest: Hash


@dataclass(frozen=True, slots=True)
class Goodbye:
    """Its sender leaves."""


@dataclass(frozen=True, slots=True)
class Behind:
    """The receiver is behind: the sender stands at ``round`` and can give the commits up to it."""

    round: U64
