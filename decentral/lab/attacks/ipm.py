"""Inner product manipulation (IPM): against the honest mean, so that the result no longer points downhill.

x = -tau * mean(x_i)

With tau below 1 it is shorter than honest changes and near them, which fools rules that go by distance; with tau above
(K / F) it turns the plain mean around.

Source: Xie, Koyejo, Gupta, "Fall of Empires: Breaking Byzantine-tolerant SGD by Inner Product Manipulation", 2019,
arXiv:1903.03936; tau = 2 as in ByzFL (González et al., 2025, arXiv:2505.24802).
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from decentral.errors import ConfigError
from decentral.lab.attacks.attack import Attack, Rule, alike
from decentral.optimizers.base import key

__all__ = ["IPM", "reversal"]


@dataclass(frozen=True, slots=True)
class IPM(Attack):
    """Uphill, some times the mean."""

    name: ClassVar[str] = "ipm"
    equation: ClassVar[str] = "x = -tau * mean(x_i)"
    source: ClassVar[str] = 'Xie, Koyejo, Gupta, "Fall of Empires", 2019, arXiv:1903.03936'
    tau: float = key(2.0, "how many times the honest mean")

    def __post_init__(self) -> None:
        if not (self.tau > 0 and math.isfinite(self.tau)):
            raise ConfigError(f"{self}: want tau above 0, 0.5 or 2 for instance; scale is the other way")

    def changes(self, honest_KN: Tensor, num_hostile: int, rule: Rule, generator: torch.Generator) -> Tensor:
        """All the same."""
        nothing_N, back_N = reversal(honest_KN)
        return alike(nothing_N + back_N * self.tau, num_hostile)


def reversal(honest_KN: Tensor) -> tuple[Tensor, Tensor]:
    """Nothing (N,), and what is added to it per tau (N,)."""
    mean_N = honest_KN.mean(0)
    return torch.zeros_like(mean_N), -mean_N
