"""SparseLoCo: plain SGD on the average of sparse pseudo-gradients; error feedback takes the place of momentum.

a = beta*e + (anchor - local) ;  send Q(top-k(a)) ;  e <- a - sent ;  x <- x - lr*mean(sent)

Only the last equation is here; the others are `compress_with_debt`. The mean divides by *all* contributors, as the
paper's formula does; its reference code divides each coordinate by those who sent it, a step up to R times larger.

Source: Sarfi et al., "Communication Efficient LLM Pre-training with SparseLoCo", 2025, arXiv:2508.15706; real outer
momentum on top of sparsity hurts there, so there is none.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from decentral.optimizers.base import check_rate

__all__ = ["SparseLoCo"]


@dataclass(frozen=True, slots=True)
class SparseLoCo:
    """Outer SGD without momentum; no state."""

    name: ClassVar[str] = "sparseloco"
    equation: ClassVar[str] = "x <- x - lr*g"
    source: ClassVar[str] = 'Sarfi et al., "SparseLoCo", 2025, arXiv:2508.15706'
    lr: float = 1.0

    def __post_init__(self) -> None:
        check_rate(self, self.lr)

    def init(self, anchor: Tensor) -> dict[str, Tensor]:
        """Nothing to remember."""
        return {}

    def step(
        self, anchor: Tensor, pseudo_gradient: Tensor, state: Mapping[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Subtract lr times the average."""
        with torch.no_grad():
            return anchor - pseudo_gradient * self.lr, {}
