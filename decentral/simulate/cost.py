"""Costs of a swarm of any size beside those of its rounds: leases, the DHT, leaders; and the least seconds of a round.

Costs are what a peer sends on average, as those of rounds in `decentral.training.round_cost`.
``tests/simulate/test_cost_model.py`` holds them against what real peers sent.
"""

from __future__ import annotations

import math

import numpy as np

from decentral.consensus.chain import SEATS
from decentral.swarm.directory import DIRECT
from decentral.swarm.leases import write_leases
from decentral.training.round_cost import (
    Body,
    Cost,
    commit_nbytes,
    control,
    gather,
    message,
    plan,
    proposal_nbytes,
    record_of,
    size,
)
from decentral.transport.requests import PREFIX_NBYTES
from decentral.wire.messages import Lease

# ---- rounds ----


def leader(kind: str, n: int, numel: int) -> Cost:
    """Return what the leader of a round sends besides its own offer: another peer every round.

    A commit that a committee voted for it sends to those whose votes are in it, and to as many of the others as each
    of those does.
    """
    voters, record = min(n, SEATS), record_of(kind, n, numel)
    relays = voters // 2 + 1
    told = n - 1 if n <= SEATS else relays - 1 + (n - relays) / relays
    commit = message(commit_nbytes(record, relays)).times(told)
    return commit + message(proposal_nbytes(record)).times(voters - 1) + plan(kind, n, numel).times(n - 1)


def in_groups(n: int, numel: int, body: Body, group: int) -> Cost:
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
    """Return the cost of renewing a peer's lease: to those it tells, with one other asked for all it knows; and its
    answers.
    """
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
    """Return a peer's cost of hivemind's DHT in a third of a lease: pings, its lease, its share of look-ups."""
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
