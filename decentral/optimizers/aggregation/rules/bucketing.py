"""Means of small groups drawn by chance, then another rule decides over the groups.

groups of ``size`` by a draw of the round ;  y_j = weighted mean of group j ;  g = then(y), a group weighs what its
members do

Groups of mixed peers look alike where single peers with different data do not. f contributors may spoil f groups, so
more than 2f groups are needed; where there are fewer, ``then`` decides over the contributions themselves.

What differs from the paper. The draw is by blake2b of the record and the place, so that every peer draws alike and
nobody knows before all have contributed; the last group may be smaller.

Source: Karimireddy, He, Jaggi, "Byzantine-Robust Learning on Heterogeneous Datasets via Bucketing", 2020,
arXiv:2006.09365.
"""

import hashlib
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from decentral.errors import ConfigError
from decentral.optimizers.aggregation.mixing import scales_through
from decentral.optimizers.aggregation.registry import rule_after
from decentral.optimizers.aggregation.rule import MOST_PEERS, Aggregation, check_f
from decentral.optimizers.aggregation.sent import Sent, total
from decentral.optimizers.base import key

__all__ = ["Bucketing"]


@dataclass(frozen=True, slots=True)
class Bucketing(Aggregation):
    """Mix by chance, then ask another rule."""

    name: ClassVar[str] = "bucketing"
    equation: ClassVar[str] = "y_j = mean of a group of size drawn by the round ; g = then(y)"
    source: ClassVar[str] = 'Karimireddy, He, Jaggi, "Bucketing", 2020, arXiv:2006.09365'
    f: int = key(1, "contributors that may send anything")
    size: int = key(2, "contributions in a group")
    then: str = key("rfa", "the rule for the groups: krum, or rfa(iterations=8)")

    def __post_init__(self) -> None:
        check_f(self, self.f)
        if not 1 <= self.size <= MOST_PEERS:
            raise ConfigError(f"{self}: size is of a group, want 1 <= size <= {MOST_PEERS}; 2 is usual")
        rule_after(self.then, self.f)

    def scales(self, sent: Sent) -> list[float]:
        """What each counts through its group."""
        after = rule_after(self.then, self.f)
        groups = drawn(len(sent), self.size, sent.seed)
        if 2 * self.f >= len(groups):
            return after.weigh(sent)
        share_JK = np.stack([sent.mean_shares(group) for group in groups])
        weight_J = np.array([total(sent.weight_K[group]) for group in groups])
        return scales_through(sent, share_JK, weight_J, after)


def drawn(count: int, size: int, seed: bytes) -> list[list[int]]:
    """Places in groups; alike on all who have the seed."""
    lots = [hashlib.blake2b(seed + place.to_bytes(4, "little"), digest_size=16).digest() for place in range(count)]
    order = sorted(range(count), key=lots.__getitem__)
    return [order[start : start + size] for start in range(0, count, size)]
