"""Decoupled DiLoCo: a quorum, a grace window, and a mean of directions that keeps the length of what was sent.

per tensor:  d = sum(w_i g_i / |g_i|) ;  g = (sum(w_i |g_i|) / sum(w_i)) d / |d|      w_i = tokens_i^2 / steps_i
m <- mu*m + g ;  x <- x - lr*(g + mu*m)

The plain mean of M directions that agree little is about sqrt(M) shorter than each; here |g| is the mean length
whatever M is, so the outer lr need not follow the number of peers. tokens^2/steps is quantity times quality: tokens,
times the tokens of a step. A zero delta has no direction and keeps its weight in the mean length. Where directions
cancel, and d says nothing, g is the weighted mean. Embeddings are plainly averaged: few of their rows move, and each
peer's are others.

What differs from the paper. Its syncer merges what learners stream, with a grace window from the slack until the next
fragment; here it is ``grace``, from the moment at which ``wait_for`` contributions are there (1 in its experiments).
Weights stay within 1/16 to 4 times the typical one, as saying is free. A late peer's progress is carried to the
present anchor up to ``staleness`` outer steps, then overwritten as in the paper: near an optimum one old change is far
longer than the others' and its direction counts as much, so that after 6 steps the loss was 4 times as high. Its outer
lr and mu were not to be had: these are DiLoCo's.

Source: Douillard et al., "Decoupled DiLoCo for Resilient Distributed Pre-training", 2026, arXiv:2604.21428.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from decentral.errors import ConfigError
from decentral.optimizers.aggregation.base import norm
from decentral.optimizers.aggregation.gram import direction, factor, ranges, weighted_sum
from decentral.optimizers.base import (
    CHANGE,
    Channel,
    Contributor,
    OuterMethod,
    Preset,
    RoundInfo,
    State,
    key,
    rate,
)
from decentral.optimizers.fedbuff import Buffered
from decentral.optimizers.mean import contribution_weights
from decentral.optimizers.steps import nesterov

__all__ = ["DecoupledDiLoCo", "radial_directional"]

# Shape suffixes: N = elements of a tensor or of the fragment, K = contributors.


_CANCELLED = 1e-6  # length of a mean of directions that is rounding of float32


@dataclass(frozen=True, slots=True)
class DecoupledDiLoCo(Buffered):
    """Nesterov on the radial-directional mean; state {"momentum": (N,)}."""

    name: ClassVar[str] = "decoupled"
    equation: ClassVar[str] = "g = mean(|g_i|)*direction(sum(w_i*g_i/|g_i|)) ; m <- mu*m + g ; x <- x - lr*(g + mu*m)"
    source: ClassVar[str] = 'Douillard et al., "Decoupled DiLoCo", 2026, arXiv:2604.21428'
    preset: ClassVar[Preset] = Preset(
        hyper={"learning_rate": 0.7, "momentum": 0.9}, compressor="int8(block=4096)", exchange="gather"
    )
    lr: float = rate(0.7)
    momentum: float = key(0.9, "of the outer step; 0 is none", within="[0, 1)")
    mean: str = key("radial", "radial: mean of directions, at the mean length; plain: the weighted mean of all tensors")
    embeddings: str = key("embed wte wpe", "words in the names of tensors that are plainly averaged in any case")
    wait_for: int = key(2, "contributions that a round waits for", within="[1, inf)")
    grace: float = key(1.0, "seconds after those in which further ones are still taken", within="[0, 3600]")
    staleness: int = key(2, "outer steps by which a contribution may be late", within="[0, inf)")

    def __post_init__(self) -> None:
        OuterMethod.__post_init__(self)
        if self.mean not in ("radial", "plain"):
            raise ConfigError(f'{self}: mean must be "radial" or "plain"; radial is the paper\'s')

    def channels(self) -> tuple[Channel, ...]:
        """The change of each contributor."""
        return (replace(CHANGE, combine="each"),)

    def init(self, anchor: Tensor) -> dict[str, Tensor]:
        """No momentum yet."""
        return {"momentum": torch.zeros_like(anchor)}

    def weights(self, contributors: Sequence[Contributor], given: Sequence[float], state: State) -> Sequence[float]:
        """Tokens squared over steps, whatever [outer] weighting says: tokens are in it already."""
        return contribution_weights("tokens", [one.tokens**2 / max(1, one.steps) for one in contributors])

    def outer_step(
        self, anchor: Tensor, received: State, state: State, info: RoundInfo
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Make a Nesterov step along the merged change."""
        change, rows_KN = torch.empty_like(anchor), received["change"]
        with torch.no_grad():
            for name, place in ranges(info, anchor.numel()):
                plain = self.mean == "plain" or any(word in name for word in self.embeddings.split())
                merged = _mean if plain else radial_directional
                change[place] = merged(rows_KN[:, place], info.weights)
        after, momentum = nesterov(anchor, change, state["momentum"], self.lr, self.momentum)
        return after, {"momentum": momentum}


def radial_directional(rows_KN: Tensor, weights: Sequence[float]) -> Tensor:
    """Return a tensor's mean direction at its mean length (N,); the weighted mean where directions cancel."""
    units, lengths = zip(*(direction(row_N) for row_N in rows_KN), strict=True)
    whole = math.fsum(weights)
    radius = math.fsum(weight * length for weight, length in zip(weights, lengths, strict=True)) / whole
    toward_N = weighted_sum(units, [weight / whole for weight in weights])
    length = norm(toward_N)
    return toward_N * factor(radius / length) if length > _CANCELLED else _mean(rows_KN, weights)


def _mean(rows_KN: Tensor, weights: Sequence[float]) -> Tensor:
    whole = math.fsum(weights)
    return weighted_sum(list(rows_KN), [weight / whole for weight in weights])
