"""Mimic: all hostile peers send what one honest peer sends, so that its data count F + 1 times.

x = x_victim

Nothing of it is wrong; where peers' data differ, rules that look for a crowd find one. Of sparse frames it is a copy of
one frame, which `Scrutiny` tells as twins.

What differs from the source. There the victim is chosen in the first rounds as the one that stands out most; here, as
in ByzFL (González et al., 2025, arXiv:2505.24802), it is named.

Source: Karimireddy, He, Jaggi, "Byzantine-Robust Learning on Heterogeneous Datasets via Bucketing", 2020,
arXiv:2006.09365.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from decentral.errors import ConfigError
from decentral.lab.attacks.attack import Attack, Rule, alike
from decentral.optimizers.base import key

__all__ = ["Mimic"]


@dataclass(frozen=True, slots=True)
class Mimic(Attack):
    """One honest peer, many times."""

    name: ClassVar[str] = "mimic"
    equation: ClassVar[str] = "x = x_victim"
    source: ClassVar[str] = 'Karimireddy, He, Jaggi, "Bucketing", 2020, arXiv:2006.09365'
    victim: int = key(0, "which honest peer, counted from 0")

    def __post_init__(self) -> None:
        if self.victim < 0:
            raise ConfigError(f"{self}: victim is the place of an honest peer, counted from 0")

    def changes(self, honest_KN: Tensor, num_hostile: int, rule: Rule, generator: torch.Generator) -> Tensor:
        """All the same; of fewer honest peers the last."""
        return alike(honest_KN[min(self.victim, len(honest_KN) - 1)], num_hostile)
