"""What rules by coordinates share: sorted values, their middle, their mean. The same bits on every peer."""
# Shape suffixes: K = contributors, N = elements of one fragment, S = some of them; float32.

from collections.abc import Callable

import torch
from torch import Tensor

from decentral.tensors.memory import fresh_zeros

__all__ = ["by_slabs", "mean_in_order", "middle"]

SLAB = 1 << 20  # values of each that are looked at together: sorting needs three times their memory


def by_slabs(row_KN: Tensor, of_slab: Callable[[Tensor], Tensor]) -> Tensor:
    """What ``of_slab`` makes of (K, S) values, over all of them."""
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
