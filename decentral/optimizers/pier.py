"""Pier: DiLoCo whose outer momentum rises in the first rounds, and falls later to what the end of a run bears.

mu_t = momentum * (t+1) / rise                         for t < rise
mu_t = momentum                                        up to t = decay_from
mu_t = falling in a line to floor over decay_over rounds, and floor from then on
m <- mu_t*m + g ;  x <- x - lr*(g + mu_t*m)            t: outer steps of the fragment, counted from 0

Early changes are large and turn quickly, so old ones mislead; late ones are small and mostly noise, of which a large
momentum carries ten rounds at once. What a constant g moves per step at the end falls from lr/(1-momentum) to
lr/(1-floor): 7 to 1.4 for the keys' defaults.

What differs from the paper. Its abstract has both, momentum warm-up and momentum decay; the curves and the constants
could not be confirmed, so lines and numbers are ours. Its warm-up gathers momentum while inner steps are still
data-parallel; here all rounds are alike, and warm-up means a smaller mu. A method is not told how long a run is:
``decay_from`` and ``decay_over`` are outer steps and want to be chosen for its length.

Source: Fan, Zhang, "Pier: Efficient Large Language Model pretraining with Relaxed Global Communication", 2025,
arXiv:2511.17849.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from decentral.errors import ConfigError
from decentral.optimizers.base import OuterMethod, Preset, RoundInfo, State, key, rate
from decentral.optimizers.steps import nesterov

__all__ = ["Pier"]


@dataclass(frozen=True, slots=True)
class Pier(OuterMethod):
    """Nesterov with a momentum that rises and falls; state {"momentum": (N,)}."""

    name: ClassVar[str] = "pier"
    equation: ClassVar[str] = "m <- mu_t*m + g ; x <- x - lr*(g + mu_t*m) ; mu_t rises, stays, falls to floor"
    source: ClassVar[str] = 'Fan, Zhang, "Pier", 2025, arXiv:2511.17849'
    preset: ClassVar[Preset] = Preset(
        hyper={"learning_rate": 0.7, "momentum": 0.9},
        compressor="int8(block=4096)",
        exchange="reduce",
        norm_clip="median",
    )
    lr: float = rate(0.7)
    momentum: float = key(0.9, "of the outer step between its rise and its fall", within="[0, 1)")
    rise: int = key(10, "outer steps over which the momentum rises from 0; 0: it does not", within="[0, inf)")
    decay_from: int = key(100, "outer step from which the momentum falls")
    decay_over: int = key(100, "outer steps over which it falls to floor; 0: at once", within="[0, inf)")
    floor: float = key(0.5, "what the momentum falls to")

    def __post_init__(self) -> None:
        OuterMethod.__post_init__(self)
        if not 0 <= self.floor <= self.momentum:
            raise ConfigError(f"{self}: floor must be in [0, momentum]; equal to momentum, it never falls")
        if self.decay_from < self.rise:
            raise ConfigError(f"{self}: decay_from must be no less than rise")

    def init(self, anchor: Tensor) -> dict[str, Tensor]:
        """No momentum yet."""
        return {"momentum": torch.zeros_like(anchor)}

    def momentum_at(self, step: int) -> float:
        """mu_t of outer step ``step`` of a fragment: Python's float64, alike on every machine."""
        if step < self.rise:
            return self.momentum * (step + 1) / self.rise
        if step < self.decay_from:
            return self.momentum
        if step >= self.decay_from + self.decay_over:
            return self.floor
        return self.momentum - (self.momentum - self.floor) * (step - self.decay_from) / self.decay_over

    def outer_step(
        self, anchor: Tensor, received: State, state: State, info: RoundInfo
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Make a Nesterov step with the momentum of this round."""
        momentum = self.momentum_at(info.step)
        after, buffer = nesterov(anchor, received["change"], state["momentum"], self.lr, momentum)
        return after, {"momentum": buffer}
