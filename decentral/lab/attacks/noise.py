"""Noise: a random vector of each hostile peer, as long as honest changes typically are, or some times that.

x ~ normal(0, s**2) ;  s = times * median |x_i| / sqrt(N)

What differs from the source. There s is a number, 200 for images, whatever changes are like; ByzFL's default is 1. Here
it follows the honest lengths, so that one key means the same for any model and learning rate.

Source: Blanchard et al., "Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent", 2017,
arXiv:1703.02757.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from decentral.errors import ConfigError
from decentral.lab.attacks.attack import Attack, Rule
from decentral.optimizers.base import key

__all__ = ["GaussianNoise"]


@dataclass(frozen=True, slots=True)
class GaussianNoise(Attack):
    """No direction at all, another one from each."""

    name: ClassVar[str] = "noise"
    equation: ClassVar[str] = "x ~ normal(0, s^2), s = times * median|x_i| / sqrt(N)"
    source: ClassVar[str] = 'Blanchard et al., "Machine Learning with Adversaries", 2017, arXiv:1703.02757'
    times: float = key(1.0, "length, in lengths of the median honest change")

    def __post_init__(self) -> None:
        if not (self.times > 0 and math.isfinite(self.times)):
            raise ConfigError(f"{self}: want times above 0; 1 is as long as an honest change")

    def changes(self, honest_KN: Tensor, num_hostile: int, rule: Rule, generator: torch.Generator) -> Tensor:
        """Drawn anew for each peer and round."""
        numel = honest_KN.shape[1]
        spread = torch.linalg.vector_norm(honest_KN, dim=1).median() * (self.times / math.sqrt(max(1, numel)))
        drawn_FN = torch.randn((num_hostile, numel), generator=generator, dtype=honest_KN.dtype)
        return drawn_FN.mul_(spread)
