"""Sizes of messages: every one comes from the encoder that makes it.

Lists grow by the bytes that one more item adds, so that sizes beyond ``MAX_PEERS``, which no encoder makes, can be
drawn.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from decentral.transport.requests import PREFIX_NBYTES
from decentral.wire.keys import SIGNATURE_NBYTES
from decentral.wire.messages import (
    Certificate,
    Commit,
    FrameRef,
    Message,
    Proposal,
    Record,
    ReducePlan,
    encode,
    encode_record,
)

HASH = bytes(32)


@dataclass(frozen=True, slots=True)
class Cost:
    """What one peer sends, on average over all peers."""

    messages: float
    nbytes: float

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.messages + other.messages, self.nbytes + other.nbytes)

    def times(self, factor: float) -> Cost:
        """That many of it."""
        return Cost(factor * self.messages, factor * self.nbytes)


def message(nbytes: float) -> Cost:
    """One message with a body of ``nbytes``."""
    return Cost(1.0, PREFIX_NBYTES + nbytes)


def record_nbytes(members: int, frames: int, contributors: int = 0) -> float:
    """A record that keeps its members; with contributors, ``frames`` are the results of a reduce, one per range."""
    empty, member, frame, contributor, part = _record_sizes()
    result = part if contributors else frame
    return empty + members * member + frames * result + contributors * contributor


@cache
def _record_sizes() -> tuple[int, int, int, int, int]:
    """Bytes of an empty record, and what a member, a frame, a contributor, a range with its result add to one."""
    empty = _nbytes(_record(0, 0, 0))
    reduced = _nbytes(_record(0, 1, 1))
    return (
        empty,
        _nbytes(_record(1, 0, 0)) - empty,
        _nbytes(_record(0, 1, 0)) - empty,
        _nbytes(_record(0, 1, 2)) - reduced,
        _nbytes(_record(0, 2, 1)) - reduced,
    )


def _nbytes(record: Record) -> int:
    return len(encode_record(record))


def _peers(count: int) -> list[bytes]:
    return [bytes([n]) * 32 for n in range(count)]


def _record(members: int, frames: int, contributors: int) -> Record:
    peers, ranges = tuple(_peers(members)), tuple(_ranges(frames)) if contributors else ()
    refs = tuple(FrameRef(p, HASH, n if contributors else 0, 1, 1) for n, p in enumerate(_peers(frames)))
    given = tuple(FrameRef(p, HASH, 0, 1, 1) for p in _peers(contributors))
    return Record(HASH, 0, 1, 0, 0, 0, HASH, HASH, peers, refs, given, ranges, peers, False)


def _ranges(count: int) -> list[tuple[bytes, int, int]]:
    return [(peer, n, n + 1) for n, peer in enumerate(_peers(count))]


def plan_nbytes(contributors: int, ranges: int) -> float:
    """The plan of a reduce."""
    base, more, wider = (
        len(encode(ReducePlan(0, 1, 0, 0, tuple(FrameRef(p, HASH, 0, 1, 1) for p in _peers(c)), tuple(_ranges(r)))))
        for c, r in ((1, 1), (2, 1), (1, 2))
    )
    return base + (contributors - 1) * (more - base) + (ranges - 1) * (wider - base)


def commit_nbytes(record: float, votes: int) -> float:
    """A commit over a record of that size."""
    empty, one = (_commit(votes) for votes in (0, 1))
    return empty - _nbytes(_record(0, 0, 0)) + record + votes * (one - empty)


def _commit(votes: int) -> int:
    signed = tuple((peer, bytes(SIGNATURE_NBYTES)) for peer in _peers(votes))
    return len(encode(Commit(_record(0, 0, 0), Certificate(0, signed))))


def proposal_nbytes(record: float) -> float:
    """A proposal of a record of that size."""
    return len(encode(Proposal(0, _record(0, 0, 0)))) - _nbytes(_record(0, 0, 0)) + record


def size(of: Message) -> int:
    """Of its encoding."""
    return len(encode(of))
