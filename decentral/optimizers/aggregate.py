"""The one place where contributions are averaged: one order, one divisor, float32.

mean = sum(weight * pseudo_gradient) / sum(weight), over the contributors *actually summed*: a peer that is absent, was
dropped or came late is in neither sum, and a sparse contribution counts in full at coordinates it did not send.
The order is that of the peer ids: summing in another order changed 73 % of the elements' bits, and then anchors differ.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from decentral.errors import ConfigError, NonFiniteError

__all__ = ["mean_pseudo_gradient"]

Contribution = tuple[bytes, Tensor, float]  # peer id, (N,) float32, weight >= 0


def mean_pseudo_gradient(contributions: Sequence[Contribution]) -> Tensor:
    """The weighted mean of pseudo-gradients, (N,) float32, the same bits for any order of arrival.

    ConfigError when there is nothing to average; NonFiniteError when finite contributions sum beyond float32.
    """
    ordered = sorted(contributions, key=lambda contribution: contribution[0])
    divisor = _divisor(ordered)
    with torch.no_grad():
        total = torch.zeros_like(ordered[0][1], dtype=torch.float32)
        for _, gradient, weight in ordered:
            total += gradient.to(torch.float32) * weight
        mean = total / torch.full_like(total[:1], divisor)  # a tensor: CUDA turns /number into *(1/number)
    if mean.numel() and not bool(torch.isfinite(torch.stack(torch.aminmax(mean))).all()):
        raise NonFiniteError(
            f"mean_pseudo_gradient: the sum of {len(ordered)} contributions is not finite; "
            "drop the contributor with values near 1e38"
        )
    return mean


def _divisor(ordered: Sequence[Contribution]) -> float:
    """The sum of the weights of the contributors that are summed, in their order."""
    peers = [peer for peer, _, _ in ordered]
    if len(set(peers)) != len(peers):
        raise ConfigError("mean_pseudo_gradient: a peer contributed twice; pass one tensor per peer")
    if len({gradient.shape for _, gradient, _ in ordered}) > 1:
        raise ConfigError("mean_pseudo_gradient: contributions differ in shape; they must be of one fragment")
    weights = [weight for _, _, weight in ordered]
    divisor = math.fsum(weights)
    if not (divisor > 0 and math.isfinite(divisor) and min(weights) >= 0):
        raise ConfigError(f"mean_pseudo_gradient: weights {weights}; want them >= 0, with a positive, finite sum")
    return divisor
