"""How a new anchor reaches parameters that trained on while the round was in flight.

carry:  live <- anchor + (live - contributed)          keeps the inner steps made since the contribution
blend:  live <- alpha*live + (1-alpha)*anchor          Streaming DiLoCo; alpha weighs the live copy

Carry is what LOSCAR-SGD does to live parameters with its mask full (2026, arXiv:2605.20866: x <- mean + (z - y), z live
and y as sent), which has a proof of convergence.

Source: blend, Douillard et al., "Streaming DiLoCo", 2025, arXiv:2501.18512 (algorithm 2, line 9). Carry is the delayed
update without its staleness: what was learnt since the contribution is the next round's pseudo-gradient.
"""

import torch
from torch import Tensor

from decentral.errors import ConfigError
from decentral.tensors.ops import carried

__all__ = ["blend", "carry"]


def carry(live: Tensor, contributed: Tensor, anchor: Tensor) -> Tensor:
    """The merged live parameters, a new tensor; all of one shape.

    With no inner step since (live equal to contributed) that is the anchor bit for bit.
    """
    with torch.no_grad():
        return carried(live, contributed, anchor)


def blend(live: Tensor, anchor: Tensor, alpha: float) -> Tensor:
    """The merged live parameters, a new tensor; ``alpha`` 0 gives the anchor, 1 the live copy, bit for bit."""
    if not 0 <= alpha <= 1:
        raise ConfigError(f"blend(alpha={alpha}): the live copy's weight must be in [0, 1]")
    with torch.no_grad():
        if alpha in (0, 1):
            return (live if alpha else anchor).clone()
        return live * alpha + anchor * (1 - alpha)
