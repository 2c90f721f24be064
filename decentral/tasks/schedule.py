"""The inner learning rate: a linear warm-up, then constant, because a swarm's run has no known last step."""

from __future__ import annotations

from dataclasses import dataclass

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from decentral.errors import ConfigError


@dataclass(frozen=True, slots=True)
class WarmUp:
    """Factor on the learning rate at an inner step, from 0: (step + 1) / num_steps, at most 1."""

    num_steps: int  # 0: no warm-up

    def __post_init__(self) -> None:
        if self.num_steps < 0:
            raise ConfigError(f"warmup = {self.num_steps}: must be 0 or more inner steps")

    def __call__(self, step: int) -> float:
        """Factor for the inner step that comes after ``step`` others."""
        return min(1.0, (step + 1) / max(1, self.num_steps))


def warm_up(optimizer: Optimizer, num_steps: int) -> LambdaLR:
    """Rise over ``num_steps`` inner steps, then stay. Its state_dict is plain numbers."""
    factor = WarmUp(num_steps)
    return LambdaLR(optimizer, lambda step: factor(step))
