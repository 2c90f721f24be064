"""The mean of each coordinate without its f smallest and f largest values, for dense contributions.

g_k = mean of x_ik sorted over i, less f at each end

It counts heads, not weights. Needs n >= 2f + 1.

Source: Yin et al., "Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates", 2018, arXiv:1803.01498.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from decentral.optimizers.aggregation.coordinates import by_slabs, mean_in_order
from decentral.optimizers.aggregation.rule import Aggregation, Needs, check_f
from decentral.optimizers.base import key

__all__ = ["TrimmedMean"]


@dataclass(frozen=True, slots=True)
class TrimmedMean(Aggregation):
    """The mean of each coordinate's inner values."""

    name: ClassVar[str] = "trimmed_mean"
    equation: ClassVar[str] = "g_k = mean of x_ik without the f smallest and the f largest"
    source: ClassVar[str] = 'Yin et al., "Byzantine-Robust Distributed Learning", 2018, arXiv:1803.01498'
    f: int = key(1, "values that are cut at each end")

    def __post_init__(self) -> None:
        check_f(self, self.f)

    @property
    def needs(self) -> Needs:
        """Every value of everybody."""
        return "rows"

    @property
    def least(self) -> int:
        """So that something is left."""
        return 2 * self.f + 1

    def combine(self, row_KN: Tensor) -> Tensor:
        """Sorted, cut, and the rest averaged from the smallest up."""
        return by_slabs(row_KN, lambda slab_KS: mean_in_order(slab_KS.sort(dim=0).values[self.f : -self.f]))
