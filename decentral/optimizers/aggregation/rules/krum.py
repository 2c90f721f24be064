"""The one contribution that is nearest to its neighbours.

score_i = sum of |x_i - x_j|^2 over the n - f - 2 nearest others ;  g = x_i with the least score, the first of equals

What is sent is one peer's work in a round, the others' is lost: for runs that expect attackers. Needs n >= 2f + 3.

What differs. Squared distances to n - f - 2 others are the paper's; a well-known library takes n - f - 1, another
squares twice, and then other contributions win.

Source: Blanchard et al., "Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent", 2017,
arXiv:1703.02757.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from decentral.optimizers.aggregation.rule import Aggregation, check_f, chosen_scales
from decentral.optimizers.aggregation.sent import Sent, total
from decentral.optimizers.base import key

__all__ = ["Krum", "krum_order"]


@dataclass(frozen=True, slots=True)
class Krum(Aggregation):
    """One contribution, as it was sent."""

    name: ClassVar[str] = "krum"
    equation: ClassVar[str] = "g = x_i with the least sum of |x_i - x_j|^2 over its n-f-2 nearest"
    source: ClassVar[str] = 'Blanchard et al., "Machine Learning with Adversaries", 2017, arXiv:1703.02757'
    f: int = key(1, "contributors that may send anything")

    def __post_init__(self) -> None:
        check_f(self, self.f)

    @property
    def least(self) -> int:
        """As the paper's proof wants."""
        return 2 * self.f + 3

    def scales(self, sent: Sent) -> list[float]:
        """Nothing of all others."""
        return chosen_scales(sent, krum_order(sent, self.f)[:1])


def krum_order(sent: Sent, f: int) -> list[int]:
    """Places by score, the least first; of equals, as a mutually nearest pair may be, the first place."""
    near_KK = np.sort(sent.squared_distances_KK(), axis=1)[:, 1 : len(sent) - f - 1]  # less the 0 with itself
    scores = [total(near_K) for near_K in near_KK]
    return sorted(range(len(sent)), key=lambda place: (scores[place], place))
