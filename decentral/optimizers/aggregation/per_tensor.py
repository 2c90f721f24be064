"""A fragment's tensors one by one, for rules that look at the length and the direction of each.

All is elementwise float32 with lengths of `norm`: the same bits on every peer.
"""

from collections.abc import Iterator, Sequence
from math import prod

import torch
from torch import Tensor

from decentral.optimizers.aggregation.gram import Dense, inner
from decentral.optimizers.aggregation.norm_clip import norm
from decentral.optimizers.base import RoundInfo
from decentral.tensors.ops import float32

__all__ = ["cosine", "direction", "factor", "ranges", "weighted_sum"]

_SMALLEST = 1e-30  # a length below it counts as none: the inverse of one that is smaller yet is beyond float32
_LARGEST = 1e38  # what a vector of length 1 may be multiplied by: lengths of float32 vectors may be beyond float32

# Shape suffix: N = elements of one tensor, flat.


def ranges(info: RoundInfo, numel: int) -> Iterator[tuple[str, slice]]:
    """Name and place of each tensor in the flat vector; all of it, without a name, where a round tells no shapes."""
    start = 0
    for n, shape in enumerate(info.shapes or ((numel,),)):
        stop = start + prod(shape)
        yield info.names[n] if n < len(info.names) else "", slice(start, stop)
        start = stop


def direction(value_N: Tensor) -> tuple[Tensor, float]:
    """A vector divided by its length, and the length; zeros where that is next to nothing."""
    length = norm(value_N)
    return value_N * (float32(1.0 / length) if length > _SMALLEST else 0.0), length


def factor(value: float) -> float:
    """What to multiply a vector of length 1 by, in float32; a peer that sends values near 1e38 ends no step."""
    return float32(max(-_LARGEST, min(value, _LARGEST)))


def cosine(one_N: Tensor, other_N: Tensor) -> float:
    """Of two vectors that are not zero; exactly 0 where one is zero wherever the other is not.

    The same bits on every peer, see `inner`.
    """
    product = inner(Dense(one_N.detach().numpy()), Dense(other_N.detach().numpy()))
    return product / (norm(one_N) * norm(other_N))


def weighted_sum(values: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Products and sums apart, in the order given; weights are rounded to float32."""
    total_N = torch.zeros_like(values[0])
    for value_N, weight in zip(values, weights, strict=True):
        total_N += value_N * float32(weight)
    return total_N
