"""Local SGD, or federated averaging: the next anchor is the mean of what peers trained to, and no state is kept.

g = mean(anchor - local) ;  x <- x - lr*g        lr = 1: x = mean(local)

One outer step at lr = 1 with H = 1 inner step of SGD is data-parallel SGD. With lr below 1 and one peer it is
Lookahead.

What differs from the papers. FedAvg weighs each client by its examples and draws a share of the clients for every
round; here whoever contributed counts alike, or by tokens with ``[outer] weighting = "tokens"``. lr is a key of its
own, as in the generalisation to server rates; both papers have 1. Inner moments stay with their peer: nothing averages
them.

Source: McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data" (FedAvg), 2016,
arXiv:1602.05629; Stich, "Local SGD Converges Fast and Communicates Little", 2018, arXiv:1805.09767. Lookahead: Zhang et
al., 2019, arXiv:1907.08610.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from decentral.optimizers.base import OuterMethod, Preset, RoundInfo, State, rate
from decentral.optimizers.steps import sgd

__all__ = ["LocalSGD"]


@dataclass(frozen=True, slots=True)
class LocalSGD(OuterMethod):
    """Plain averaging; no state."""

    name: ClassVar[str] = "local_sgd"
    equation: ClassVar[str] = "x <- x - lr*g ; at lr = 1 the mean of what peers trained to"
    source: ClassVar[str] = 'McMahan et al., "FedAvg", 2016, arXiv:1602.05629'
    preset: ClassVar[Preset] = Preset(
        hyper={"learning_rate": 1.0}, compressor="int8(block=4096)", exchange="reduce", norm_clip="median"
    )
    lr: float = rate(1.0)

    def outer_step(
        self, anchor: Tensor, received: State, state: State, info: RoundInfo
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """A step of lr towards the mean."""
        return sgd(anchor, received["change"], self.lr), {}
