"""Costs of a round: messages and bytes that a peer sends, by arithmetic over the sizes of real messages. No tensors.

Costs are what a peer sends on average over the peers of a swarm in which nothing fails; as much is received.
``tests/simulate/test_cost_model.py`` holds them against what real peers sent.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from decentral.consensus.chain import SEATS
from decentral.rounds.gossip import COMMIT_NBYTES
from decentral.rounds.reduce import partition
from decentral.transport.requests import PREFIX_NBYTES
from decentral.wire.frames import HEADER_NBYTES
from decentral.wire.keys import SIGNATURE_NBYTES, PeerId
from decentral.wire.messages import (
    Certificate,
    Commit,
    FrameRef,
    Message,
    Offer,
    Proposal,
    Record,
    ReducePlan,
    Vote,
    encode,
    encode_record,
)

HASH = bytes(32)


@dataclass(frozen=True, slots=True)
class Cost:
    """Messages and bytes that one peer sends, on average over all peers."""

    messages: float
    nbytes: float

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.messages + other.messages, self.nbytes + other.nbytes)

    def times(self, factor: float) -> Cost:
        """Return so many times this cost."""
        return Cost(factor * self.messages, factor * self.nbytes)


def message(nbytes: float) -> Cost:
    """Return the cost of one message with a body of ``nbytes``."""
    return Cost(1.0, PREFIX_NBYTES + nbytes)


# ---- rounds ----
#
# Frames, and what is said to agree on them.

Body = Callable[[int], float]  # values -> bytes of a frame's body

OFFER = Offer(0, 1, 0, HASH, HASH, 0, 1, 1)
VOTE = Vote(0, 1, 0, HASH, bytes(SIGNATURE_NBYTES))


def control(kind: str, n: int, numel: int) -> Cost:
    """Count the control messages of one round of a gather or a reduce: offers, votes, and what is said once to all or
    to voters.

    A committee hears the offers of all, and all hear those of the committee.
    """
    voters, record = min(n, SEATS), record_of(kind, n, numel)
    offers = message(size(OFFER)).times(voters * (n - 1) + (n - voters) * voters)
    votes = (message(size(VOTE)) + message(proposal_nbytes(record))).times(voters - 1)
    told = message(commit_nbytes(record, voters // 2 + 1)) + plan(kind, n, numel)
    return (offers + votes + told.times(n - 1)).times(1 / n)


def record_of(kind: str, n: int, numel: int) -> float:
    """Return the bytes of the record of a round."""
    return record_nbytes(n, num_parts(n, numel), n) if kind == "reduce" else record_nbytes(n, n)


def plan(kind: str, n: int, numel: int) -> Cost:
    """Return the cost of saying once who reduces what; nothing where all gather."""
    return message(plan_nbytes(n, num_parts(n, numel))) if kind == "reduce" else Cost(0.0, 0.0)


def num_parts(n: int, numel: int) -> int:
    """Return the number of parts of a reduce, each with a result of its own."""
    return len(partition(numel, _owners(n)))


def _owners(n: int) -> list[PeerId]:
    return [number.to_bytes(4, "big") for number in range(n)]


def gather(n: int, numel: int, body: Body) -> Cost:
    """Count the frames of one round: each to every other."""
    return message(HEADER_NBYTES + body(numel)).times(n - 1)


def reduce(n: int, numel: int, body: Body) -> Cost:
    """Count the frames of one round: a slice to every owner, a result to every peer."""
    sizes: dict[int, float] = {}
    total = Cost(0.0, 0.0)
    for _, start, stop in partition(numel, _owners(n)):
        if stop - start not in sizes:
            sizes[stop - start] = body(stop - start)
        total += message(HEADER_NBYTES + sizes[stop - start])
    return total.times(2 * (n - 1) / n)


def pair(n: int, numel: int, body: Body, vectors: int = 2) -> Cost:
    """Count the frames and messages of one gossip step: the method's vectors to the partner; and one commit."""
    swap = message(HEADER_NBYTES + body(vectors * numel))
    commit = (message(COMMIT_NBYTES) + message(1)).times(0.5)
    return (swap + commit).times(2 * (n // 2) / n)


# ---- sizes of messages ----
#
# Every one comes from the encoder that makes it.
#
# Lists grow by the bytes that one more item adds, so that sizes beyond ``MAX_PEERS``, which no encoder makes, can be
# drawn.


def record_nbytes(members: int, frames: int, contributors: int = 0) -> float:
    """Return the bytes of a record that keeps its members; with contributors, ``frames`` are the results of a reduce,
    one per range.
    """
    empty, member, frame, contributor, part = _record_sizes()
    result = part if contributors else frame
    return empty + members * member + frames * result + contributors * contributor


@cache
def _record_sizes() -> tuple[int, int, int, int, int]:
    """Return the bytes of an empty record, and what a member, a frame, a contributor, a range with its result add to
    one.
    """
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
    """Return the bytes of the plan of a reduce."""
    base, more, wider = (
        len(encode(ReducePlan(0, 1, 0, 0, tuple(FrameRef(p, HASH, 0, 1, 1) for p in _peers(c)), tuple(_ranges(r)))))
        for c, r in ((1, 1), (2, 1), (1, 2))
    )
    return base + (contributors - 1) * (more - base) + (ranges - 1) * (wider - base)


def commit_nbytes(record: float, votes: int) -> float:
    """Return the bytes of a commit over a record of that size."""
    empty, one = (_commit(votes) for votes in (0, 1))
    return empty - _nbytes(_record(0, 0, 0)) + record + votes * (one - empty)


def _commit(votes: int) -> int:
    signed = tuple((peer, bytes(SIGNATURE_NBYTES)) for peer in _peers(votes))
    return len(encode(Commit(_record(0, 0, 0), Certificate(0, signed))))


def proposal_nbytes(record: float) -> float:
    """Return the bytes of a proposal of a record of that size."""
    return len(encode(Proposal(0, _record(0, 0, 0), bytes(SIGNATURE_NBYTES)))) - _nbytes(_record(0, 0, 0)) + record


def size(of: Message) -> int:
    """Return the bytes of its encoding."""
    return len(encode(of))
