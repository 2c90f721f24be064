"""CO2: SlowMo one round late, with a penalty for the staleness and a bound on the momentum.

m <- clip(mu*m + g' / penalty, bound) ;  x <- x - lr*m ;  g' <- g        g' = 0 in round 0, which moves nothing

g' is the mean that the round before made: its transfer has the whole of this round's inner steps to arrive in. clip
cuts each coordinate of the momentum to [-bound, bound].

On a quadratic where a round leaves 1-h of the distance to the optimum it converges if, and only if, lr*h/penalty <
1 - mu: half of what one round less would bear, and less by far than SlowMo's 2*(1+mu). SlowMo's lr 1 with its usual
momentum is outside for h = 1; the preset (0.5, 0.4) is inside for every h.

What differs from the paper. The penalty there is a gap between rounds that follows the inner rate; its formula could
not be confirmed, and in the authors' code it is a constant and the clip has no effect. So penalty is a constant of at
least 1 here, and the clip is the plain one, coordinate by coordinate; with ``penalty = 1``, ``late = 0`` and a bound
that nothing reaches this is `slowmo`. As there, the inner rate is taken for constant. The paper averages parameters:
the mean of changes is the same, for all begin a round at one anchor.

Source: Sun et al., "CO2: Efficient Distributed Training with Full Communication-Computation Overlap", 2024,
arXiv:2401.16265.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from decentral.errors import ConfigError
from decentral.optimizers.base import OuterMethod, Preset, State, key
from decentral.optimizers.round_info import RoundInfo
from decentral.optimizers.steps import check_momentum, check_rate

__all__ = ["CO2"]


@dataclass(frozen=True, slots=True)
class CO2(OuterMethod):
    """Clipped heavy-ball momentum on the last round's mean; state {"momentum": (N,), "pending": (N,)}."""

    name: ClassVar[str] = "co2"
    equation: ClassVar[str] = "m <- clip(mu*m + g'/penalty, bound) ; x <- x - lr*m ; g' <- g: of the round before"
    source: ClassVar[str] = 'Sun et al., "CO2", 2024, arXiv:2401.16265'
    preset: ClassVar[Preset] = Preset(
        hyper={"learning_rate": 0.5, "momentum": 0.4},
        compressor="int8(block=4096)",
        exchange="reduce",
        norm_clip="median",
    )
    lr: float = 0.5
    momentum: float = key(0.4, "of the outer step; converges for lr/penalty below 1 - momentum")
    penalty: float = key(1.0, "what a change is divided by for its staleness, 1 or more")
    bound: float = key(1.0, "largest value of a coordinate of the momentum")
    late: int = key(1, "rounds after which a change is applied: 1, or 0")

    def __post_init__(self) -> None:
        check_rate(self, self.lr)
        check_momentum(self, self.momentum)
        if not 1 <= self.penalty < float("inf"):
            raise ConfigError(f"{self}: penalty divides what is stale, want 1 or more and finite; 1 is none")
        if not self.bound > 0:
            raise ConfigError(f"{self}: bound, of a coordinate of the momentum, must be above 0; 1 is usual")
        if self.late not in (0, 1):
            raise ConfigError(f"{self}: late must be 0 or 1; what is older than a round is not kept")

    def init(self, anchor: Tensor) -> dict[str, Tensor]:
        """No momentum, and nothing that waits."""
        return {"momentum": torch.zeros_like(anchor), "pending": torch.zeros_like(anchor)}

    def outer_step(
        self, anchor: Tensor, received: State, state: State, info: RoundInfo
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """One step along what waited; what was received waits."""
        with torch.no_grad():
            fresh = received["change"].clone()
            change, pending = (state["pending"], fresh) if self.late else (fresh, state["pending"].clone())
            momentum = state["momentum"] * self.momentum + change / self.penalty
            momentum = momentum.clamp(-self.bound, self.bound)
            return anchor - momentum * self.lr, {"momentum": momentum, "pending": pending}
