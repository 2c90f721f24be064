"""A flat tensor as whole rows of a constant width, for loops that are vector instructions then and crawl otherwise."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["rows_of"]


def rows_of(value_N: Tensor, width: int) -> Iterator[NDArray[np.float32]]:
    """The whole rows of a flat float32 tensor on the processor, without a copy, then the rest filled up with zeros."""
    flat_N = value_N.detach().contiguous().numpy()
    whole = flat_N.size // width * width
    yield flat_N[:whole].reshape(-1, width)
    if whole < flat_N.size:
        rest = np.zeros((1, width), dtype=np.float32)
        rest[0, : flat_N.size - whole] = flat_N[whole:]
        yield rest
