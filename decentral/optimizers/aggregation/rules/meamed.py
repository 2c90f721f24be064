"""The mean of the n - f values nearest to the median of each coordinate, for dense contributions.

g_k = mean of the n - f values x_ik nearest to their median ;  of equally near ones the smaller

It counts heads, not weights. Needs n >= 2f + 1.

Source: Xie, Koyejo, Gupta, "Generalized Byzantine-tolerant SGD", 2018, arXiv:1802.10116.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from decentral.optimizers.aggregation.coordinates import by_slabs, mean_in_order, middle
from decentral.optimizers.aggregation.rule import Aggregation, Needs, check_f
from decentral.optimizers.base import key

__all__ = ["Meamed"]


@dataclass(frozen=True, slots=True)
class Meamed(Aggregation):
    """The mean around each coordinate's median."""

    name: ClassVar[str] = "meamed"
    equation: ClassVar[str] = "g_k = mean of the n-f values x_ik nearest to their median"
    source: ClassVar[str] = 'Xie, Koyejo, Gupta, "Generalized Byzantine-tolerant SGD", 2018, arXiv:1802.10116'
    f: int = key(1, "values that are left out of each coordinate")

    def __post_init__(self) -> None:
        check_f(self, self.f)

    @property
    def needs(self) -> Needs:
        """Every value of everybody."""
        return "rows"

    @property
    def least(self) -> int:
        """So that most of what is left may be honest."""
        return 2 * self.f + 1

    def combine(self, row_KN: Tensor) -> Tensor:
        """Sorted by value, then by distance from the middle, the near ones averaged from the nearest on."""
        return by_slabs(row_KN, self._of_slab)

    def _of_slab(self, slab_KS: Tensor) -> Tensor:
        rising_KS = slab_KS.sort(dim=0).values
        order_KS = (rising_KS - middle(rising_KS)).abs().sort(dim=0, stable=True).indices
        return mean_in_order(rising_KS.gather(0, order_KS[: len(slab_KS) - self.f]))
