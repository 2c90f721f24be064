"""Which coordinates anybody has sent since this process looks, by the sample of each fragment."""
# Shape suffix: S = places of a sample.

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from decentral.replica.received.sample import Sample

__all__ = ["Coverage"]


class Coverage:
    """Of one peer's view."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        """``samples``: of each fragment."""
        self.samples = samples
        self._came = [torch.zeros(sample.size, dtype=torch.bool) for sample in samples]
        self._rounds = [0] * len(samples)

    def add(self, fragment: int, *came: Tensor) -> None:
        """Where in the sample something came in one round, each bool (S,)."""
        self._rounds[fragment] += 1
        for came_S in came:
            self._came[fragment] |= came_S

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
