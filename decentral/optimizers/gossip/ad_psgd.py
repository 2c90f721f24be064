"""AD-PSGD: average with one partner, and nothing else.

y = x - lr*D ;  x <- mean of both y      D = anchor - local

One vector crosses, y, and nothing is kept: the plain form of gossip, and the baseline of the others. An average never
widens the disagreement of replicas, so there is no bound to keep.

What differs from the paper. There one gradient step runs beside each average, from parameters that the average has
changed meanwhile; here H inner steps come before it, so that no change is stale. Its peers wait for nobody and fall
into two halves, of which one asks and one answers, against deadlock; here pairs are drawn for every round, and a
partner that does not come costs a step alone.

Push-sum (Assran et al., "Stochastic Gradient Push", 2019, arXiv:1811.10792) sends a weight w beside w*y, for graphs in
which a peer may be told without being heard. A pair is made by both or by neither, so every w stays 1 and push-sum is
this method (a test shows it): it has no name of its own.

Source: Lian, Zhang, Zhang, Liu, "Asynchronous Decentralized Parallel Stochastic Gradient Descent", 2018,
arXiv:1710.06952.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from decentral.optimizers.base import OuterMethod, Preset, State
from decentral.optimizers.channels import PROPOSED, Channel
from decentral.optimizers.gossip.pairs import pull_to_mean
from decentral.optimizers.round_info import RoundInfo
from decentral.optimizers.steps import check_rate

__all__ = ["ADPSGD"]


@dataclass(frozen=True, slots=True)
class ADPSGD(OuterMethod):
    """The pair's mean; no state."""

    name: ClassVar[str] = "ad_psgd"
    equation: ClassVar[str] = "x <- mean of the pair's (x - lr*D)"
    source: ClassVar[str] = 'Lian et al., "Asynchronous Decentralized Parallel SGD", 2018, arXiv:1710.06952'
    topology: ClassVar[Literal["all", "pair"]] = "pair"
    preset: ClassVar[Preset] = Preset(hyper={"learning_rate": 1.0}, compressor="fp16", exchange="pair")
    lr: float = 1.0

    def __post_init__(self) -> None:
        check_rate(self, self.lr)

    def channels(self) -> tuple[Channel, ...]:
        """y, and the change stays at home."""
        return (PROPOSED,)

    def proposal(self, anchor: Tensor, change: Tensor, state: State) -> Tensor:
        """y."""
        with torch.no_grad():
            return anchor - change * self.lr

    def outer_step(
        self, anchor: Tensor, received: State, state: State, info: RoundInfo
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """This replica at the pair's mean, up to what compression lost of the gap between the two."""
        with torch.no_grad():
            return self.proposal(anchor, received["change"], state) - pull_to_mean(received["proposed"], 1.0), {}
