"""A flat tensor, whole or in pieces, as rows of a constant width, for loops that are vector instructions then and crawl
otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["WIDTH", "rows_of", "sum_of_lanes"]

WIDTH = 1024  # a row of float64 is 8 KiB: in the first-level cache, and many vectors long


def sum_of_lanes(lane_L: NDArray[np.float64]) -> float:
    """The sum of WIDTH numbers, in halves: one order of additions on every machine."""
    while lane_L.size > 1:
        half = lane_L.size // 2
        lane_L = lane_L[:half] + lane_L[half:]
    return float(lane_L[0])


def rows_of(pieces: Iterable[Tensor]) -> Iterator[NDArray[np.float32]]:
    """The rows (R, WIDTH) of float32 tensors on the processor, one behind the other; the last is filled up with zeros.

    Whole rows of a piece are not copied. To be used before the next are asked for: a row that several pieces share is
    overwritten.
    """
    shared_L, filled = np.zeros((1, WIDTH), dtype=np.float32), 0
    for piece in pieces:
        flat_N = piece.detach().contiguous().reshape(-1).numpy()
        if filled:
            taken = min(WIDTH - filled, flat_N.size)
            shared_L[0, filled : filled + taken] = flat_N[:taken]
            filled, flat_N = filled + taken, flat_N[taken:]
            if filled < WIDTH:
                continue
            yield shared_L
        whole = flat_N.size // WIDTH * WIDTH
        yield flat_N[:whole].reshape(-1, WIDTH)
        filled = flat_N.size - whole
        shared_L[0, :filled] = flat_N[whole:]
    if filled:
        shared_L[0, filled:] = 0.0
        yield shared_L
