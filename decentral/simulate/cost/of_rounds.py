"""What a round sends: frames, and what is said to agree on them."""

from __future__ import annotations

from collections.abc import Callable

from decentral.consensus.chain import SEATS
from decentral.dissemination.reduce import partition
from decentral.rounds.gossip import COMMIT_NBYTES
from decentral.simulate.cost.sizes import (
    HASH,
    Cost,
    commit_nbytes,
    message,
    plan_nbytes,
    proposal_nbytes,
    record_nbytes,
    size,
)
from decentral.wire.frames import HEADER_NBYTES
from decentral.wire.keys import SIGNATURE_NBYTES, PeerId
from decentral.wire.messages import Offer, Vote

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
