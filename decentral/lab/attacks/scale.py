"""Scale: the right direction, far too long, as from a learning rate that is wrong by as much.

x = factor * mean(x_i)

What differs from the source. There the direction is that of a model of the attacker's own, scaled so that it takes the
mean's place; here it is the honest one: the harm is in the length alone, and what finds wrong directions sees none.

Source: Bagdasaryan et al., "How To Backdoor Federated Learning", 2020, arXiv:1807.00459.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from decentral.errors import ConfigError
from decentral.lab.attacks.attack import Attack, Rule, alike
from decentral.optimizers.base import key

__all__ = ["Scale"]


@dataclass(frozen=True, slots=True)
class Scale(Attack):
    """The honest direction, many times."""

    name: ClassVar[str] = "scale"
    equation: ClassVar[str] = "x = factor * mean(x_i)"
    source: ClassVar[str] = 'Bagdasaryan et al., "How To Backdoor Federated Learning", 2020, arXiv:1807.00459'
    factor: float = key(10.0, "how many times the honest mean")

    def __post_init__(self) -> None:
        if not (self.factor > 0 and math.isfinite(self.factor)):
            raise ConfigError(f"{self}: want a factor above 0, 10 or 100 for instance; ipm is the other way")

    def changes(self, honest_KN: Tensor, num_hostile: int, rule: Rule, generator: torch.Generator) -> Tensor:
        """All the same."""
        return alike(honest_KN.mean(0) * self.factor, num_hostile)
