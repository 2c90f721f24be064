"""The median of each coordinate, for dense contributions.

g_k = median over i of x_ik ;  the mean of the middle two where they are even in number

It counts heads, not weights. Sparse contributions have zeros nearly everywhere, so that their median is zero: refused.

Source: Yin et al., "Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates", 2018, arXiv:1803.01498.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from decentral.optimizers.aggregation.coordinates import by_slabs, middle
from decentral.optimizers.aggregation.rule import Aggregation, Needs

__all__ = ["Median"]


@dataclass(frozen=True, slots=True)
class Median(Aggregation):
    """The middle of each coordinate."""

    name: ClassVar[str] = "median"
    equation: ClassVar[str] = "g_k = median of x_ik"
    source: ClassVar[str] = 'Yin et al., "Byzantine-Robust Distributed Learning", 2018, arXiv:1803.01498'

    @property
    def needs(self) -> Needs:
        """Every value of everybody."""
        return "rows"

    def combine(self, row_KN: Tensor) -> Tensor:
        """Sorted, and the middle taken."""
        return by_slabs(row_KN, lambda slab_KS: middle(slab_KS.sort(dim=0).values))
