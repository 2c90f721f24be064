"""Sign flip: the mean of the honest changes, the other way.

x = -mean(x_i)

Source: Li et al., "RSA: Byzantine-Robust Stochastic Aggregation Methods for Distributed Learning from Heterogeneous
Datasets", 2019, arXiv:1811.03761; of the mean, and not of each peer's own change, as ByzFL has it (González et al.,
"ByzFL: Research Framework for Robust Federated Learning", 2025, arXiv:2505.24802).
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from decentral.lab.attacks.attack import Attack, Rule, alike

__all__ = ["SignFlip"]


@dataclass(frozen=True, slots=True)
class SignFlip(Attack):
    """The wrong direction, at the usual length."""

    name: ClassVar[str] = "sign_flip"
    equation: ClassVar[str] = "x = -mean(x_i)"
    source: ClassVar[str] = 'Li et al., "RSA", 2019, arXiv:1811.03761'

    def changes(self, honest_KN: Tensor, num_hostile: int, rule: Rule, generator: torch.Generator) -> Tensor:
        """All the same."""
        return alike(-honest_KN.mean(0), num_hostile)
