"""Optimizers that learn an average x: gradients are taken at y, between x and the sequence z that steps are made on.

y = s*x + (1-s)*z

While such an optimizer trains, the parameters hold y; after ``eval()`` they hold x, which is what is evaluated, sent
and kept, and after ``train()`` y again. x itself is not stored: it follows from y and z. It would be lost in the
rounding of bfloat16, so parameters with less than float32 are refused.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from decentral.errors import ConfigError
from decentral.training.inner.per_parameter import Group, PerParameter

__all__ = ["Averaging"]

_WIDE = (torch.float32, torch.float64)


class Averaging(PerParameter):
    """A group has ``mixing``, s above, in (0, 1], and ``train_mode``; a parameter's state ``z`` from its first step."""

    def __init__(self, params: ParamsT, defaults: Group) -> None:
        super().__init__(params, {**defaults, "train_mode": True})  # x = y = z before the first step

    def _check(self, group: Group) -> None:
        super()._check(group)
        if not 0 < group["mixing"] <= 1:
            raise ConfigError(f"{type(self).__name__}(mixing={group['mixing']}): the share of x in y must be in (0, 1]")
        if narrow := {str(p.dtype) for p in group["params"]} - {str(dtype) for dtype in _WIDE}:
            raise ConfigError(
                f"{type(self).__name__}: parameters in {', '.join(sorted(narrow))}: the average would be lost in their "
                "rounding; keep the parameters in float32, and let autocast compute in less"
            )

    @torch.no_grad()
    def eval(self) -> None:
        """Let the parameters hold x."""
        self._switch(to_train=False)

    @torch.no_grad()
    def train(self) -> None:
        """Let the parameters hold y, as a step wants them."""
        self._switch(to_train=True)

    def _switch(self, *, to_train: bool) -> None:
        for group in self.param_groups:
            if group["train_mode"] == to_train:
                continue
            weight = 1 - group["mixing"] if to_train else 1 - 1 / group["mixing"]
            for parameter in group["params"]:
                if "z" in (state := self.state.get(parameter, {})):
                    parameter.lerp_(state["z"], weight)
            group["train_mode"] = to_train

    def begin(self, group: Group) -> None:
        """Refuse a gradient of elsewhere than y."""
        if not group["train_mode"]:
            raise ConfigError(
                f"{type(self).__name__}: a step in eval mode, where the parameters hold the average; call "
                "optimizer.train() after optimizer.eval(), before the next forward pass"
            )

    @staticmethod
    def _advance(parameter: Tensor, z: Tensor, direction: Tensor, fresh: float, group: Group) -> None:
        """z <- z - lr*d ; x <- (1-c)*x + c*z ; y of both, in place and without x: c is ``fresh``, what z adds to x."""
        parameter.lerp_(z, fresh)
        parameter.add_(direction, alpha=group["lr"] * (group["mixing"] * (1 - fresh) - 1))
        z.sub_(direction, alpha=group["lr"])

    @staticmethod
    def _begun(state: dict[str, Any], parameter: Tensor, moments: tuple[str, ...]) -> None:
        if "z" not in state:
            state.update({name: torch.zeros_like(parameter) for name in moments}, step=0, z=parameter.clone())
