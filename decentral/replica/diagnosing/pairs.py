"""What a gossip pair tells: whether both changes pull together, and how far the two replicas are from one another.

Of independent replicas x_i with the same mean, E |x_i - x_j|^2 = 2 Var(x): half the mean square of the distances to the
last partners is the variance between all replicas, in units of a replica's own square.
"""
# Shape suffixes: N = elements of one fragment, C = channels, S = places of a sample; flat float32.

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from torch import Tensor

from decentral.optimizers import Channel
from decentral.replica.diagnosing.between import dispersion, mean_cosine
from decentral.replica.diagnosing.names import MEAN_COSINE, NORM_DISPERSION, REPLICA_DISTANCE, REPLICA_VARIANCE
from decentral.replica.received.sample import Sample

__all__ = ["LAST", "Distances", "between_two"]

LAST = 16  # pairs: one replica of eight that diverges is met every seventh step


def between_two(due: Sequence[Channel], mine_CN: Tensor, theirs_CN: Tensor, sample: Sample) -> dict[str, float]:
    """Of the changes that both sent, by a sample; nothing of a method that keeps its change to itself."""
    if due[0].is_replica:
        return {}
    changes = [one_CN.view(len(due), -1)[0] for one_CN in (mine_CN, theirs_CN)]
    found = {
        NORM_DISPERSION: dispersion([sample.norm(change_N) for change_N in changes]),
        MEAN_COSINE: mean_cosine([sample.of(change_N) for change_N in changes]),
    }
    return {name: value for name, value in found.items() if value is not None}


class Distances:
    """Between this peer's replica and those of its last partners."""

    def __init__(self) -> None:
        self._last: deque[float] = deque(maxlen=LAST)

    def add(self, distance: float | None) -> dict[str, float]:
        """The figures after one more pair; ``distance``: see `GossipStep.disagreement`."""
        if distance is None:
            return {}
        self._last.append(distance)
        squares = [one * one for one in self._last]
        return {REPLICA_DISTANCE: distance, REPLICA_VARIANCE: sum(squares) / (2 * len(squares))}
