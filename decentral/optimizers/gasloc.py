"""GASLoC: an outer step alone, a pull towards a random partner, and momentum on where each would go alone.

p_t = x_t - lr*D_t ;  x_t+1 = p_t - a*Lap(p_t) + mu*(p_t - p_t-1)      p_-1 = x_0 ;  D = anchor - local

One vector crosses, p, where arXiv:2506.10911 sends two. Lap is the Laplacian of this round's matching with the 1/2
that the paper writes before it: for a pair it is p - mean(p), so that a = 1 makes partners meet. Momentum is of p and
not of x: a peer without a partner has it, too. The mean of all replicas moves as DiLoCo's anchor along the mean of D,
whoever met whom; a group of all whose changes are alike is DiLoCo on every replica.

Without training this is the recursion of arXiv:2506.10911, so that replicas stay together for
0 < a < 2*(1 - mu**2), see `check_pull`.

What differs from the paper. Its graph may be any, ours is one partner a round, fresh each time. Its constants were not
to be had: mu 0.5 and a 1.0 are near the best of a sweep over quadratics, for 4 peers and for 16, and lr 0.7, as
there, is the faster early on (experiments/gossip_constants); that is all they stand on. Each keeps its own p exact;
what its partner sees of it is compressed.

Source: Cagnasso, Belilovsky, Oyallon, "Unifying Local Communications and Local Updates for LLM Pretraining", 2026,
arXiv:2606.11081.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from decentral.optimizers.base import OuterMethod, Preset, RoundInfo, State, key, rate
from decentral.optimizers.pair_averaging import Proposing, check_pull, pull_to_mean

__all__ = ["GASLoC"]


@dataclass(frozen=True, slots=True)
class GASLoC(Proposing):
    """The pair step; state {"before": (N,)}: p of the round before, one per replica and never shared."""

    name: ClassVar[str] = "gasloc"
    equation: ClassVar[str] = "p = x - lr*D ; x <- p - pull*(p - mean(p)) + momentum*(p - p_before)"
    source: ClassVar[str] = 'Cagnasso et al., "Unifying Local Communications and Local Updates", 2026, arXiv:2606.11081'
    preset: ClassVar[Preset] = Preset(
        hyper={"learning_rate": 0.7, "momentum": 0.5, "pull": 1.0}, compressor="fp16", exchange="pair"
    )
    lr: float = rate(0.7)
    momentum: float = key(0.5, "of where each replica would go alone; 0 is none", within="[0, 1)")
    pull: float = key(1.0, "towards the pair's mean; below 2 * (1 - momentum**2)")

    def __post_init__(self) -> None:
        OuterMethod.__post_init__(self)
        check_pull(self, "pull", "momentum")

    def init(self, anchor: Tensor) -> dict[str, Tensor]:
        """Before the first step p is where the replica began, so that this step has momentum as Nesterov's has."""
        return {"before": anchor.detach().clone()}

    def outer_step(
        self, anchor: Tensor, received: State, state: State, info: RoundInfo
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The next parameters of this replica, and p."""
        with torch.no_grad():
            p_N = self.proposal(anchor, received["change"], state)
            onward_N = (p_N - state["before"]) * self.momentum
            return p_N - pull_to_mean(received["proposed"], self.pull) + onward_N, {"before": p_N}
