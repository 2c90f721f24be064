"""Costs of a swarm of any size: arithmetic over the sizes of real messages. No tensors, no event loop, no peers.

Costs are what a peer sends on average over the peers of a swarm in which nothing fails; as much is received.
``tests/simulate/test_cost_model.py`` holds them against what real peers sent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from decentral.consensus.chain import SEATS
from decentral.dissemination.reduce import partition
from decentral.rounds.gossip import COMMIT_NBYTES
from decentral.swarm.directory import DIRECT
from decentral.swarm.leases import write_leases
from decentral.transport.requests import PREFIX_NBYTES
from decentral.wire.frames import HEADER_NBYTES
from decentral.wire.keys import SIGNATURE_NBYTES, PeerId
from decentral.wire.messages import (
    Certificate,
    Commit,
    FrameRef,
    Lease,
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


# ---- rounds ----
#
# Frames, and what is said to agree on them.

Body = Callable[[int], float]  # values -> bytes of a frame's body

OFFER = Offer(0, 1, 0, HASH, HASH, 0, 1, 1)
VOTE = Vote(0, 1, 0, HASH, bytes(SIGNATURE_NBYTES))


def control(kind: str, n: int, numel: int) -> Cost:
    """Control messages of one round of a gather or a reduce: offers, votes, and what is said once to all or to voters.

    A committee hears the offers of all, and all hear those of the committee.
    """
    voters, record = min(n, SEATS), _record_of(kind, n, numel)
    offers = message(size(OFFER)).times(voters * (n - 1) + (n - voters) * voters)
    votes = (message(size(VOTE)) + message(proposal_nbytes(record))).times(voters - 1)
    told = message(commit_nbytes(record, voters // 2 + 1)) + _plan(kind, n, numel)
    return (offers + votes + told.times(n - 1)).times(1 / n)


def leader(kind: str, n: int, numel: int) -> Cost:
    """What the leader of a round sends besides its own offer: another peer every round.

    Of a commit that a committee voted for it tells those whose votes are in it, and as many of the others as each of
    those tells.
    """
    voters, record = min(n, SEATS), _record_of(kind, n, numel)
    relays = voters // 2 + 1
    told = n - 1 if n <= SEATS else relays - 1 + (n - relays) / relays
    commit = message(commit_nbytes(record, relays)).times(told)
    return commit + message(proposal_nbytes(record)).times(voters - 1) + _plan(kind, n, numel).times(n - 1)


def _record_of(kind: str, n: int, numel: int) -> float:
    return record_nbytes(n, num_parts(n, numel), n) if kind == "reduce" else record_nbytes(n, n)


def _plan(kind: str, n: int, numel: int) -> Cost:
    return message(plan_nbytes(n, num_parts(n, numel))) if kind == "reduce" else Cost(0.0, 0.0)


def num_parts(n: int, numel: int) -> int:
    """Parts of a reduce, each with a result of its own."""
    return len(partition(numel, _owners(n)))


def _owners(n: int) -> list[PeerId]:
    return [number.to_bytes(4, "big") for number in range(n)]


def gather(n: int, numel: int, body: Body) -> Cost:
    """Frames of one round: each to every other."""
    return message(HEADER_NBYTES + body(numel)).times(n - 1)


def reduce(n: int, numel: int, body: Body) -> Cost:
    """Frames of one round: a slice to every owner, a result to every peer."""
    sizes: dict[int, float] = {}
    total = Cost(0.0, 0.0)
    for _, start, stop in partition(numel, _owners(n)):
        if stop - start not in sizes:
            sizes[stop - start] = body(stop - start)
        total += message(HEADER_NBYTES + sizes[stop - start])
    return total.times(2 * (n - 1) / n)


def pair(n: int, numel: int, body: Body, vectors: int = 2) -> Cost:
    """Frames and messages of one gossip step: the method's vectors to the partner; and one commit."""
    swap = message(HEADER_NBYTES + body(vectors * numel))
    commit = (message(COMMIT_NBYTES) + message(1)).times(0.5)
    return (swap + commit).times(2 * (n // 2) / n)


def grouped(n: int, numel: int, body: Body, group: int) -> Cost:
    """A round of gather, control messages included, in groups of ``group`` that each commit for themselves.

    No round of the library works so yet; it is what one would cost.
    """
    size = min(n, group)
    return gather(size, numel, body) + control("gather", size, numel)


# ---- knowing who is here ----
#
# Leases, and hivemind's DHT.

ANSWER_NBYTES = PREFIX_NBYTES  # an answer without a body

# hivemind 1.1.12, serialised by its own protobuf: experiments/cost/lookups.py prints them. Leases come on top.
FIND_NBYTES, FOUND_NBYTES, LEASE_IN_DHT_NBYTES = 46, 1267, 70
STORE_NBYTES, STORED_NBYTES = 121, 27
PING_NBYTES, PONG_NBYTES = 26, 35
BEAM, REPLICAS, PINGS, LOOKS = 20, 5, 8, 4  # nodes of a look-up, copies of a lease, pings of a peer, look-ups of all


def renewal(n: int, lease: Lease) -> Cost:
    """One renewal of a peer's lease: to whom it tells, with one other asked for all it knows; and its answers."""
    nbytes, entry = size(lease), len(write_leases([(1.0, lease)]))
    told, passed_to, leases = around(n)
    answer = Cost(1.0, ANSWER_NBYTES)
    asked_besides = 1 - told / (n - 1) if n > 1 else 0.0
    one_by_one = (message(nbytes) + answer).times(told + asked_besides)
    lists = Cost(passed_to, passed_to * PREFIX_NBYTES + leases * entry) + answer.times(passed_to)
    return one_by_one + lists + Cost(0.0, n * entry if n > 1 else 0.0)


def around(n: int) -> tuple[float, float, float]:
    """Whom a peer tells of itself, to whom it passes its row on, and the leases in what it passes on: the averages of
    `circles`, without going through everybody.
    """
    if n - 1 <= DIRECT:
        return n - 1, 0.0, 0.0
    rows = math.isqrt(n)
    short, longer = divmod(n, rows)
    told = longer * (short + 1) * short + (rows - longer) * short * (short - 1 + longer)
    passed = short * rows * (rows - 1) + longer * (longer - 1)
    rows_passed = longer * (short + 1) + (rows - longer) * short
    leases = short * (rows - 1) * rows_passed + longer * (longer - 1) * (short + 1)
    return told / n, passed / n, leases / n


def lookups(n: int, lease: Lease) -> Cost:
    """What a peer has with hivemind's DHT in a third of a lease: pings, its lease stored, its share of the look-ups."""
    found = message(FIND_NBYTES) + message(FOUND_NBYTES)
    ping = message(PING_NBYTES) + message(PONG_NBYTES)
    store = message(STORE_NBYTES + size(lease)) + message(STORED_NBYTES)
    search = found.times(nodes_asked(n))
    values = Cost(0.0, min(REPLICAS, n - 1) * n * (size(lease) + LEASE_IN_DHT_NBYTES))
    looks = 1 / max(1, n // LOOKS)
    return (
        ping.times(min(PINGS, n - 1))
        + store.times(min(REPLICAS, n - 1))
        + search.times(1 + looks)
        + values.times(looks)
    )


def nodes_asked(n: int) -> float:
    """Nodes that one search asks. Measured up to 10,000: a beam, and one more per doubling beyond what a node knows."""
    return min(n - 1.0, BEAM + max(0.0, float(np.log2(n / 1000))))


# ---- least seconds of a round ----
#
# For its frames, on lines of these rates.
#
# Source: the lower bounds of gather and reduce are those of Patarasuk and Yuan, "Bandwidth optimal all-reduce
# algorithms for clusters of workstations", 2009, with a rate of its own for each direction of each peer.

Array = NDArray[np.float64]


def gather_seconds(payload: float, up: Sequence[float], down: Sequence[float]) -> float:
    """The least time in which every peer can have every frame of ``payload`` bytes, at these rates in bytes/s.

    A frame leaves its owner once, all others reach each peer, and all copies come out of all uplinks together.
    """
    n = len(up)
    rates_up: Array = np.asarray(up, dtype=np.float64)
    slowest_down = float(np.min(np.asarray(down, dtype=np.float64)))
    everywhere = n * (n - 1) * payload / float(rates_up.sum())
    return max(payload / float(rates_up.min()), (n - 1) * payload / slowest_down, everywhere)


def push_seconds(payload: float, up: Sequence[float], down: Sequence[float]) -> float:
    """The same when each owner sends all copies of its frame itself, as rounds do now."""
    slowest = min(min(up), min(down))
    return (len(up) - 1) * payload / slowest


def reduce_seconds(payload: float, n: int, up: float, down: float) -> float:
    """The least time of a reduce over ``n`` equal peers."""
    return 2 * (n - 1) / n * payload / min(up, down)


# ---- sizes of messages ----
#
# Every one comes from the encoder that makes it.
#
# Lists grow by the bytes that one more item adds, so that sizes beyond ``MAX_PEERS``, which no encoder makes, can be
# drawn.


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
    return len(encode(Proposal(0, _record(0, 0, 0), bytes(SIGNATURE_NBYTES)))) - _nbytes(_record(0, 0, 0)) + record


def size(of: Message) -> int:
    """Of its encoding."""
    return len(encode(of))
