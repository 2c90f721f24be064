"""SlowMo; CO2, which is SlowMo while training goes on; and DiLoCo one round late."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from decentral.optimizers.base import OuterMethod, Preset, RoundInfo, State, key, rate
from decentral.optimizers.steps import heavy_ball, nesterov

__all__ = ["CO2", "Delayed", "SlowMo"]

# ---- SlowMo ----
#
# Slow heavy-ball momentum on top of local SGD, in units of the inner steps' gradients.
#
# u <- beta*u + (x - mean(local)) / rate ;  x <- x - lr*rate*u        rate: the inner learning rate of the round
#
# With a constant inner rate both rates cancel, and what is left is outer SGD with heavy-ball momentum, without
# Nesterov's look-ahead: m <- beta*m + g ; x <- x - lr*m. The first step moves lr*g, a constant g ends at lr/(1-beta)*g
# per step. On a quadratic, where a round leaves 1-h of the distance to the optimum, it converges for lr*h <
# 2*(1+beta).
#
# What differs from the paper. The rate is a constant, for an outer step is told no inner rate: while the inner rate
# decays the paper's u is in units that do not, and its old momentum counts for less than here by the ratio of the two
# rates. The paper also lets the base optimizer gossip within a round, and may reset inner moments after it; here they
# are kept.
#
# Source: Wang, Tantia, Ballas, Rabbat, "SlowMo: Improving Communication-Efficient Distributed SGD with Slow Momentum",
# 2019, arXiv:1910.00643: lr 1, and beta between 0.4 and 0.8.


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
    lr: float = rate(1.0)
    momentum: float = key(0.6, "beta, of the slow momentum; 0.4 to 0.8 is the paper's", within="[0, 1)")

    def init(self, anchor: Tensor) -> dict[str, Tensor]:
        """No momentum yet."""
        return {"momentum": torch.zeros_like(anchor)}

    def outer_step(
        self, anchor: Tensor, received: State, state: State, info: RoundInfo
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Make a heavy-ball step."""
        after, buffer = heavy_ball(anchor, received["change"], state["momentum"], self.lr, self.momentum)
        return after, {"momentum": buffer}


# ---- CO2 ----
#
# SlowMo while training goes on, with a penalty for the staleness and a bound on the momentum.
#
# m <- clip(mu*m + g / penalty, bound) ;  x <- x - lr*m ;  live <- x + (live - sent)
#
# The preset's ``[outer] overlap`` hides the round: nobody waits for the transfer, which has the whole of the next
# round's inner steps to arrive in, and what was learnt meanwhile is carried on to the new anchor. clip cuts each
# coordinate of the momentum to [-bound, bound].
#
# On a quadratic where a round leaves 1-h of the distance to the optimum, with commits that come as late as they can, at
# the end of the next round, it converges for lr/penalty < 2*(1 - mu**2) at h = 1, and for more below. With mu = 0 and
# lr = 1 the delay is none: what is carried is the very progress that the commit did not have.
#
# What differs from the paper. There the step of a round is made of the mean of the round before, and a replica begins
# each round at that late anchor, without its own newest progress; here a commit is merged when it comes, and that
# progress is kept (`delayed` has the mathematics of a late anchor). The penalty there is a gap between rounds that
# follows the inner rate; its formula could not be confirmed, and in the authors' code it is a constant and the clip has
# no effect. So penalty is a constant of at least 1 here, and the clip is the plain one, coordinate by coordinate; with
# ``penalty = 1`` and a bound that nothing reaches the outer step is `slowmo`'s. As there, the inner rate is taken for
# constant. The paper averages parameters: the mean of changes is the same, for all begin a round at one anchor.
#
# Source: Sun et al., "CO2: Efficient Distributed Training with Full Communication-Computation Overlap", 2024,
# arXiv:2401.16265.


