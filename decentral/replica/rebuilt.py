"""Changes of a method that sends none: each peer makes them of what contributors said. See `OuterMethod.rebuilt`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from decentral.optimizers import Channel, Contributor, OuterMethod
from decentral.optimizers.base import Layout, numel_of
from decentral.replica.method_output import called
from decentral.replica.received.combining import combined
from decentral.replica.rule_output import Unusable
from decentral.tensors.ops import float32

# Shape suffix: N = elements of one fragment, flat float32.

__all__ = ["rebuilt"]


def rebuilt(
    method: OuterMethod, told: Sequence[Contributor], layout: Layout, weights: Sequence[float], channel: Channel
) -> dict[str, Tensor]:
    """What came, by the name of the channel: a mean by ``weights``. Raises Unusable where the method gave no change."""
    pairs = zip(told, weights, strict=True)
    adders = [(one.peer, partial(_add, method, one, layout), weight) for one, weight in pairs]
    return combined([(channel, adders)], numel_of(layout))


def _add(method: OuterMethod, told: Contributor, layout: Layout, total_N: Tensor, weight: float) -> None:
    made_N, why = called("rebuilt", lambda: method.rebuilt(told, layout))
    if made_N is None or why:
        raise Unusable(f"{method.name}: {why or 'rebuilt gave nothing'}")
    if (made_N.shape, made_N.dtype) != (total_N.shape, total_N.dtype):
        raise Unusable(f"{method.name}: rebuilt gave {made_N.dtype} {tuple(made_N.shape)}, want {tuple(total_N.shape)}")
    total_N += made_N * float32(weight)
