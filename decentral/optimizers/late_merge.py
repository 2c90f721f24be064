"""Late merging: pairs meet rarely at first and more and more often, and the run ends with one average of all.

share_t = first + (1 - first)*min(1, t/growth)     of outer steps in which pairs meet
x <- mean of the pair's (x - lr*D)                 where they meet;  x <- x - lr*D elsewhere      D = anchor - local

Communication pays most where learning rates have decayed: the same number of meetings, put late, leaves a better mean;
and rare ones are enough to keep replicas mergeable, so that the last, full average recovers most of what a server
would have had. That average is what every run in pairs ends with; the schedule is what this method adds. A step in
which nobody meets sends nothing.

What differs from the paper. It draws links by chance; here the share is spread evenly, the same steps for all peers, as
both of a pair have to know. Its formulas were not to be had, so that the straight line is ours: it has one meeting in
ten steps at first, and after ``growth`` outer steps one in each. Norms' statistics are averaged with the buffers, and
not estimated anew after the last merge.

Source: Zhu et al., "A Single Merging Suffices: Recovering Server-based Learning Performance in Decentralized Learning",
2025, arXiv:2507.06542, by its abstract.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from decentral.errors import ConfigError
from decentral.optimizers.base import PROPOSED, Channel, OuterMethod, Preset, RoundInfo, State, key
from decentral.optimizers.pair_averaging import pull_to_mean
from decentral.optimizers.steps import check_rate

__all__ = ["LateMerge"]


@dataclass(frozen=True, slots=True)
class LateMerge(OuterMethod):
    """The pair's mean in some steps; no state."""

    name: ClassVar[str] = "late_merge"
    equation: ClassVar[str] = "x <- mean of the pair's (x - lr*D), in a share of steps that grows to 1; alone elsewhere"
    source: ClassVar[str] = 'Zhu et al., "A Single Merging Suffices", 2025, arXiv:2507.06542'
    topology: ClassVar[Literal["all", "pair"]] = "pair"
    preset: ClassVar[Preset] = Preset(
        hyper={"learning_rate": 1.0, "first": 0.1, "growth": 100},
        compressor="fp16",
        exchange="pair",
        demo={"outer": {"first": 0.3, "growth": 12}},  # a demo has few rounds
    )
    lr: float = 1.0
    first: float = key(0.1, "share of steps in which pairs meet at the beginning")
    growth: int = key(100, "outer steps after which they meet in each; about the length of the run")

    def __post_init__(self) -> None:
        check_rate(self, self.lr)
        if not 0 <= self.first <= 1:
            raise ConfigError(f"{self}: first, a share of steps, must be in [0, 1]; 0.1 is one in ten")
        if self.growth < 1:
            raise ConfigError(f"{self}: growth must be 1 outer step or more; about the length of the run is meant")

    def channels(self) -> tuple[Channel, ...]:
        """Where a replica would go alone, and the change stays at home."""
        return (PROPOSED,)

    def meets(self, step: int) -> bool:
        """Whenever the shares add up to one more."""
        return math.floor(self._meetings(step + 1)) > math.floor(self._meetings(step))

    def _meetings(self, steps: int) -> float:
        """The sum of the shares of so many steps."""
        rising = min(steps, self.growth)
        slope = (1 - self.first) / self.growth
        return rising * self.first + slope * (rising * (rising - 1) / 2) + (steps - rising)

    def proposal(self, anchor: Tensor, change: Tensor, state: State) -> Tensor:
        """Where this replica would go alone."""
        with torch.no_grad():
            return anchor - change * self.lr

    def outer_step(
        self, anchor: Tensor, received: State, state: State, info: RoundInfo
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """This replica at the pair's mean, or where it would go alone."""
        with torch.no_grad():
            return self.proposal(anchor, received["change"], state) - pull_to_mean(received["proposed"], 1.0), {}