@dataclass(frozen=True, slots=True)
class CO2(OuterMethod):
    """Clipped heavy-ball momentum, of a round that nobody waits for; state {"momentum": (N,)}."""

    name: ClassVar[str] = "co2"
    equation: ClassVar[str] = "m <- clip(mu*m + g/penalty, bound) ; x <- x - lr*m ; training goes on meanwhile"
    source: ClassVar[str] = 'Sun et al., "CO2", 2024, arXiv:2401.16265'
    preset: ClassVar[Preset] = Preset(
        hyper={"learning_rate": 1.0, "momentum": 0.6},
        compressor="int8(block=4096)",
        exchange="reduce",
        overlap=1,
        norm_clip="median",
    )
    lr: float = rate(1.0)
    momentum: float = key(0.6, "of the outer step; converges for lr/penalty below 2*(1 - momentum**2)", within="[0, 1)")
    penalty: float = key(1.0, "what a change is divided by for its staleness, 1 or more", within="[1, inf)")
    bound: float = key(1.0, "largest value of a coordinate of the momentum", within="(0, inf]")

    def init(self, anchor: Tensor) -> dict[str, Tensor]:
        """No momentum yet."""
        return {"momentum": torch.zeros_like(anchor)}

    def outer_step(
        self, anchor: Tensor, received: State, state: State, info: RoundInfo
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Make a heavy-ball step, its momentum cut."""
        with torch.no_grad():
            momentum = state["momentum"] * self.momentum + received["change"] / self.penalty
            momentum = momentum.clamp(-self.bound, self.bound)
            return anchor - momentum * self.lr, {"momentum": momentum}


# ---- DiLoCo one round late ----
#
# The outer step of a round applies what the round before it averaged.
#
# m <- mu*m + g' ;  x <- x - lr*(g' + mu*m) ;  g' <- g        g' = 0 in round 0, which moves nothing
#
# DiLoCoX sends a round's changes while the next one trains; so at its outer step it has those of the round before. The
# mathematics of that delay is here, for comparison with what hides a round without it: with ``[outer] overlap``
# training goes on while a round is in flight, and what was learnt meanwhile is carried on to an anchor that is not
# late.
#
# Delay costs stability. On a quadratic where a round leaves 1-h of the distance to the optimum, without momentum it
# converges for lr*h < 1 where DiLoCo does for lr*h < 2; with Nesterov's momentum at h = 1 it diverges for DiLoCo's
# (0.7, 0.9), from lr 0.26 on at mu 0.9, 0.35 at 0.8, 0.49 at 0.6 (roots of the recursion's polynomial, in
# the test). The preset's (0.4, 0.6) converges for every h in (0, 1].
#
# What differs from the paper. Low-rank compression with a rank that adapts is the run's compressor here:
# "lowrank(...)" with error feedback is near to it, the preset has int8. A peer's live copy does not wait with its own
# progress: after a commit it is the late anchor, so what it learnt in the round comes back with the others' a round
# later.
#
# Source: Qi et al., "DiLoCoX: A Low-Communication Large-Scale Training Framework for Decentralized Cluster", 2025,
# arXiv:2506.21263; "delayed outer" in Kale, Douillard, Donchev, "Eager Updates for Overlapped Communication and
# Computation in DiLoCo", 2025, arXiv:2502.12996.


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
    lr: float = rate(0.4)
    momentum: float = key(0.6, "of the outer step; 0.9 diverges at DiLoCo's rates", within="[0, 1)")
    late: int = key(1, "rounds after which a change is applied: 1, or 0, which is DiLoCo", within="[0, 1]")

    def init(self, anchor: Tensor) -> dict[str, Tensor]:
        """No momentum, and nothing that waits."""
        return {"momentum": torch.zeros_like(anchor), "pending": torch.zeros_like(anchor)}

    def outer_step(
        self, anchor: Tensor, received: State, state: State, info: RoundInfo
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Make a Nesterov step along what waited; what was received waits."""
        with torch.no_grad():
            fresh = received["change"].clone()
            change, pending = (state["pending"], fresh) if self.late else (fresh, state["pending"].clone())
            after, momentum = nesterov(anchor, change, state["momentum"], self.lr, self.momentum)
            return after, {"momentum": momentum, "pending": pending}
