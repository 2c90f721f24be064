"""Messages among machines that are, or are to be, one replica: what each has, what they agree on, what crosses."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise
from typing import Annotated

from decentral.errors import PayloadError
from decentral.wire.codecs import (
    PEER_CODEC,
    SIGNATURE_CODEC,
    U16,
    U16_CODEC,
    U64,
    Hash,
    Many,
    Row,
    Struct,
    to_bytes,
)
from decentral.wire.keys import PeerId, Signer, verify

__all__ = [
    "BODY_HEAD_NBYTES",
    "BOUNDARY",
    "GROUP",
    "MOST_MEMBERS",
    "MOST_MICRO_BATCHES",
    "Body",
    "BodyKind",
    "GroupRecord",
    "Offered",
    "Sealed",
    "has_signed",
    "sign_group",
]

GROUP, BOUNDARY = "/decentral/group/1", "/decentral/boundary/1"  # protocols: of forming groups, of what crosses
MOST_MEMBERS = 4
MOST_MICRO_BATCHES = 1 << 10
ROUNDINGS = 3  # `decentral.pipeline.boundary.ROUNDINGS` has them


# ---- how a group is formed ----


@dataclass(frozen=True, slots=True)
class Offered:
    """The answer of a machine that looks for others: what it has for a replica."""

    memory: U64  # bytes that training may take
    speed: U64  # parameters times tokens a second, forward and back
    uplink: U64  # bytes a second; 0: not known

    def check(self) -> str | None:
        """The rule that this answer breaks."""
        return None if self.speed else "it has no speed"


@dataclass(frozen=True, slots=True)
class GroupRecord:
    """The stages of one replica, first to last: each a peer, and the fragments [first, stop) that it trains.

    Between two stages one run of fragments may be left out, where the run's terms allow it.
    """

    run: Hash
    number: U64  # drawn by who proposes it
    stages: Annotated[tuple[tuple[PeerId, int, int], ...], Many(Row((PEER_CODEC, U16_CODEC, U16_CODEC)), MOST_MEMBERS)]
    micro_batches: U16  # of a step
    rounding: U16  # of what crosses, by its place in `decentral.pipeline.boundary.ROUNDINGS`

    def check(self) -> str | None:
        """The rule across fields that this record breaks."""
        if len(self.stages) < 2 or len(set(self.members)) < len(self.stages):
            return f"a group of {len(self.stages)} stages, each of another peer: want 2 or more"
        ends = (0, *(stop for _, _, stop in self.stages))
        begins = tuple(first for _, first, _ in self.stages)
        gaps = [first - end for first, end in zip(begins, ends, strict=False)]
        if gaps[0] or min(gaps) < 0 or any(first >= stop for _, first, stop in self.stages):
            return "its stages do not follow each other, from the first fragment on"
        if sum(gap > 0 for gap in gaps) > 1:
            return "it leaves fragments out at more than one place"
        if self.rounding >= ROUNDINGS:
            return f"rounding {self.rounding}, of which there is none"
        if not 1 <= self.micro_batches <= MOST_MICRO_BATCHES:
            return f"{self.micro_batches} micro-batches, want 1 to {MOST_MICRO_BATCHES}"
        return None

    @property
    def members(self) -> tuple[PeerId, ...]:
        """The peers, in the order of the stages."""
        return tuple(peer for peer, _, _ in self.stages)

    @property
    def fragments(self) -> int:
        """Fragments of the model."""
        return self.stages[-1][2]

    @property
    def hole(self) -> range | None:
        """The fragments that no stage has, if any."""
        between = (range(stop, first) for (_, _, stop), (_, first, _) in pairwise(self.stages))
        return next((gap for gap in between if gap), None)

    def before(self, peer: PeerId) -> list[int]:
        """Return the fragments of the stages before a member's."""
        return [f for _, first, stop in self.stages[: self.members.index(peer)] for f in range(first, stop)]

    def part_of(self, peer: PeerId) -> range:
        """Return the fragments that a member trains."""
        return next(range(first, stop) for one, first, stop in self.stages if one == peer)


@dataclass(frozen=True, slots=True)
class Sealed:
    """A record that all of its members have signed, in the order of the stages."""

    record: Annotated[GroupRecord, Struct(GroupRecord)]
    signatures: Annotated[tuple[bytes, ...], Many(SIGNATURE_CODEC, MOST_MEMBERS)]

    def check(self) -> str | None:
        """The rule that a seal breaks: a member has not signed."""
        if len(self.signatures) != len(self.record.stages):
            return f"{len(self.signatures)} signatures of {len(self.record.stages)} members"
        each = zip(self.record.members, self.signatures, strict=True)
        return None if all(has_signed(self.record, *one) for one in each) else "not signed by its members"


def sign_group(record: GroupRecord, signer: Signer) -> bytes:
    """Return a member's signature of a record. PayloadError for a record that breaks a rule."""
    return signer.sign(_signed_text(record))


def has_signed(record: GroupRecord, peer: PeerId, signature: bytes) -> bool:
    """Tell whether a peer signed a record."""
    return verify(peer, signature, _signed_text(record))


def _signed_text(record: GroupRecord) -> bytes:
    return b"decentral group 1\0" + to_bytes(record)


# ---- what crosses between stages ----
#
# Crosses the wire, little-endian: u8 kind, u64 number of the group, u64 step, u16 micro-batch, then the values, as many
# as every member knows beforehand.

_HEAD = struct.Struct("<BQQH")
BODY_HEAD_NBYTES = _HEAD.size


class BodyKind(IntEnum):
    """The contents of a body."""

    STATES = 0  # to the next stage
    GRADIENT = 1  # to the one before
    TARGETS = 2  # from the first to the last
    DONE = 3  # to all, when all gradients of a step are made
    READY = 4  # to all: this member knows what crosses, and takes it
    OVER = 5  # to all: this member is in the group no more
    WAITS = 6  # to all: the place of the stage that it waits for, a byte; its own: it waits for none


@dataclass(frozen=True, slots=True)
class Body:
    """A message between two stages."""

    kind: BodyKind
    group: int
    step: int
    micro: int
    values: bytes | memoryview

    def to_bytes(self) -> bytes:
        """Return it as it crosses the wire."""
        return _HEAD.pack(self.kind, self.group, self.step, self.micro) + self.values

    @classmethod
    def read(cls, data: bytes) -> Body:
        """Read what ``to_bytes`` wrote. PayloadError."""
        if len(data) < _HEAD.size:
            raise PayloadError(
                f"a body of {len(data)} bytes between stages, its head alone takes {_HEAD.size}; drop it"
            )
        kind, group, step, micro = _HEAD.unpack_from(data)
        if kind not in BodyKind.__members__.values():
            raise PayloadError(f"a body of kind {kind} between stages: there is none; drop it")
        return cls(BodyKind(kind), group, step, micro, memoryview(data)[_HEAD.size :])
