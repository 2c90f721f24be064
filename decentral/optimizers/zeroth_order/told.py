"""What a peer says of its derivatives, in the summary of an offer: along which directions, and a byte for each.

Layout, little-endian: seed uint64, number uint32 of the first direction, then one byte for each, of directions whose
numbers follow one another: 52 at most, for a summary has 64 bytes. Any bytes are read: those too few say nothing.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import torch
from torch import Tensor

from decentral.optimizers.base import MAX_SUMMARY_NBYTES
from decentral.optimizers.live import Layout
from decentral.optimizers.zeroth_order.directions import MOST_NUMBER, Direction
from decentral.optimizers.zeroth_order.levels import level_of

__all__ = ["MOST", "ToldDerivatives"]

# Shape suffix: N = values of a fragment, flat float32.

_HEAD = struct.Struct("<QI")
MOST = MAX_SUMMARY_NBYTES - _HEAD.size


@dataclass(frozen=True, slots=True)
class ToldDerivatives:
    """Derivatives of one peer, one after the other."""

    seed: int = 0
    first: int = 0
    levels: bytes = b""

    @classmethod
    def read(cls, summary: bytes) -> ToldDerivatives:
        """Nothing where the bytes are too few."""
        if len(summary) < _HEAD.size:
            return cls()
        seed, first = _HEAD.unpack_from(summary)
        return cls(seed, first, summary[_HEAD.size :])

    def newest(self, most: int) -> ToldDerivatives:
        """The last ``most`` of them."""
        cut = max(0, len(self.levels) - most)
        return ToldDerivatives(self.seed, self.first + cut & MOST_NUMBER, self.levels[cut:])

    def written(self) -> bytes:
        """As ``read`` wants it."""
        return _HEAD.pack(self.seed, self.first) + self.levels if self.levels else b""

    def gradient(self, layout: Layout) -> Tensor:
        """The sum of what each says: level * direction (N,). In this order, by sums alone: alike on every peer."""
        parts = [torch.zeros(0)]
        for name, shape in layout.items():
            total_N = torch.zeros(shape).flatten()
            for place, byte in enumerate(self.levels):
                if level := level_of(byte):
                    direction = Direction(self.seed, self.first + place)
                    total_N += direction.of(name, len(total_N)).mul_(level)
            parts.append(total_N)
        return torch.cat(parts)
