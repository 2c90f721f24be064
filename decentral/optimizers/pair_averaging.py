"""AD-PSGD, late merging and A2CiD2, gossip in which a pair goes to its mean; the pull that all gossip methods share."""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from decentral.errors import ConfigError
from decentral.optimizers.base import PROPOSED, Channel, OuterMethod, Preset, RoundInfo, State, key, rate
from decentral.optimizers.steps import exp

__all__ = ["ADPSGD", "A2CiD2", "LateMerge", "Proposing", "check_pull", "most_twin_pull", "pull_to_mean"]

# ---- pull towards the pair's mean ----
#
# Each peer of a pair is drawn to their mean; beside momentum there is a bound on how strongly.
#
# x <- x - a*(s - mean(s))      s: the parameters as both of a pair were sent them, the own ones too
#
# It uses only what was sent, so that the pulls of a pair cancel and the mean of all replicas is kept, whatever
# compression did. Without training a replica with momentum mu moves by x_new = x + mu*(x - x_old) - a*(x - mean). Over
# random pairs the expected square of the disagreement contracts when 0 < a < 2*(1 - mu**2): exact for an odd number of
# replicas, one of which is left over at each step, and in the limit of many. An even number of them bears more (for mu
# 0.5, where the bound is 1.5, two replicas contract up to 3, four up to 1.8, eight up to 1.61, 64 up to 1.51), but
# peers come and go.

# Shape suffixes: N = elements of one fragment, flat float32; K = the peers of the pair that came, oneself first.


def pull_to_mean(sent_KN: Tensor, strength: float) -> Tensor:
    """Return what to subtract; 0 for a peer that is alone."""
    with torch.no_grad():
        return (sent_KN[0] - sent_KN.sum(0) / len(sent_KN)) * strength


def check_pull(method: object, pull: str, momentum: str) -> None:
    """ConfigError unless replicas stay together, with the method's own names of the two keys."""
    bound = 2 * (1 - getattr(method, momentum) ** 2)
    if not 0 <= getattr(method, pull) < bound:
        raise ConfigError(
            f"{method}: replicas drift apart unless {pull} < 2*(1 - {momentum}**2) = {bound:.3g}; "
            f"lower {pull} or {momentum} (0 switches the pull off)"
        )


# ---- one vector, where a replica would go alone ----


class Proposing(OuterMethod):
    """Gossip in which a pair tell each other y = x - lr*D, where each would go alone; D stays at home."""

    __slots__ = ()
    topology: ClassVar[Literal["all", "pair"]] = "pair"
    lr: float

    def channels(self) -> tuple[Channel, ...]:
        """Return y alone."""
        return (PROPOSED,)

    def proposal(self, anchor: Tensor, change: Tensor, state: State) -> Tensor:
        """Return y."""
        with torch.no_grad():
            return anchor - change * self.lr


# ---- AD-PSGD ----
#
# A peer averages with one partner, and does nothing else.
#
# y = x - lr*D ;  x <- mean of both y      D = anchor - local
#
# One vector crosses, y, and nothing is kept: the plain form of gossip, and the baseline of the others. An average
# never widens the disagreement of replicas, so there is no bound to keep.
#
# What differs from the paper. There one gradient step runs beside each average, from parameters that the average has
# changed meanwhile; here H inner steps come before it, so that no change is stale. Its peers wait for nobody and fall
# into two halves, of which one asks and one answers, against deadlock; here pairs are drawn for every round, and a
# partner that does not come costs a step alone.
#
# Push-sum (Assran et al., "Stochastic Gradient Push", 2019, arXiv:1811.10792) sends a weight w beside w*y, for graphs
# in which a peer may be told without being heard. A pair is made by both or by neither, so every w stays 1 and
# push-sum is this method (a test shows it): it has no name of its own.
#
# Source: Lian, Zhang, Zhang, Liu, "Asynchronous Decentralized Parallel Stochastic Gradient Descent", 2018,
# arXiv:1710.06952.


