"""A few coordinates of each fragment, looked at for all: which of them anybody has sent yet, how large is what is owed.

One random place in each of S equal ranges, the same on every peer: of 16,384 a share is off by 0.4 % at most and a norm
of Gaussian values by 0.6 % (one standard deviation). All of a fragment that is no larger. A pass over every coordinate
would be a sizeable part of the outer step.
"""
# Shape suffixes: N = elements of one fragment, S = those of the sample, K = contributions; flat float32.

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from decentral.tensors.devices.transfer import beside

__all__ = ["MOST", "Coverage", "Sample"]

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

    def ratio(self, one_N: Tensor, other_N: Tensor) -> float | None:
        """The norm of one over that of the other; None where that is no finite number."""
        below, above = self.norm(other_N), self.norm(one_N)
        found = above / below if 0 < below < math.inf else math.inf
        return found if math.isfinite(found) else None

    def norm(self, value_N: Tensor) -> float:
        """Of the sample alone: for ratios of two."""
        return float(torch.linalg.vector_norm(self.of(value_N), dtype=torch.float64))


class Coverage:
    """Which coordinates anybody has sent since this process looks, by the sample of each fragment."""

    def __init__(self, sizes: Sequence[int]) -> None:
        """``sizes``: elements of each fragment."""
        self.samples = [Sample(numel) for numel in sizes]
        self._came = [torch.zeros(sample.size, dtype=torch.bool) for sample in self.samples]
        self._rounds = [0] * len(self.samples)

    def add(self, fragment: int, *changes: Tensor) -> None:
        """What came in one round: each (N,), such as a mean, where only what nobody sent is zero; or rows (K, N)."""
        self._rounds[fragment] += 1
        for change in changes:
            came = self.samples[fragment].of(change) != 0
            self._came[fragment] |= came if came.dim() == 1 else came.any(0)

    @property
    def rounds(self) -> int:
        """How many were looked at, of each fragment at least."""
        return min(self._rounds, default=0)

    @property
    def never_sent(self) -> float | None:
        """The share of all coordinates that never came; None while nothing was looked at."""
        if not any(self._rounds):
            return None
        numel = sum(sample.numel for sample in self.samples)
        pairs = zip(self.samples, self._came, strict=True)
        missing = sum(
            sample.numel * (1.0 - float(came_S.sum()) / sample.size) for sample, came_S in pairs if sample.size
        )
        return missing / numel if numel else None


def _places(numel: int, count: int) -> Tensor:
    """Rising places, one in each of ``count`` ranges that differ in length by one at most."""
    bound = torch.arange(count + 1) * numel // count
    within = torch.rand(count, generator=torch.Generator().manual_seed(_SEED), dtype=torch.float64)
    return bound[:-1] + (within * bound.diff()).long()
