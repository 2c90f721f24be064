"""GPA, generalised primal averaging: the inner steps of AdamW and a smooth average of them, as DiLoCo's of one peer.

y = s*x + (1-s)*z ;  z <- (1-lr*wd)*z - lr*Adam(grad(y)) ;  x <- a*x + (1-a)*z

s = 0.7; a = 0.9**(1/H) is what DiLoCo of one peer with H inner steps does, 0.9967 for 32. It sends nothing and has no
second loop, so it is the fair baseline of a peer that trains alone; plain AdamW is a weaker one.

What differs from the authors' code. There decay shrinks z after y was made of it, so that the x which y implies moves
by (1-s)/s of what z lost, away from zero. Here x, y and z obey the equations above, with decay as without.

Source: Defazio et al., "Smoothing DiLoCo with Primal Averaging for Faster Training of LLMs", 2025, arXiv:2512.17131.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim.optimizer import ParamsT

from decentral.errors import ConfigError
from decentral.training.inner.averaging import Averaging
from decentral.training.inner.per_parameter import Group

__all__ = ["GPA"]


class GPA(Averaging):
    """State of a parameter: step, z, exp_avg, exp_avg_sq."""

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        mixing: float = 0.7,
        averaging: float = 0.9967,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        if not 0 <= averaging < 1:
            raise ConfigError(f"GPA(averaging={averaging}): what x keeps in a step must be in [0, 1); 0.9967 is usual")
        own = {"mixing": mixing, "averaging": averaging, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {"lr": lr, "betas": betas, **own})

    def update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: Group) -> None:
        """See the module."""
        self._begun(state, parameter, ("exp_avg", "exp_avg_sq"))
        (b1, b2), z = group["betas"], state["z"]
        state["step"] += 1
        state["exp_avg"].lerp_(gradient, 1 - b1)
        state["exp_avg_sq"].mul_(b2).addcmul_(gradient, gradient, value=1 - b2)
        size = (state["exp_avg_sq"] / (1 - b2 ** state["step"])).sqrt_().add_(group["eps"])
        direction = (state["exp_avg"] / (1 - b1 ** state["step"])).div_(size)
        shrink = group["lr"] * group["weight_decay"]
        parameter.sub_(z, alpha=shrink * (1 - group["mixing"]))  # y of the z that decay leaves
        z.mul_(1 - shrink)
        self._advance(parameter, z, direction, 1 - group["averaging"], group)
