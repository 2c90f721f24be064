"""The mean of the n - f contributions that lie closest together: the subset with the least diameter.

g = weighted mean of the subset S of n - f with the least max |x_i - x_j| over S ;  the first of equals

There are n! / (f! (n-f)!) subsets. Above 20,000 of them, as with f = 5 of 21, multi_krum decides instead.
Needs n >= 2f + 1.

Source: Rousseeuw, "Multivariate Estimation with High Breakdown Point", 1985; El Mhamdi et al., "The Hidden
Vulnerability of Distributed Learning in Byzantium", 2018, arXiv:1802.07927.
"""

import math
from dataclasses import dataclass
from itertools import combinations
from typing import ClassVar

from decentral.optimizers.aggregation.rule import Aggregation, check_f, chosen_scales
from decentral.optimizers.aggregation.rules.multi_krum import MultiKrum
from decentral.optimizers.aggregation.sent import Floats, Sent
from decentral.optimizers.base import key

__all__ = ["MDA"]

MOST_SUBSETS = 20_000


@dataclass(frozen=True, slots=True)
class MDA(Aggregation):
    """A mean of those that lie together."""

    name: ClassVar[str] = "mda"
    equation: ClassVar[str] = "g = mean of the n-f with the least largest distance"
    source: ClassVar[str] = 'El Mhamdi et al., "The Hidden Vulnerability", 2018, arXiv:1802.07927'
    f: int = key(1, "contributors that may send anything")

    def __post_init__(self) -> None:
        check_f(self, self.f)

    @property
    def least(self) -> int:
        """So that most of every subset may be honest."""
        return 2 * self.f + 1

    def scales(self, sent: Sent) -> list[float]:
        """Nothing of those outside of the subset."""
        kept = len(sent) - self.f
        if math.comb(len(sent), kept) > MOST_SUBSETS:
            return MultiKrum(f=self.f).weigh(sent)
        return chosen_scales(sent, narrowest(sent.squared_distances_KK(), self.f))


def narrowest(square_KK: Floats, f: int) -> list[int]:
    """Places of the subset without f of them that has the least diameter, of equals the first in lexicographic order.

    The diameter is the widest pair of which neither is left out: pairs are looked at from the widest on.
    """
    square, everybody = square_KK.tolist(), range(len(square_KK))
    pairs = sorted(((square[i][j], i, j) for i, j in combinations(everybody, 2)), reverse=True)
    least, best = math.inf, set[int]()
    for gone in map(set, combinations(everybody, f)):  # so that the first subset comes last
        diameter = next((width for width, i, j in pairs if i not in gone and j not in gone), 0.0)
        if diameter <= least:
            least, best = diameter, gone
    return [place for place in everybody if place not in best]
