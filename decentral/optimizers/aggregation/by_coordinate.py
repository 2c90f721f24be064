"""Rules that look at each coordinate by itself, for dense contributions.

They count heads, not weights. Sparse contributions have zeros nearly everywhere, so that their median is zero: refused.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from decentral.optimizers.aggregation.base import Aggregation, Needs, check_f
from decentral.optimizers.base import key
from decentral.tensors.memory import fresh_zeros

__all__ = ["Meamed", "Median", "TrimmedMean", "by_slabs", "mean_in_order", "middle"]

# ---- sorted values, their middle and mean ----
#
# The same bits on every peer.

# Shape suffixes: K = contributors, N = elements of one fragment, S = some of them; float32.

SLAB = 1 << 20  # values of each that are looked at together: sorting needs three times their memory


def by_slabs(row_KN: Tensor, of_slab: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply ``of_slab`` to (K, S) values at a time, over all of them."""
    made_N = fresh_zeros(row_KN.shape[1])
    with torch.no_grad():
        for start in range(0, len(made_N), SLAB):
            made_N[start : start + SLAB] = of_slab(row_KN[:, start : start + SLAB])
    return made_N


def middle(rising_KS: Tensor) -> Tensor:
    """The median (S,) of sorted values; halved before they are added, so that it is finite where they are."""
    half, odd = divmod(len(rising_KS), 2)
    return rising_KS[half] if odd else rising_KS[half - 1] * 0.5 + rising_KS[half] * 0.5


def mean_in_order(value_KS: Tensor) -> Tensor:
    """The mean (S,), added from the first row on: a sum by torch has an order of its own."""
    total_S = value_KS[0].clone()
    for row_S in value_KS[1:]:
        total_S += row_S
    return total_S / torch.full_like(total_S[:1], float(len(value_KS)))


class _ByCoordinate(Aggregation):
    __slots__ = ()

    @property
    def needs(self) -> Needs:
        """Every value of everybody."""
        return "rows"


# ---- the median of each coordinate ----
#
# g_k = median over i of x_ik ;  the mean of the middle two where they are even in number
#
# Source: Yin et al., "Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates", 2018,
# arXiv:1803.01498.


@dataclass(frozen=True, slots=True)
class Median(_ByCoordinate):
    """The middle of each coordinate."""

    name: ClassVar[str] = "median"
    equation: ClassVar[str] = "g_k = median of x_ik"
    source: ClassVar[str] = 'Yin et al., "Byzantine-Robust Distributed Learning", 2018, arXiv:1803.01498'

    def combine(self, row_KN: Tensor) -> Tensor:
        """Sorted, and the middle taken."""
        return by_slabs(row_KN, lambda slab_KS: middle(slab_KS.sort(dim=0).values))


# ---- the trimmed mean ----
#
# g_k = mean of x_ik sorted over i, less the f smallest and the f largest
#
# Needs n >= 2f + 1.
#
# Source: Yin et al., as for the median.


@dataclass(frozen=True, slots=True)
class TrimmedMean(_ByCoordinate):
    """The mean of each coordinate's inner values."""

    name: ClassVar[str] = "trimmed_mean"
    equation: ClassVar[str] = "g_k = mean of x_ik without the f smallest and the f largest"
    source: ClassVar[str] = 'Yin et al., "Byzantine-Robust Distributed Learning", 2018, arXiv:1803.01498'
    f: int = key(1, "values that are cut at each end")

    def __post_init__(self) -> None:
        check_f(self, self.f)

    @property
    def least(self) -> int:
        """So that something is left."""
        return 2 * self.f + 1

    def combine(self, row_KN: Tensor) -> Tensor:
        """Sorted, cut, and the rest averaged from the smallest up."""
        return by_slabs(row_KN, lambda slab_KS: mean_in_order(slab_KS.sort(dim=0).values[self.f : -self.f]))


# ---- the mean around the median ----
#
# g_k = mean of the n - f values x_ik nearest to their median ;  of equally near ones the smaller
#
# Needs n >= 2f + 1.
#
# Source: Xie, Koyejo, Gupta, "Generalized Byzantine-tolerant SGD", 2018, arXiv:1802.10116.


@dataclass(frozen=True, slots=True)
class Meamed(_ByCoordinate):
    """The mean around each coordinate's median."""

    name: ClassVar[str] = "meamed"
    equation: ClassVar[str] = "g_k = mean of the n-f values x_ik nearest to their median"
    source: ClassVar[str] = 'Xie, Koyejo, Gupta, "Generalized Byzantine-tolerant SGD", 2018, arXiv:1802.10116'
    f: int = key(1, "values that are left out of each coordinate")

    def __post_init__(self) -> None:
        check_f(self, self.f)

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
