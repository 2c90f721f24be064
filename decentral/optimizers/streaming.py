"""Streaming DiLoCo: DiLoCo's outer step per fragment, merged into the live parameters tau inner steps later.

x_p <- Nesterov(x_p, mean(x_p - local_p)) ;  local_p <- alpha*local_p + (1-alpha)*x_p      (`merge`)

alpha weighs the *local* copy: 0 overwrites it, 1 never listens, 0.5 is the paper's.

Source: Douillard et al., "Streaming DiLoCo with overlapping communication: Towards a Distributed Free Lunch", 2025,
arXiv:2501.18512: outer lr 0.4, momentum 0.9, alpha 0.5, tau 1.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from decentral.errors import ConfigError
from decentral.optimizers.base import check_momentum, check_rate, nesterov

__all__ = ["StreamingDiLoCo"]


@dataclass(frozen=True, slots=True)
class StreamingDiLoCo:
    """Nesterov per fragment; ``alpha`` is what `merge` is to be given. State {"momentum": (N,)}."""

    name: ClassVar[str] = "streaming"
    equation: ClassVar[str] = "m <- mu*m + g ; x <- x - lr*(g + mu*m) ; local <- alpha*local + (1-alpha)*x"
    source: ClassVar[str] = 'Douillard et al., "Streaming DiLoCo", 2025, arXiv:2501.18512'
    lr: float = 0.4
    momentum: float = 0.9
    alpha: float = 0.5

    def __post_init__(self) -> None:
        check_rate(self, self.lr)
        check_momentum(self, self.momentum)
        if not 0 <= self.alpha <= 1:
            raise ConfigError(f"{self}: alpha, the weight of the local copy, must be in [0, 1]; 0.5 is usual")

    def init(self, anchor: Tensor) -> dict[str, Tensor]:
        """No momentum yet."""
        return {"momentum": torch.zeros_like(anchor)}

    def step(
        self, anchor: Tensor, pseudo_gradient: Tensor, state: Mapping[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """One Nesterov step of the fragment's anchor; the live copy is `merge`'s business."""
        after, buffer = nesterov(anchor, pseudo_gradient, state["momentum"], self.lr, self.momentum)
        return after, {"momentum": buffer}
