"""HeLoCo: before the mean, what points against the outer momentum is turned towards it, tensor by tensor.

c = cos(g_i, m) ;  conf = |g_i| / (|g_i| + trust |m|)
c >= keep       g_i stays
0 <= c < keep   g_i <- |g_i| u / |u| ,  u = (1-l) g_i/|g_i| + l m/|m| ,  l = min(turn (1-c) conf, 1)
c < 0           g_i <- g_i - b c |g_i| m/|m| ,  b = min(shrink (-c) conf, most)
G = sum(s_i g_i) / K ;  m <- mu*m + (1-mu)*G ;  x <- x - lr*(G + mu*m)          s_i = (1 + age_i)^(-discount/2)

m is a moving average: at rest as long as a change, and not 1/(1-mu) times that as DiLoCo's, so conf compares like with
like. While it is empty every change passes through. ``turn=0, shrink=0`` is the plain mean.

What differs from the paper. It corrects and applies each arrival by itself; here all that a round names, against the
momentum before it. A late peer's progress is carried to the present anchor, so what remains of its staleness is its
direction. Its five constants, its rate and its weight for delay were not to be had: these are ours (keep 0.5: within 60
degrees; trust, shrink and most 1: at equal lengths half of what would be full), and s_i is FedBuff's. Turn and rate are
of a small sweep (experiments/LOG.md): honest changes agree too little with a young momentum to be turned in full.

Source: Asif et al., "HeLoCo: Efficient asynchronous low-communication training under data and device heterogeneity",
2026, arXiv:2606.00271.
"""

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from decentral.optimizers.aggregation.base import aged_share, norm
from decentral.optimizers.aggregation.gram import cosine, direction, factor, ranges, weighted_sum
from decentral.optimizers.base import CHANGE, Channel, Preset, RoundInfo, State, key, rate
from decentral.optimizers.fedbuff import Buffered

__all__ = ["HeLoCo"]

# Shape suffixes: N = elements of one tensor or of the fragment, K = contributors.


@dataclass(frozen=True, slots=True)
class HeLoCo(Buffered):
    """Nesterov with a moving average, on corrected changes; state {"momentum": (N,)}."""

    name: ClassVar[str] = "heloco"
    equation: ClassVar[str] = "g_i turned to m ; G = mean(s_i*g_i) ; m <- mu*m + (1-mu)*G ; x <- x - lr*(G + mu*m)"
    source: ClassVar[str] = 'Asif et al., "HeLoCo", 2026, arXiv:2606.00271'
    preset: ClassVar[Preset] = Preset(
        hyper={"learning_rate": 1.0, "momentum": 0.9}, compressor="int8(block=4096)", exchange="gather"
    )
    lr: float = rate(1.0)
    momentum: float = key(0.9, "of the moving average; 0 is none", within="[0, 1)")
    keep: float = key(0.5, "cosine with the momentum from which a change stays as it is", within="[-1, 1]")
    turn: float = key(
        0.25, "strength with which one that agrees little is turned to the momentum; 0: not at all", within="[0, inf)"
    )
    shrink: float = key(
        1.0, "strength with which what points against the momentum is taken out; 0: not at all", within="[0, inf)"
    )
    most: float = key(1.0, "largest share of it that is taken out", within="[0, 1]")
    trust: float = key(1.0, "how much the momentum's length counts against that of a change", within="[0, inf)")
    discount: int = key(
        1, "power of 1/sqrt(1 + age) that a contribution counts; 0: late ones count in full", within="[0, 8]"
    )
    wait_for: int = key(2, "contributions that a round waits for", within="[1, inf)")
    grace: float = key(1.0, "seconds after those in which further ones are still taken", within="[0, 3600]")
    staleness: int = key(8, "outer steps by which a contribution may be late", within="[0, inf)")

    def channels(self) -> tuple[Channel, ...]:
        """The change of each contributor."""
        return (replace(CHANGE, combine="each"),)

    def init(self, anchor: Tensor) -> dict[str, Tensor]:
        """No momentum yet."""
        return {"momentum": torch.zeros_like(anchor)}

    def outer_step(
        self, anchor: Tensor, received: State, state: State, info: RoundInfo
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Make a step along the mean of the corrected changes."""
        change, rows_KN, before = torch.empty_like(anchor), received["change"], state["momentum"]
        whole = math.fsum(info.weights)
        told = zip(info.contributors, info.weights, strict=True)
        shares = [weight * aged_share(one.age, self.discount) / whole for one, weight in told]
        with torch.no_grad():
            for _, place in ranges(info, anchor.numel()):
                turned = [self._correct(row_N, before[place]) for row_N in rows_KN[:, place]]
                change[place] = weighted_sum(turned, shares)
            momentum = before * self.momentum + change * (1 - self.momentum)
            return anchor - (change + momentum * self.momentum) * self.lr, {"momentum": momentum}

    def _correct(self, change_N: Tensor, before_N: Tensor) -> Tensor:
        """Correct a tensor of one change, with the momentum before it."""
        (own_N, length), (toward_N, momentum) = direction(change_N), direction(before_N)
        if not toward_N.any() or not own_N.any():
            return change_N
        c, confidence = cosine(change_N, before_N), length / (length + self.trust * momentum)
        if c >= self.keep:
            return change_N
        if c < 0:
            return change_N - toward_N * factor(min(self.shrink * -c * confidence, self.most) * c * length)
        share = min(self.turn * (1 - c) * confidence, 1.0)
        turned_N = weighted_sum([own_N, toward_N], [1 - share, share])
        return turned_N * factor(length / norm(turned_N))
