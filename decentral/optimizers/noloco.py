"""NoLoCo: heavy-ball momentum on the average of a random pair, and a pull towards the pair's mean.

D = local - slow ;  m <- alpha*m + beta*mean(D) - gamma*(slow - mean(slow)) ;  slow <- slow + m

The paper prints minus beta, which with its own D climbs; its appendix and its code have plus. D is minus the
pseudo-gradient, and `pair_step` takes D (local - slow), because that is what the equations say.
In pairs the expected square of the disagreement contracts when 0 < gamma < 2*(1 - alpha**2). That is exact for an odd
number of replicas, one of which is left over at each step, and in the limit of many; an even number of them bears more:
for alpha 0.5, where the bound is 1.5, two replicas contract up to 3, four up to 1.8, eight up to 1.61, 64 up to 1.51
(the test computes it). Peers come and go, so the bound holds for all numbers. The paper's own is far too wide for large
alpha, and the mean loss hides the divergence, so anything outside is refused. The reference code's defaults (alpha 0.9,
gamma 0.7) are outside.

Source: Kolehmainen et al., "NoLoCo: No-all-reduce Low Communication Training Method for Large Models", 2025,
arXiv:2506.10911: alpha 0.5, beta 0.7, gamma = beta as in its code.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from decentral.errors import ConfigError

__all__ = ["NoLoCo"]


@dataclass(frozen=True, slots=True)
class NoLoCo:
    """The pair step; state {"momentum": (N,)}, one per replica and never shared."""

    name: ClassVar[str] = "noloco"
    equation: ClassVar[str] = "m <- alpha*m + beta*mean(D) - gamma*(x - mean(x)) ; x <- x + m ; D = local - x"
    source: ClassVar[str] = 'Kolehmainen et al., "NoLoCo", 2025, arXiv:2506.10911'
    alpha: float = 0.5
    beta: float = 0.7
    gamma: float = 0.7

    def __post_init__(self) -> None:
        if not 0 <= self.alpha < 1:
            raise ConfigError(f"{self}: alpha, the momentum, must be in [0, 1); 0.5 is usual")
        if not 0 < self.beta < float("inf"):
            raise ConfigError(f"{self}: beta, the step, must be above 0 and finite; 0.7 is usual")
        bound = 2 * (1 - self.alpha**2)
        if not 0 <= self.gamma < bound:
            raise ConfigError(
                f"{self}: replicas drift apart unless gamma < 2*(1 - alpha**2) = {bound:.3g}; "
                "lower gamma or alpha (0 switches the pull off)"
            )

    def init(self, slow: Tensor) -> dict[str, Tensor]:
        """No momentum yet."""
        return {"momentum": torch.zeros_like(slow)}

    def pair_step(
        self,
        slow: Tensor,
        mean_delta: Tensor,
        slow_own_sent: Tensor,
        slow_mean_sent: Tensor,
        state: Mapping[str, Tensor],
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The next slow parameters and state, all (N,); the arguments are untouched.

        ``mean_delta``: mean over the group of local - slow, as sent. ``slow_own_sent``: this replica's slow parameters
        as the others decoded them; ``slow_mean_sent``: the group's mean of those. The pull uses only what was sent,
        so the pulls of a group cancel and the mean of all replicas is kept, whatever compression did.
        """
        with torch.no_grad():
            pull = (slow_own_sent - slow_mean_sent) * self.gamma
            momentum = state["momentum"] * self.alpha + mean_delta * self.beta - pull
            return slow + momentum, {"momentum": momentum}
