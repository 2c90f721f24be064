"""A little is enough (ALIE): off the honest mean by a few standard deviations in every coordinate, within the crowd.

x = mean(x_i) - z * std(x_i) ;  std with K - 1

What differs from the source. There z is the largest that a majority of peers hides: 0.18 for 3 of 10. Here it is
ByzFL's 1.5 (González et al., 2025, arXiv:2505.24802), which adds where the paper subtracts: that is z = -1.5.
`optimised` tries many z on both sides.

Source: Baruch, Baruch, Goldberg, "A Little Is Enough: Circumventing Defenses For Distributed Learning", 2019,
arXiv:1902.06156.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from decentral.errors import ConfigError
from decentral.lab.attacks.attack import Attack, Rule, alike
from decentral.optimizers.base import key

__all__ = ["ALIE", "shift"]


@dataclass(frozen=True, slots=True)
class ALIE(Attack):
    """A shift that hides in the honest spread."""

    name: ClassVar[str] = "alie"
    equation: ClassVar[str] = "x = mean(x_i) - z * std(x_i)"
    source: ClassVar[str] = 'Baruch, Baruch, Goldberg, "A Little Is Enough", 2019, arXiv:1902.06156'
    z: float = key(1.5, "standard deviations off the mean; below 0: to the other side")

    def __post_init__(self) -> None:
        if not math.isfinite(self.z):
            raise ConfigError(f"{self}: want a finite number of standard deviations; 1.5 is usual")

    def changes(self, honest_KN: Tensor, num_hostile: int, rule: Rule, generator: torch.Generator) -> Tensor:
        """All the same."""
        mean_N, spread_N = shift(honest_KN)
        return alike(mean_N + spread_N * self.z, num_hostile)


def shift(honest_KN: Tensor) -> tuple[Tensor, Tensor]:
    """The honest mean (N,), and what is added to it per z (N,): nothing where one honest peer alone shows no spread."""
    mean_N = honest_KN.mean(0)
    return mean_N, -honest_KN.std(0) if len(honest_KN) > 1 else torch.zeros_like(mean_N)
