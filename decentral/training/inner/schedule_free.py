"""Schedule-Free AdamW: the average of all iterates in place of a learning rate that falls.

d = g / (sqrt(v_hat) + eps) + wd*y ;  z <- z - lr*d ;  x <- (1-c)*x + c*z ;  y = s*x + (1-s)*z
c = w / sum(w), w = max(lr)**2

v is Adam's second moment with its bias corrected, g the gradient at y, and s takes the place of Adam's beta1. During a
warm-up w grows with the rate, so that first iterates count little. Decay is taken at y, as in the authors' package.

Source: Defazio et al., "The Road Less Scheduled", 2024, arXiv:2405.15682; s 0.9, beta2 0.999 in its package.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim.optimizer import ParamsT

from decentral.training.inner.averaging import Averaging
from decentral.training.inner.per_parameter import Group

__all__ = ["ScheduleFree"]


class ScheduleFree(Averaging):
    """State of a parameter: step, z, exp_avg_sq (v); of a group: the sum of w, and the largest rate."""

    def __init__(
        self,
        params: ParamsT,
        lr: float = 2.5e-3,
        beta2: float = 0.999,
        mixing: float = 0.9,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        own = {"lr": lr, "betas": (0.0, beta2), "mixing": mixing, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**own, "lr_max": 0.0, "weight_sum": 0.0, "fresh": 0.0})

    def begin(self, group: Group) -> None:
        """What z adds to x in this step."""
        super().begin(group)
        group["lr_max"] = max(group["lr_max"], group["lr"])
        weight = group["lr_max"] ** 2
        group["weight_sum"] += weight
        group["fresh"] = weight / group["weight_sum"] if group["weight_sum"] else 0.0

    def update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: Group) -> None:
        """See the module."""
        self._begun(state, parameter, ("exp_avg_sq",))
        beta2 = group["betas"][1]
        state["step"] += 1
        state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        size = (state["exp_avg_sq"] / (1 - beta2 ** state["step"])).sqrt_().add_(group["eps"])
        direction = (gradient / size).add_(parameter, alpha=group["weight_decay"])
        self._advance(parameter, state["z"], direction, group["fresh"], group)
