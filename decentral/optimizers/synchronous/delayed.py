"""DiLoCo one round late: the outer step of a round applies what the round before it averaged.

m <- mu*m + g' ;  x <- x - lr*(g' + mu*m) ;  g' <- g        g' = 0 in round 0, which moves nothing

DiLoCoX sends a round's changes while the next one trains; so at its outer step it has those of the round before. The
mathematics of that delay is here, for comparison with what hides a round without it: with ``[outer] overlap`` training
goes on while a round is in flight, and what was learnt meanwhile is carried on to an anchor that is not late.

Delay costs stability. On a quadratic where a round leaves 1-h of the distance to the optimum, without momentum it
converges for lr*h < 1 where DiLoCo does for lr*h < 2; with Nesterov's momentum at h = 1 it diverges for DiLoCo's (0.7,
0.9), from lr 0.3 on at mu 0.9, from 0.4 on at 0.8, from 0.5 on at 0.6 (roots of the recursion's polynomial, in the
test). The preset's (0.4, 0.6) converges for every h in (0, 1].

What differs from the paper. Low-rank compression with a rank that adapts is the run's compressor here: "lowrank(...)"
with error feedback is near to it, the preset has int8. A peer's live copy does not wait with its own progress: after a
commit it is the late anchor, so what it learnt in the round comes back with the others' a round later.

Source: Qi et al., "DiLoCoX: A Low-Communication Large-Scale Training Framework for Decentralized Cluster", 2025,
arXiv:2506.21263; "delayed outer" in Kale, Douillard, Donchev, "Eager Updates for Overlapped Communication and
Computation in DiLoCo", 2025, arXiv:2502.12996.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from decentral.errors import ConfigError
from decentral.optimizers.base import OuterMethod, Preset, State, key
from decentral.optimizers.round_info import RoundInfo
from decentral.optimizers.steps import check_momentum, check_rate, nesterov

__all__ = ["Delayed"]


@dataclass(frozen=True, slots=True)
class Delayed(OuterMethod):
    """Nesterov on the last round's mean; state {"momentum": (N,), "pending": (N,)}."""

    name: ClassVar[str] = "delayed"
    equation: ClassVar[str] = "m <- mu*m + g' ; x <- x - lr*(g' + mu*m) ; g' <- g: the mean of the round before"
    source: ClassVar[str] = 'Qi et al., "DiLoCoX", 2025, arXiv:2506.21263'
    preset: ClassVar[Preset] = Preset(
        hyper={"learning_rate": 0.4, "momentum": 0.6},
        compressor="int8(block=4096)",
        exchange="reduce",
        norm_clip="median",
    )
    lr: float = 0.4
    momentum: float = key(0.6, "of the outer step; 0.9 diverges at DiLoCo's rates")
    late: int = key(1, "rounds after which a change is applied: 1, or 0, which is DiLoCo")

    def __post_init__(self) -> None:
        check_rate(self, self.lr)
        check_momentum(self, self.momentum)
        if self.late not in (0, 1):
            raise ConfigError(f"{self}: late must be 0 or 1; what is older than a round is not kept")

    def init(self, anchor: Tensor) -> dict[str, Tensor]:
        """No momentum, and nothing that waits."""
        return {"momentum": torch.zeros_like(anchor), "pending": torch.zeros_like(anchor)}

    def outer_step(
        self, anchor: Tensor, received: State, state: State, info: RoundInfo
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """One Nesterov step along what waited; what was received waits."""
        with torch.no_grad():
            fresh = received["change"].clone()
            change, pending = (state["pending"], fresh) if self.late else (fresh, state["pending"].clone())
            after, momentum = nesterov(anchor, change, state["momentum"], self.lr, self.momentum)
            return after, {"momentum": momentum, "pending": pending}
