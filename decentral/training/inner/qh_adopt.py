"""Quasi-hyperbolic ADOPT: a step along a mixture of this gradient and of a momentum so slow that it outlives a round.

n = clip(g / max(sqrt(v), eps), t**(1/4)) ;  u <- b1*u + (1-b1)*n ;  x <- x - lr*((1-w)*n + w*u + wd*x)

v as in ADOPT. w = 1 is ADOPT, w = 0 has no momentum. Between two outer steps u changes little (its half-life is 69
steps at b1 = 0.99, and 693 at 0.999), so its mean over the peers stays worth what it cost (`mt_dao`), while 1-w of the
fresh gradient keeps the step quick.

What differs from the papers. QHAdam mixes the raw gradient and its mean, and divides by sqrt(v) afterwards, v with this
gradient in it; MT-DAO prints that form and trains with ADOPT, whose order, above, this has.

Source: Iacob et al., "MT-DAO: Multi-Timescale Distributed Adaptive Optimizers with Local Updates", 2025,
arXiv:2510.05361: b1 0.99 to 0.999, b2 0.9999, w to be tuned; w = 0.7 as in Ma, Yarats, "Quasi-hyperbolic Momentum and
Adam for Deep Learning", 2018, arXiv:1810.06801.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim.optimizer import ParamsT

from decentral.errors import ConfigError
from decentral.training.inner.adopt import advance, step_along
from decentral.training.inner.per_parameter import Group, PerParameter

__all__ = ["QHADOPT"]


class QHADOPT(PerParameter):
    """State of a parameter: step, exp_avg (u), exp_avg_sq (v)."""

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.99, 0.9999),
        mixing: float = 0.7,
        eps: float = 1e-6,
        weight_decay: float = 0.0,
    ) -> None:
        if not 0 <= mixing <= 1:
            raise ConfigError(f"QHADOPT(mixing={mixing}): mixing, the share of the momentum, must be in [0, 1]")
        super().__init__(params, {"lr": lr, "betas": betas, "mixing": mixing, "eps": eps, "weight_decay": weight_decay})

    def update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: Group) -> None:
        """See the module."""
        if (normal := advance(gradient, state, group)) is not None:
            share = group["mixing"]
            step_along(parameter, normal * (1 - share) + state["exp_avg"] * share, group)
