"""A shuffled order of any length without a list of it: the same on every machine, whatever its version of torch.

An index is written in two digits, one of which is moved by a hash of the other, six times in turn; a result beyond the
length goes through again. Every index comes once, and no peer has to hold eight bytes for each.

Source: Feistel networks as in Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

_ROUNDS = 6
_MASK = 2**64 - 1


@dataclass(frozen=True, slots=True)
class Shuffle:
    """A permutation of ``range(length)`` that follows from ``seed``, any 64 bits."""

    length: int
    seed: int

    def __getitem__(self, place: int) -> int:
        """The index at ``place``, 0 <= place < length; about 5 microseconds."""
        high = math.isqrt(self.length - 1) + 1
        low = -(-self.length // high)
        while True:
            one, other = divmod(place, low)
            for round_ in range(0, _ROUNDS, 2):
                one = (one + _hash(self.seed, round_, other)) % high
                other = (other + _hash(self.seed, round_ + 1, one)) % low
            place = one * low + other
            if place < self.length:  # beyond it are at most ``high`` places: rarely a second time
                return place


def _hash(seed: int, round_: int, digit: int) -> int:
    """The finalizer of splitmix64 (Steele, Lea and Flood, 2014) over all three."""
    mixed = (seed + (round_ + 1) * 0x9E3779B97F4A7C15 + digit * 0xD1B54A32D192ED03) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return mixed ^ (mixed >> 31)
