"""MuLoCo: DiLoCo whose inner optimizer is Muon, with an outer rate and momentum that rise with the number of peers.

g = mean(anchor - local) ;  m <- mu*m + g ;  x <- x - lr*(g + mu*m)      (lr, mu) = (0.7, 0.6) of 1 peer, (0.9, 0.8) of
8, (1.0, 0.9) of 16; between them the nearest, by ratio, and 16's beyond

Muon's steps have singular values of one size, so that what peers learn differs less, and bears few bits: with the debt
kept at 0.9 (``ef(beta=0.9)``) its authors find 4 bits as good as 32, and 2 bits of it better than DiLoCo in float32.
The outer step is DiLoCo's; the method is the pair, and `decentral.training.inner` has Muon.

What differs from the paper. Those who contributed count, not those who are members, and the rate may change from one
round to the next as they come and go; its runs have the same workers throughout. Its 4 and 2 bits are levels by row, or
of the values' statistics; here int4 by block. Its Muon uses one rate of 0.044 for all parameters and scales it by
sqrt(rows / columns); here the scale is AdamW's, so that the usual ``learning_rate`` fits. Its decay follows
1 / (steps * K); here it is as the manifest has it.

Source: Thérien et al., "MuLoCo: Muon is a Practical Inner Optimizer for DiLoCo", 2025, arXiv:2505.23725: H 30, Muon's
momentum 0.9 without Nesterov, AdamW's betas 0.9 and 0.99 beside it, error feedback 0.9.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from decentral.errors import ConfigError
from decentral.optimizers.base import OuterMethod, Preset, RoundInfo, State, key, rate
from decentral.optimizers.steps import nesterov

__all__ = ["MuLoCo", "outer_settings"]


@dataclass(frozen=True, slots=True)
class MuLoCo(OuterMethod):
    """Outer SGD with Nesterov momentum; state {"momentum": (N,)}."""

    name: ClassVar[str] = "muloco"
    equation: ClassVar[str] = "m <- mu*m + g ; x <- x - lr*(g + mu*m) ; lr, mu by the number of peers"
    source: ClassVar[str] = 'Thérien et al., "MuLoCo", 2025, arXiv:2505.23725'
    preset: ClassVar[Preset] = Preset(
        compressor="int4(block=256)",
        feedback="ef(beta=0.9)",
        exchange="reduce",
        inner={"optimizer": "muon", "steps": 30, "momentum": 0.9, "beta1": 0.9, "beta2": 0.99},
        demo={"inner": {"beta2": 0.95}},  # some hundred steps are too few for 0.99
    )
    lr: float | None = rate(None)  # unset: it follows the number of contributors
    momentum: float | None = key(
        None, "of the outer step; unset: by the number of contributors", example=0.8, within="[0, 1)"
    )

    def init(self, anchor: Tensor) -> dict[str, Tensor]:
        """No momentum yet."""
        return {"momentum": torch.zeros_like(anchor)}

    def outer_step(
        self, anchor: Tensor, received: State, state: State, info: RoundInfo
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Make a Nesterov step."""
        lr, momentum = outer_settings(len(info.contributors))
        lr = lr if self.lr is None else self.lr
        momentum = momentum if self.momentum is None else self.momentum
        after, buffer = nesterov(anchor, received["change"], state["momentum"], lr, momentum)
        return after, {"momentum": buffer}


def outer_settings(num_peers: int) -> tuple[float, float]:
    """(lr, mu) for a number of peers: of the nearest of 1, 8 and 16, by ratio."""
    if num_peers < 1:
        raise ConfigError(f"outer_settings({num_peers}): a run has at least 1 peer")
    return (0.7, 0.6) if num_peers < 3 else (0.9, 0.8) if num_peers < 12 else (1.0, 0.9)
