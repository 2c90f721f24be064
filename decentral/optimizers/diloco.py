"""DiLoCo: Nesterov momentum on the averaged pseudo-gradient.

g = mean(anchor - local) ;  m <- mu*m + g ;  x <- x - lr*(g + mu*m)

The first step moves lr*(1+mu)*g, a constant g ends at lr/(1-mu)*g per step: 1.33 and 7 for (0.7, 0.9).
``lr=1, momentum=0`` is plain averaging (local SGD). With ``restart`` = R, m begins again at 0 in every R-th outer step:
progress stays, and momentum that would carry it past the optimum is dropped; reported to widen what (lr, mu) is stable.

What differs from the paper. The mean is over those who contributed to the round, with equal weights or by tokens
(`contribution_weights`), where the paper weighs by shard size when shards differ; the preset sends int8 and not
float32 and clips whole norms to the median of the peers', and an unset lr follows the number of contributors
(`outer_learning_rate`), where the paper has 0.7 for any. A peer that a commit leaves out carries its progress on to the
new anchor (`merge`); in the paper's ablation of dropped uploads it goes on from its own parameters.

Source: Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", 2023,
arXiv:2311.08105, whose outer lr is 0.7; by number of peers as in Charles et al., "Communication-Efficient Language
Model Training Scales Reliably and Robustly: Scaling Laws for DiLoCo", 2025, arXiv:2503.09799. Restarts: Topollai et
al., "Outer-Momentum Restarting in High-Dimensional Two-Phase Optimization", 2026, arXiv:2605.28585.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from decentral.errors import ConfigError
from decentral.optimizers.base import OuterMethod, Preset, RoundInfo, State, key, rate
from decentral.optimizers.steps import nesterov

__all__ = ["DiLoCo", "outer_learning_rate"]


@dataclass(frozen=True, slots=True)
class DiLoCo(OuterMethod):
    """Outer SGD with Nesterov momentum; state {"momentum": (N,)}."""

    name: ClassVar[str] = "diloco"
    equation: ClassVar[str] = "m <- mu*m + g ; x <- x - lr*(g + mu*m)"
    source: ClassVar[str] = 'Douillard et al., "DiLoCo", 2023, arXiv:2311.08105'
    preset: ClassVar[Preset] = Preset(
        hyper={"momentum": 0.9},
        compressor="int8(block=4096)",
        exchange="reduce",
        norm_clip="median",
    )
    lr: float | None = rate(None)  # unset: it follows the number of contributors
    momentum: float = key(0.9, "of the outer step; 0 is none", within="[0, 1)")
    restart: int = key(0, "outer steps after which the momentum begins again at 0; 0: never", within="[0, inf)")

    def init(self, anchor: Tensor) -> dict[str, Tensor]:
        """Return no momentum yet."""
        return {"momentum": torch.zeros_like(anchor)}

    def outer_step(
        self, anchor: Tensor, received: State, state: State, info: RoundInfo
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Make a Nesterov step."""
        lr = self.lr if self.lr is not None else outer_learning_rate(len(info.contributors))
        restarts = self.restart > 0 and info.step % self.restart == 0
        before = torch.zeros_like(anchor) if restarts else state["momentum"]
        after, buffer = nesterov(anchor, received["change"], before, lr, self.momentum)
        return after, {"momentum": buffer}


def outer_learning_rate(num_peers: int) -> float:
    """The outer lr for a number of peers: 0.4 for 1, 0.6 for 2 to 5, 0.8 from 6 (the nearest of 1, 2, 4, 8).

    Read from a heat-map of arXiv:2503.09799, +-0.2, for models of at least 335M parameters at H = 30 inner steps,
    momentum 0.9 and no clipping outside. The best value grows with H and, from that size on, does not depend on the
    size; smaller models and other H want a value of their own. Measured up to 8 peers, and kept beyond.
    """
    if num_peers < 1:
        raise ConfigError(f"outer_learning_rate({num_peers}): a run has at least 1 peer")
    return 0.4 if num_peers == 1 else 0.6 if num_peers <= 5 else 0.8
