"""Delayed Nesterov: asynchronous DiLoCo whose momentum moves once in N commits, so that it is not applied N times.

every commit, t = 0, 1, ...:    D <- D + g
when (t+1) mod N == 0:          m <- mu*m + D/N ;  x <- x - lr*((1 - c*N + c)*mu*m + g/N) ;  D <- 0
else:                           x <- x - lr*(c*mu*m + g/N)

A round waits for ``wait_for`` contributions and a grace period, and goes on; who came too late is in a later one, up to
``staleness`` outer steps on. g is the mean of those who came: each then moves the anchor by a share of a step, and N
commits of equal g move it by exactly one Nesterov step when c = 0. Sequential Nesterov on them would move it by 12.14
instead of 1.9 times lr*g for N = 4, mu = 0.9, and no lr mends that.

What differs from the paper. Its server applies each worker's delta by itself; here a commit has all that came within
the grace period, which the paper has as an option. A late peer's progress is carried to the present anchor, so that
what it sends is always of it. Workers' steps (DyLU) are theirs to choose: ``inner.steps`` is the same for all.

Source: Liu et al., "Asynchronous Local-SGD Training for Language Modeling", 2024, arXiv:2401.09135.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from decentral.errors import ConfigError
from decentral.optimizers.base import OuterMethod, Preset, RoundInfo, State, key, rate
from decentral.optimizers.fedbuff import Buffered

__all__ = ["DelayedNesterov"]


@dataclass(frozen=True, slots=True)
class DelayedNesterov(Buffered):
    """State {"momentum": (N,), "waiting": (N,)}: the momentum, and the changes that it has not seen yet."""

    name: ClassVar[str] = "delayed_nesterov"
    equation: ClassVar[str] = "D <- D + g ; each N-th: m <- mu*m + D/N, x <- x - lr*(mu*m + g/N) ; else x <- x - lr*g/N"
    source: ClassVar[str] = 'Liu et al., "Asynchronous Local-SGD", 2024, arXiv:2401.09135'
    preset: ClassVar[Preset] = Preset(
        hyper={"learning_rate": 0.7, "momentum": 0.9, "delay": 2},
        compressor="int8(block=4096)",
        exchange="gather",
        norm_clip="median",
        demo={"outer": {"learning_rate": 1.2}},  # two commits make one step of Nesterov, and a demo has ten
    )
    lr: float = rate(0.7)
    momentum: float = key(0.9, "of the step that each delay-th commit makes", within="[0, 1)")
    delay: int = key(2, "N: commits between two moves of the momentum", within="[1, inf)")
    spread: float = key(0.0, "c: share of the momentum in the commits between, 0 to 1/N", within="[0, 1]")
    wait_for: int = key(2, "contributions that a round waits for", within="[1, inf)")
    grace: float = key(1.0, "seconds after those in which further ones are still taken", within="[0, 3600]")
    staleness: int = key(8, "outer steps by which a contribution may be late", within="[0, inf)")

    def __post_init__(self) -> None:
        OuterMethod.__post_init__(self)
        if not 0 <= self.spread <= 1 / self.delay:
            raise ConfigError(f"{self}: spread must be in [0, 1/delay]; 0 is usual")

    def init(self, anchor: Tensor) -> dict[str, Tensor]:
        """No momentum, and nothing that it has not seen."""
        return {"momentum": torch.zeros_like(anchor), "waiting": torch.zeros_like(anchor)}

    def outer_step(
        self, anchor: Tensor, received: State, state: State, info: RoundInfo
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Make a step, whose momentum waits for its turn."""
        change, n = received["change"], self.delay
        with torch.no_grad():
            momentum, waiting, share = state["momentum"], state["waiting"] + change, self.spread
            if (info.step + 1) % n == 0:
                momentum, waiting = momentum * self.momentum + waiting / n, torch.zeros_like(waiting)
                share = 1 - self.spread * n + self.spread
            move = momentum * (self.momentum * share) + change / n
            return anchor - move * self.lr, {"momentum": momentum.clone(), "waiting": waiting}
