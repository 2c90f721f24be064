"""The record of a round: what a commit makes true. Chained by hash, so equal heads mean equal histories.

Crosses the wire: 149 bytes, then 32 per member (twice: this epoch and the next), 89 per frame or
contributor and its summary, and 48 per range of a reduce.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated

from decentral.wire.codecs import PEER_CODEC, U32, U64, U64_CODEC, Bounded, Flag, Hash, Many, Peer, Row
from decentral.wire.keys import DIGEST_NBYTES, Digest, PeerId
from decentral.wire.layout import Struct, from_bytes, to_bytes

MAX_PEERS = 1024  # of one epoch: beyond it, groups; bounds every list below
MAX_SUMMARY_NBYTES = 64  # a few norms or a scalar; with every list full, a commit still fits one message

Summary = Annotated[bytes, Bounded(MAX_SUMMARY_NBYTES)]
Range = tuple[PeerId, int, int]  # owner, start, stop: elements [start, stop) of the fragment


@dataclass(frozen=True, slots=True)
class FrameRef:
    """One frame as a record names it."""

    peer: Peer
    frame: Hash
    part: U32
    steps: U32  # inner steps behind the frame
    tokens: U64  # training tokens behind the frame
    based: U64 = 0  # outer step of the anchor that the progress was begun from; the record's own if it is in time
    summary: Summary = b""  # what the method says of it besides; a result has none


def _place(ref: FrameRef) -> tuple[PeerId, int]:
    return ref.peer, ref.part


def _begin(range_: Range) -> tuple[PeerId, int]:
    return range_[0], range_[1]


def _itself(peer: PeerId) -> PeerId:
    return peer


PEERS = Many(PEER_CODEC, MAX_PEERS, _itself)
REFS = Many(Struct(FrameRef), MAX_PEERS, _place)
RANGES = Many(Row((PEER_CODEC, U64_CODEC, U64_CODEC)), MAX_PEERS, _begin)

Peers = Annotated[tuple[PeerId, ...], PEERS]
FrameRefs = Annotated[tuple[FrameRef, ...], REFS]
Partition = Annotated[tuple[Range, ...], RANGES]


@dataclass(frozen=True)
class Record:
    """What a round decided. Lists are sorted, by peer and then by part, and name nobody twice."""

    run: Hash
    epoch: U64
    round: U64
    outer_step: U64
    fragment: U32
    plan: U32  # number of the reduce plan that made the frames, 0 when there is none
    previous: Hash  # hash of the record before
    base: Hash  # digest of the anchor that the frames start from
    members: Peers
    frames: FrameRefs  # to apply: the contributions, or the owners' results of a reduce
    contributors: FrameRefs  # reduce only: whose contributions the results average
    partition: Partition  # reduce only
    next_members: Peers
    final: Flag  # the run is done after this record

    @cached_property
    def hash(self) -> Digest:
        """blake2b-256 of the record's bytes: what votes sign and the next record names."""
        return hashlib.blake2b(encode_record(self), digest_size=DIGEST_NBYTES).digest()

    def check(self) -> str | None:
        """The rule across fields that this record breaks."""
        if bool(self.partition) != bool(self.contributors):
            return "a reduce names both its contributors and its partition"
        owners = [(owner, part) for part, (owner, _, _) in enumerate(self.partition)]
        if self.partition and [_place(ref) for ref in self.frames] != owners:
            return "the frames of a reduce are its owners' results, one for each range"
        if self.partition and any(ref.summary for ref in self.frames):
            return "a summary is of a contribution, and an owner's result has one"
        return broken_ranges(self.partition)


def broken_ranges(partition: tuple[Range, ...]) -> str | None:
    """What keeps the ranges from covering the fragment from 0 on, each element once."""
    upto = 0
    for _, start, stop in partition:
        if start != upto or stop <= start:
            return f"range [{start}, {stop}) does not begin where the one before ends, at {upto}, or is empty"
        upto = stop
    return None


def encode_record(record: Record) -> bytes:
    """The record's one encoding. Raises PayloadError for a record that breaks a rule."""
    return to_bytes(record)


def decode_record(data: bytes) -> Record:
    """The record encoded by exactly ``data``. Raises PayloadError."""
    return from_bytes(Record, data)
