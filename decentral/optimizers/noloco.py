"""NoLoCo: heavy-ball momentum on the average of a random pair, and a pull towards the pair's mean.

D = local - slow ;  m <- alpha*m + beta*mean(D) - gamma*(slow - mean(slow)) ;  slow <- slow + m

The paper prints minus beta, which with its own D climbs; its appendix and its code have plus. D is minus the change
that other methods send: here local - slow is sent, because that is what the equations say. In pairs the expected square
of the disagreement contracts when 0 < gamma < 2*(1 - alpha**2), see `check_pull`; the test computes it. The paper's own
bound is far too wide for large alpha, and the mean loss hides the divergence, so anything outside is refused. The
reference code's defaults (alpha 0.9, gamma 0.7) are outside.

Source: Kolehmainen et al., "NoLoCo: No-all-reduce Low Communication Training Method for Large Models", 2025,
arXiv:2506.10911: alpha 0.5, beta 0.7, gamma = beta as in its code.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from decentral.optimizers.base import CHANGE, Channel, Live, OuterMethod, Preset, RoundInfo, State, key
from decentral.optimizers.pair_averaging import check_pull, pull_to_mean

__all__ = ["NoLoCo"]


@dataclass(frozen=True, slots=True)
class NoLoCo(OuterMethod):
    """The pair step; state {"momentum": (N,)}, one per replica and never shared."""

    name: ClassVar[str] = "noloco"
    equation: ClassVar[str] = "m <- alpha*m + beta*mean(D) - gamma*(x - mean(x)) ; x <- x + m ; D = local - x"
    source: ClassVar[str] = 'Kolehmainen et al., "NoLoCo", 2025, arXiv:2506.10911'
    topology: ClassVar[Literal["all", "pair"]] = "pair"
    preset: ClassVar[Preset] = Preset(
        hyper={"alpha": 0.5, "beta": 0.7, "gamma": 0.7}, compressor="fp16", exchange="pair"
    )
    alpha: float = key(0.5, "momentum", within="[0, 1)")
    beta: float = key(0.7, "step along the pair's mean change", within="(0, inf)")
    gamma: float = key(0.7, "pull towards the pair's mean; below 2 * (1 - alpha**2)")

    def __post_init__(self) -> None:
        OuterMethod.__post_init__(self)
        check_pull(self, "gamma", "alpha")

    def init(self, slow: Tensor) -> dict[str, Tensor]:
        """No momentum yet."""
        return {"momentum": torch.zeros_like(slow)}

    def channels(self) -> tuple[Channel, ...]:
        """D, and the slow parameters beside it, which the pull needs of both."""
        return CHANGE, Channel("slow", combine="each", is_replica=True)

    def contribute(self, anchor_N: Tensor, local_N: Tensor) -> Tensor:
        """D, the paper's sign."""
        return local_N - anchor_N

    def states_sent(self, anchor_N: Tensor, live: Live, fragment: int) -> dict[str, Tensor]:
        """The slow parameters."""
        return {"slow": anchor_N}

    def outer_step(
        self, anchor: Tensor, received: State, state: State, info: RoundInfo
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The next slow parameters and momentum of this replica."""
        with torch.no_grad():
            pulled = pull_to_mean(received["slow"], self.gamma)
            momentum = state["momentum"] * self.alpha + received["change"] * self.beta - pulled
            return anchor + momentum, {"momentum": momentum}
