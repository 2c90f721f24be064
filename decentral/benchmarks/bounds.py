"""What no exchange can beat: seconds that the links alone need.

P is the body of one peer in bytes, rates are in bytes per second, one for each of N peers.
"""

from __future__ import annotations

from collections.abc import Sequence


def gather_bound(nbytes: float, ups: Sequence[float], downs: Sequence[float]) -> float:
    """Everybody gets everybody's body: max(P / up_i, (N-1) P / down_i, N (N-1) P / sum up).

    Who uploads little may send its body once and have others pass it on; all copies together must leave somewhere.
    """
    n = len(ups)
    own = max(nbytes / up for up in ups)
    taken = max((n - 1) * nbytes / down for down in downs)
    return max(own, taken, n * (n - 1) * nbytes / sum(ups))


def reduce_bound(nbytes: float, ups: Sequence[float], downs: Sequence[float]) -> float:
    """Everybody gets the mean: 2 (N-1) P in all must leave and arrive, and each sends and takes a body at least once.

    For equal links that is 2 (N-1)/N P / min(up, down).

    Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009.
    """
    n = len(ups)
    both = 2 * (n - 1) * nbytes
    return max(both / sum(ups), both / sum(downs), nbytes / min(ups), nbytes / min(downs))


def pair_bound(nbytes: float, ups: Sequence[float], downs: Sequence[float]) -> float:
    """Each sends its body to one other, whatever the size of the swarm: P / up_i, P / down_i, of the slowest."""
    return nbytes / min(*ups, *downs)


BOUNDS = {"gather": gather_bound, "reduce": reduce_bound, "pair": pair_bound}