@dataclass(frozen=True, slots=True)
class ADPSGD(Proposing):
    """The pair's mean; no state."""

    name: ClassVar[str] = "ad_psgd"
    equation: ClassVar[str] = "x <- mean of the pair's (x - lr*D)"
    source: ClassVar[str] = 'Lian et al., "Asynchronous Decentralized Parallel SGD", 2018, arXiv:1710.06952'
    preset: ClassVar[Preset] = Preset(hyper={"learning_rate": 1.0}, compressor="fp16", exchange="pair")
    lr: float = rate(1.0)

    def outer_step(
        self, anchor: Tensor, received: State, state: State, info: RoundInfo
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """This replica at the pair's mean, up to what compression lost of the gap between the two."""
        with torch.no_grad():
            return self.proposal(anchor, received["change"], state) - pull_to_mean(received["proposed"], 1.0), {}


# ---- late merging ----
#
# Pairs meet rarely at first and more and more often, and the run ends with one average of all.
#
# share_t = first + (1 - first)*min(1, t/growth)     of outer steps in which pairs meet
# x <- mean of the pair's (x - lr*D)                 where they meet;  x <- x - lr*D elsewhere
#
# Communication pays most where learning rates have decayed: the same number of meetings, put late, leaves a better
# mean; and rare ones are enough to keep replicas mergeable, so that the last, full average recovers most of what a
# server would have had. That average is what every run in pairs ends with; the schedule is what this method adds. A
# step in which nobody meets sends nothing.
#
# What differs from the paper. It draws links by chance; here the share is spread evenly, the same steps for all peers,
# as both of a pair have to know. Its formulas were not to be had, so that the straight line is ours: it has one meeting
# in ten steps at first, and after ``growth`` outer steps one in each. Norms' statistics are averaged with the buffers,
# and not estimated anew after the last merge.
#
# Source: Zhu et al., "A Single Merging Suffices: Recovering Server-based Learning Performance in Decentralized
# Learning", 2025, arXiv:2507.06542, by its abstract.


@dataclass(frozen=True, slots=True)
class LateMerge(ADPSGD):
    """The pair's mean in some steps; no state."""

    name: ClassVar[str] = "late_merge"
    equation: ClassVar[str] = "x <- mean of the pair's (x - lr*D), in a share of steps that grows to 1; alone elsewhere"
    source: ClassVar[str] = 'Zhu et al., "A Single Merging Suffices", 2025, arXiv:2507.06542'
    preset: ClassVar[Preset] = Preset(
        hyper={"learning_rate": 1.0, "first": 0.1, "growth": 100},
        compressor="fp16",
        exchange="pair",
        demo={"outer": {"first": 0.3, "growth": 12}},  # a demo has few rounds
    )
    first: float = key(0.1, "share of steps in which pairs meet at the beginning", within="[0, 1]")
    growth: int = key(100, "outer steps after which they meet in each; about the length of the run", within="[1, inf)")

    def meets(self, step: int) -> bool:
        """Whenever the shares add up to one more."""
        return math.floor(self._meetings(step + 1)) > math.floor(self._meetings(step))

    def _meetings(self, steps: int) -> float:
        """The sum of the shares of so many steps."""
        rising = min(steps, self.growth)
        slope = (1 - self.first) / self.growth
        return rising * self.first + slope * (rising * (rising - 1) / 2) + (steps - rising)


# ---- A2CiD2 ----
#
# Each replica has a twin that mixes with it all the time, and a partner pulls both, the twin more strongly.
#
# x <- x - D ;  y <- y - D                               D = anchor - local: gradients go on both
# x <- x + c*(y - x) ;  y <- y + c*(x - y)               c = (1 - exp(-2*eta))/2, at once: one round's mixing
# x <- x - (x - mean(x)) ;  y <- y - r*(x - mean(x))     eta = 1/(2*sqrt(chi1*chi2)), r = sqrt(chi1/chi2)
#
# One vector crosses, the mixed x, and the twin y stays at home. x + y is kept by the mixing, and over all replicas by
# the pulls. Without training the expected square of the disagreement contracts over random pairs while r is below a
# bound that falls from infinity to 3 as eta rises (``most_twin_pull``, which the test computes; more for an even
# number of replicas).
#
# chi1 is 1 over the second smallest eigenvalue of the Laplacian of the pairs that meet in a round, chi2 half the
# largest effective resistance between two that may meet. Where all meet all, both are near 1; x and y are then one,
# and the method is `ad_psgd`. A swarm in which some cannot reach each other has a larger chi1, as has one whose peers
# each pull towards data of their own: the twin adds up what the pulls took, and so takes out what comes back each
# round. In a sweep over such quadratics (experiments/gossip_constants) every larger chi1 was better, up to 64; 16 and
# 1 keep half the distance to the bound.
#
# What differs from the paper. It mixes between single gradients and meetings, by Poisson clocks; here one meeting
# follows H inner steps, and a round's mixing is done in one go. Its code sends x before the mixing and applies the
# pull after it, so that the two pulls of a pair differ; here both use the mixed x, as the equations say.
#
# Source: Nabli, Belilovsky, Oyallon, "A2CiD2: Accelerating Asynchronous Communication in Decentralized Deep Learning",
# 2023, arXiv:2306.08289.


@dataclass(frozen=True, slots=True)
class A2CiD2(Proposing):
    """The mixing and the pair step; state {"twin": (N,)}, one per replica and never shared."""

    name: ClassVar[str] = "a2cid2"
    equation: ClassVar[str] = "x, y <- mixed(x - lr*D, y - lr*D) ; x <- mean(x) ; y <- y - r*(x - mean(x))"
    source: ClassVar[str] = 'Nabli et al., "A2CiD2", 2023, arXiv:2306.08289'
    preset: ClassVar[Preset] = Preset(
        hyper={"learning_rate": 1.0, "chi1": 16.0, "chi2": 1.0}, compressor="fp16", exchange="pair"
    )
    lr: float = rate(1.0)
    chi1: float = key(16.0, "how slowly the graph of those who meet mixes; 1 where all meet all")
    chi2: float = key(1.0, "half the largest resistance between two that meet; at most chi1")

    def __post_init__(self) -> None:
        OuterMethod.__post_init__(self)
        if not 0 < self.chi2 <= self.chi1 < float("inf"):
            raise ConfigError(f"{self}: want 0 < chi2 <= chi1, both finite; 1 and 1 where all meet all")
        most = most_twin_pull(self._share)
        if not self._twin_pull < most:
            raise ConfigError(
                f"{self}: replicas drift apart unless sqrt(chi1/chi2) < {most:.3g}, where it is {self._twin_pull:.3g}; "
                "lower chi1 or raise chi2"
            )

    @property
    def _share(self) -> float:
        """c: what one round's mixing takes of the other's place."""
        return (1 - exp(-1 / math.sqrt(self.chi1 * self.chi2))) / 2

    @property
    def _twin_pull(self) -> float:
        return math.sqrt(self.chi1 / self.chi2)

    def init(self, anchor: Tensor) -> dict[str, Tensor]:
        """Both begin as one."""
        return {"twin": anchor.detach().clone()}

    def proposal(self, anchor: Tensor, change: Tensor, state: State) -> Tensor:
        """The mixed x."""
        with torch.no_grad():
            return Proposing.proposal(self, anchor, change, state) - self._mixing(anchor, state)

    def outer_step(
        self, anchor: Tensor, received: State, state: State, info: RoundInfo
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The next parameters of this replica, and of its twin."""
        with torch.no_grad():
            twin_N = state["twin"] - received["change"] * self.lr + self._mixing(anchor, state)
            apart_N = pull_to_mean(received["proposed"], 1.0)
            x_N = self.proposal(anchor, received["change"], state) - apart_N
            return x_N, {"twin": twin_N - apart_N * self._twin_pull}

    def _mixing(self, anchor: Tensor, state: State) -> Tensor:
        """Return what goes from x to y, of the gap before the change, which is on both."""
        return (anchor - state["twin"]) * self._share


def most_twin_pull(share: float) -> float:
    """The bound on r where each round mixes ``share``, c: from the stationary second moments of (x, y), with E x**2 = 1
    after the mixing; w and v are then E x*y after it, and E y**2 before it.
    """
    keep = 1 - share
    w = keep * (1 + 2 * share) / (share * (3 - 2 * share))
    v = (1 - keep * keep / 2 - share * keep * w) / (share * share)
    grown = share * (2 - share) * v - share * share / 2 - share * keep * w
    return w + math.sqrt(w * w + 2 * grown)
