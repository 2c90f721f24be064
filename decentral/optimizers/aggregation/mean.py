"""The one place where contributions are averaged: one order, one divisor, float32.

mean = sum(weight * pseudo_gradient) / sum(weight), over the contributors *actually summed*: a peer that is absent, was
dropped or came late is in neither sum, and a sparse contribution counts in full at coordinates it did not send.
The order is that of the peer ids: summing in another order changed 73 % of the elements' bits, and then anchors differ.

Weights are equal, or go by the tokens that contributors say they trained on. Saying is free, so a weight stays within
``OUTLIER`` times the typical one: a lie of 10**18 tokens counts as much as 16 peers and no more.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from decentral.errors import ConfigError, NonFiniteError
from decentral.optimizers.base import Part, within
from decentral.tensors.ops import divide, float32, is_finite

__all__ = ["OUTLIER", "contribution_weights", "in_order", "masked", "mean_of", "mean_pseudo_gradient", "scaled"]

_LARGEST = torch.finfo(torch.float32).max
OUTLIER = 16.0  # times, up or down, that a weight may differ from the typical: one GPU beside a machine of eight

A = TypeVar("A")
Contribution = tuple[bytes, Tensor, float]  # peer id, (N,) float32, weight >= 0
Adder = tuple[bytes, Callable[..., None], float]  # peer id, add(total, weight=...), weight >= 0


def contribution_weights(weighting: str, tokens: Sequence[float]) -> list[float]:
    """One weight per contributor, from the tokens behind each as a record names them: the same bits on every peer.

    ``equal``: all 1. ``tokens``: tokens over their lower median, within [1/16, 16], rounded to float32; all 1 when the
    median is 0, for a training loop that tells no tokens.
    """
    typical = statistics.median_low(tokens) if tokens else 0
    if weighting == "equal" or typical == 0:
        return [1.0] * len(tokens)
    return [float32(min(max(count / typical, 1 / OUTLIER), OUTLIER)) for count in tokens]


def mean_pseudo_gradient(contributions: Sequence[Contribution], scales: Sequence[float] | None = None) -> Tensor:
    """The weighted mean of pseudo-gradients, (N,) float32, the same bits for any order of arrival.

    ``scales``: what each is multiplied by, see ``scaled``; None: 1.

    ConfigError when there is nothing to average; NonFiniteError when a contribution is not finite.
    """
    if len({gradient.shape for _, gradient, _ in contributions}) > 1:
        raise ConfigError("mean_pseudo_gradient: contributions differ in shape; they must be of one fragment")
    if not contributions:
        raise ConfigError("mean_pseudo_gradient: there is nothing to average; pass one tensor per peer")
    total = torch.zeros_like(contributions[0][1], dtype=torch.float32)
    adders: list[Adder] = [(peer, partial(_add, gradient), weight) for peer, gradient, weight in contributions]
    return mean_of(total, scaled(adders, scales))


def mean_of(total: Tensor, adders: Sequence[Adder]) -> Tensor:
    """The same mean, of contributions that add themselves, weighted, to ``total``, which starts at zero.

    Sparse contributions need no dense copy each. ``total`` is used up.

    Where the sum is beyond float32 the mean is not: it is made again of weights that are a power of two smaller, and
    add up to a half at most. Every part of a reduce, and a gather of the same contributions, get what they would get.
    """
    ordered, divisor = in_order(adders)
    if divide(_sum(total, ordered, 1.0), divisor):
        return total
    smaller = 2.0 ** -(math.frexp(divisor)[1] + 1)
    if not is_finite(_sum(total.zero_(), ordered, smaller)):
        raise NonFiniteError(
            f"mean_pseudo_gradient: one of {len(ordered)} contributions is not finite; drop it and its contributor"
        )
    divide(total, divisor * smaller)
    return total.clamp_(-_LARGEST, _LARGEST)  # no mean is larger than all that it is of


def _sum(total: Tensor, ordered: Sequence[Adder], times: float) -> Tensor:
    with torch.no_grad():
        for _, add, weight in ordered:
            add(total, weight=weight * times)
    return total


def scaled(adders: Sequence[Adder], scales: Sequence[float] | None) -> list[Adder]:
    """The same contributors, each adding ``scale`` times as much; the divisor counts them in full, as it does absent
    coordinates: a shortened contribution moves the anchor less, and lengthens nobody else's.
    """
    if scales is None:
        return list(adders)
    return [
        (peer, add if scale == 1.0 else partial(_add_scaled, add, scale), weight)
        for (peer, add, weight), scale in zip(adders, scales, strict=True)
    ]


def masked(adders: Sequence[Adder], outside: Sequence[Part]) -> list[Adder]:
    """The same contributors, each adding nothing where it is ``outside`` of what it has a say in; (): all have it."""
    if not any(outside):
        return list(adders)
    return [
        (peer, partial(within, add, part) if part else add, weight)
        for (peer, add, weight), part in zip(adders, outside, strict=True)
    ]


def _add_scaled(add: Callable[..., None], scale: float, total: Tensor, weight: float) -> None:
    add(total, weight=float32(weight * scale))  # two float32 make an exact float64: rounded once


def _add(gradient: Tensor, total: Tensor, weight: float) -> None:
    total += gradient.to(torch.float32) * weight


def in_order(adders: Sequence[tuple[bytes, A, float]]) -> tuple[list[tuple[bytes, A, float]], float]:
    """The contributors by their ids, as they are summed, and what their sum is divided by."""
    ordered = sorted(adders, key=lambda adder: adder[0])
    return ordered, _divisor([peer for peer, _, _ in ordered], [weight for _, _, weight in ordered])


def _divisor(peers: Sequence[bytes], weights: Sequence[float]) -> float:
    """The sum of the weights of the contributors that are summed, in their order."""
    if len(set(peers)) != len(peers):
        raise ConfigError("mean_pseudo_gradient: a peer contributed twice; pass one tensor per peer")
    divisor = math.fsum(weights)
    if not (divisor > 0 and math.isfinite(divisor) and min(weights) >= 0):
        raise ConfigError(f"mean_pseudo_gradient: weights {weights}; want them >= 0, with a positive, finite sum")
    return divisor
