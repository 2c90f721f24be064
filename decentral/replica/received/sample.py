"""A few coordinates of a fragment, looked at for all: which of them anybody has sent yet, how large is what is owed.

One random place in each of S equal ranges, the same on every peer: of 16,384 a share is off by 0.4 % at most and a norm
of Gaussian values by 0.6 % (one standard deviation). All of a fragment that is no larger. A pass over every coordinate
would be a sizeable part of the outer step.
"""
# Shape suffixes: N = elements of one fragment, S = those of the sample, K = contributions; flat float32.

from __future__ import annotations

import math

import torch
from torch import Tensor

from decentral.tensors.device import beside

__all__ = ["MOST", "Sample", "ratio"]

MOST = 1 << 14  # places of one fragment
_SEED = 1  # any, the same on all peers


class Sample:
    """Of one fragment."""

    def __init__(self, numel: int, most: int = MOST) -> None:
        self.numel, self._place_S = numel, _places(numel, most) if numel > most else None

    @property
    def size(self) -> int:
        """How many coordinates it has."""
        return self.numel if self._place_S is None else len(self._place_S)

    def of(self, value: Tensor) -> Tensor:
        """The sample's values of (N,) or (K, N), no copy where it is all of them."""
        return value if self._place_S is None else value.index_select(-1, beside(self._place_S, value))

    def of_part(self, value: Tensor, start: int) -> Tensor:
        """The sample's values of what lies at ``start`` of the fragment, flat; of parts in order they make up `of`."""
        if self._place_S is None:
            return value
        first, last = torch.searchsorted(self._place_S, torch.tensor([start, start + len(value)])).tolist()
        return value[self._place_S[first:last] - start]

    def came(self, change: Tensor) -> Tensor:
        """Where something was sent, bool (S,), of a change (N,) in which only what nobody sent is zero; or of rows
        (K, N) of each.
        """
        came = self.of(change) != 0
        return came if came.dim() == 1 else came.any(0)

    def norm(self, value_N: Tensor) -> float:
        """Of the sample alone: for ratios of two."""
        return _norm(self.of(value_N))


def ratio(one_S: Tensor, other_S: Tensor) -> float | None:
    """The norm of one sample over that of the other; None where that is no finite number."""
    below, above = _norm(other_S), _norm(one_S)
    found = above / below if 0 < below < math.inf else math.inf
    return found if math.isfinite(found) else None


def _norm(value_S: Tensor) -> float:
    return float(torch.linalg.vector_norm(value_S, dtype=torch.float64))


def _places(numel: int, count: int) -> Tensor:
    """Rising places, one in each of ``count`` ranges that differ in length by one at most."""
    bound = torch.arange(count + 1) * numel // count
    within = torch.rand(count, generator=torch.Generator().manual_seed(_SEED), dtype=torch.float64)
    return bound[:-1] + (within * bound.diff()).long()
