"""CGAD: a contribution shrinks with its age before Adam's two moments see it.

s_i = gate(age_i) e^(-decay age_i) ;  gate(age) = (1 + cos(pi min(age/cutoff, 1))) / 2
h = sum(s_i g_i) / K ;  m <- b1 m + (1-b1) h ;  v <- b2 v + (1-b2) h^2
x <- x - lr (m / (1-b1^t)) / (sqrt(v / (1-b2^t)) + eps)

With all ages 0 it is Adam. t counts the steps of the fragment in which somebody counted. Weights that were only
relative would not do: divided by their own sum, one old contribution alone would enter the moments in full.

What differs from the paper. It scales each arrival and makes a step with it; here a step takes all that a round names,
K of them, whose mean has K, and not the sum of s_i, as its divisor. One at or beyond ``cutoff`` is in neither, and when
all are, nothing moves. The paper's gate, its constants and its rate were not to be had: the gate above is the cosine
that is 1 at age 0 and 0 at the cutoff. Averages of Adam's update are about ``lr`` in size, whatever H is: set it to
what a parameter may move in a round. The preset's .01 is a third of the most that 30 steps of Adam at .001 can move it.
A large eps makes it SGD with momentum, at the rate lr/eps.

Source: "Cosine-Gated Adam-Decay: Drop-In Staleness-Aware Outer Optimization for Decoupled DiLoCo", 2026,
arXiv:2605.09126; Adam, Kingma and Ba, 2014, arXiv:1412.6980.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from decentral.optimizers.aggregation.base import mean_share
from decentral.optimizers.base import Contributor, OuterMethod, Preset, RoundInfo, State, Timing, key, rate
from decentral.optimizers.steps import cos, exp, power, root

__all__ = ["CGAD"]

_MOST = 1e38  # of a square: one beyond float32 would stay in v for ever


@dataclass(frozen=True, slots=True)
class CGAD(OuterMethod):
    """Adam on aged changes; state {"exp_avg": (N,), "exp_avg_sq": (N,), "steps": (1,)}."""

    name: ClassVar[str] = "cgad"
    equation: ClassVar[str] = "h = mean(gate(age_i)*exp(-decay*age_i)*g_i) ; x <- Adam(x, h)"
    source: ClassVar[str] = '"Cosine-Gated Adam-Decay", 2026, arXiv:2605.09126'
    preset: ClassVar[Preset] = Preset(
        hyper={"learning_rate": 0.01}, compressor="int8(block=4096)", exchange="gather", norm_clip="median"
    )
    lr: float = rate(0.003)
    beta1: float = key(0.9, "of the first moment, in outer steps", within="[0, 1)")
    beta2: float = key(0.99, "of the second moment, in outer steps", within="[0, 1)")
    eps: float = key(1e-8, "added to the root of the second moment", within="(0, inf)")
    decay: float = key(
        0.1, "alpha: a contribution counts e^-alpha less for each outer step of its age", within="[0, inf)"
    )
    cutoff: int = key(8, "age in outer steps from which a contribution counts nothing", within="[1, inf)")
    wait_for: int = key(2, "contributions that a round waits for", within="[1, inf)")
    grace: float = key(1.0, "seconds after those in which further ones are still taken", within="[0, 3600]")

    @property
    def timing(self) -> Timing:
        """Some contributions, and a little more time for others."""
        return Timing(self.wait_for, self.grace, self.cutoff - 1)  # below the age at which nothing counts

    def init(self, anchor: Tensor) -> dict[str, Tensor]:
        """No moments, no steps."""
        return {
            "exp_avg": torch.zeros_like(anchor),
            "exp_avg_sq": torch.zeros_like(anchor),
            "steps": anchor.new_zeros(1),
        }

    def weights(self, contributors: Sequence[Contributor], given: Sequence[float], state: State) -> Sequence[float]:
        """Scale what is given by age."""
        return [weight * self._share(one.age) for one, weight in zip(contributors, given, strict=True)]

    def outer_step(
        self, anchor: Tensor, received: State, state: State, info: RoundInfo
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Make a step of Adam."""
        steps = int(state["steps"].item()) + 1
        first, second = 1.0 - power(self.beta1, steps), 1.0 - power(self.beta2, steps)
        with torch.no_grad():
            change = received["change"] * mean_share(info.weights, [self._share(one.age) for one in info.contributors])
            mean = state["exp_avg"] * self.beta1 + change * (1 - self.beta1)
            square = state["exp_avg_sq"] * self.beta2 + (change * change).clamp(max=_MOST) * (1 - self.beta2)
            move = mean / first / (root(square / second) + self.eps)
            return anchor - move * self.lr, {"exp_avg": mean, "exp_avg_sq": square, "steps": state["steps"] + 1}

    def _share(self, age: int) -> float:
        if age >= self.cutoff:
            return 0.0
        root = cos(math.pi / 2 * age / self.cutoff)  # (1 + cos 2a) / 2 is the square of cos a
        return root * root * exp(-self.decay * age)
