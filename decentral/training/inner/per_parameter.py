"""What the optimizers of this folder share: one parameter after the other, elementwise, in its own dtype."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from decentral.errors import ConfigError

__all__ = ["Group", "PerParameter"]

Group = dict[str, Any]  # Any: a parameter group of torch's holds numbers, words and parameters


class PerParameter(torch.optim.Optimizer):
    """An optimizer whose step of one parameter depends on no other one."""

    def __init__(self, params: ParamsT, defaults: Group) -> None:
        super().__init__(params, defaults)
        for group in self.param_groups:
            self._check(group)

    def _check(self, group: Group) -> None:
        """ConfigError for numbers that cannot be, or parameters whose small steps would be rounded away."""
        betas, known = group.get("betas", ()), all(0 <= beta < 1 for beta in group.get("betas", ()))
        if not (group["lr"] >= 0 and group["weight_decay"] >= 0 and known):
            raise ConfigError(
                f"{type(self).__name__}(lr={group['lr']}, weight_decay={group['weight_decay']}, betas={betas}): lr and "
                "weight_decay must be 0 or more, betas in [0, 1)"
            )

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]  # overloads
        """One step of every parameter that has a gradient."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            self.begin(group)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.update(parameter, parameter.grad, self.state[parameter], group)
        return loss

    def begin(self, group: Group) -> None:
        """Before the parameters of a group."""

    @abstractmethod
    def update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: Group) -> None:
        """Step one parameter in place; its gradient is left as it is."""
