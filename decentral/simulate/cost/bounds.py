"""How long the frames of a round take at least, on lines of these rates.

Source: the lower bounds of gather and reduce are those of Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms
for clusters of workstations", 2009, with a rate of its own for each direction of each peer.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

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
