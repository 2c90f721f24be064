"""ADOPT: Adam that divides by the second moment of the gradients before this one, and takes the momentum after that.

n = clip(g / max(sqrt(v), eps), t**(1/4)) ;  m <- b1*m + (1-b1)*n ;  x <- x - lr*(m + wd*x) ;  v <- b2*v + (1-b2)*g*g

The first gradient makes v and moves nothing; t counts from 1 after it. As v does not know the gradient that it divides,
it converges for every b2; Adam does not. The moments are of normalised gradients, n, and so larger than Adam's by far.

Source: Taniguchi et al., "ADOPT: Modified Adam Can Converge with Any beta2 with the Optimal Rate", 2024,
arXiv:2411.02853: betas 0.9 and 0.9999, eps 1e-6, clip at t**(1/4), decay decoupled as an option, which is the way here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from decentral.training.inner.per_parameter import Group, PerParameter

__all__ = ["ADOPT", "advance", "step_along"]


class ADOPT(PerParameter):
    """State of a parameter: step, exp_avg (m), exp_avg_sq (v)."""

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.9999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: Group) -> None:
        """See the module."""
        if advance(gradient, state, group) is not None:
            step_along(parameter, state["exp_avg"], group)


def advance(gradient: Tensor, state: dict[str, Any], group: Group) -> Tensor | None:
    """n of this gradient, with the moments brought up to it; None of the first one, which makes v."""
    if not state:
        state.update(step=1, exp_avg=torch.zeros_like(gradient), exp_avg_sq=gradient.square())
        return None
    b1, b2 = group["betas"]
    clip = state["step"] ** 0.25
    normal: Tensor = (gradient / state["exp_avg_sq"].sqrt().clamp_(min=group["eps"])).clamp_(-clip, clip)
    state["exp_avg"].mul_(b1).add_(normal, alpha=1 - b1)
    state["exp_avg_sq"].mul_(b2).addcmul_(gradient, gradient, value=1 - b2)
    state["step"] += 1
    return normal


def step_along(parameter: Tensor, direction: Tensor, group: Group) -> None:
    """Decay, then the step."""
    parameter.mul_(1 - group["lr"] * group["weight_decay"]).sub_(direction, alpha=group["lr"])
