"""SlowMo: slow heavy-ball momentum on top of local SGD, in units of the inner steps' gradients.

u <- beta*u + (x - mean(local)) / rate ;  x <- x - lr*rate*u        rate: the inner learning rate of the round

With a constant inner rate both rates cancel, and what is left is outer SGD with heavy-ball momentum, without Nesterov's
look-ahead: m <- beta*m + g ; x <- x - lr*m. The first step moves lr*g, a constant g ends at lr/(1-beta)*g per step.
On a quadratic, where a round leaves 1-h of the distance to the optimum, it converges for lr*h < 2*(1+beta).

What differs from the paper. The rate is a constant, for an outer step is told no inner rate: while the inner rate
decays the paper's u is in units that do not, and its old momentum counts for less than here by the ratio of the two
rates. The paper also lets the base optimizer gossip within a round, and may reset inner moments after it; here they
are kept.

Source: Wang, Tantia, Ballas, Rabbat, "SlowMo: Improving Communication-Efficient Distributed SGD with Slow Momentum",
2019, arXiv:1910.00643: lr 1, and beta between 0.4 and 0.8.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from decentral.optimizers.base import OuterMethod, Preset, State, key
from decentral.optimizers.round_info import RoundInfo
from decentral.optimizers.steps import check_momentum, check_rate, heavy_ball

__all__ = ["SlowMo"]


@dataclass(frozen=True, slots=True)
class SlowMo(OuterMethod):
    """Heavy-ball momentum; state {"momentum": (N,)}."""

    name: ClassVar[str] = "slowmo"
    equation: ClassVar[str] = "m <- beta*m + g ; x <- x - lr*m"
    source: ClassVar[str] = 'Wang et al., "SlowMo", 2019, arXiv:1910.00643'
    preset: ClassVar[Preset] = Preset(
        hyper={"learning_rate": 1.0, "momentum": 0.6},
        compressor="int8(block=4096)",
        exchange="reduce",
        norm_clip="median",
    )
    lr: float = 1.0
    momentum: float = key(0.6, "beta, of the slow momentum; 0.4 to 0.8 is the paper's")

    def __post_init__(self) -> None:
        check_rate(self, self.lr)
        check_momentum(self, self.momentum)

    def init(self, anchor: Tensor) -> dict[str, Tensor]:
        """No momentum yet."""
        return {"momentum": torch.zeros_like(anchor)}

    def outer_step(
        self, anchor: Tensor, received: State, state: State, info: RoundInfo
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """One heavy-ball step."""
        after, buffer = heavy_ball(anchor, received["change"], state["momentum"], self.lr, self.momentum)
        return after, {"momentum": buffer}
