"""FedOpt: an adaptive optimizer on the outside, one rate per coordinate: FedAdam, FedYogi or FedAdagrad.

m <- beta1*m + (1-beta1)*g
v <- beta2*v + (1-beta2)*g^2  (adam) ;  v - (1-beta2)*g^2*sign(v - g^2)  (yogi) ;  v + g^2  (adagrad)
x <- x - lr*m / (sqrt(v) + tau)

g is anchor - local, so it is subtracted; the paper's Delta is local - anchor, and it adds. v begins at tau^2, as the
paper asks for, and nothing is corrected for bias. tau is the degree of adaptivity: where g is far below it, this is SGD
with momentum at a rate between lr/(2*tau) and lr/tau; where g is far above, a coordinate moves by about lr whatever its
change is. So lr is a share of what a coordinate moves in a round, and one model's is not another's.

What differs from the paper. Contributors count alike, or by tokens ([outer] weighting). A change beyond 1e18 counts as
1e18, and v ends at 1e36: an infinity would stay in the state for ever, and be NaN after a round of yogi. On top of
AdamW inside, an adaptive outer step is reported to be unstable or worse than Nesterov (DiLoCo's ablation, where a tau
of 0.1 helped); the preset's is this paper's.

Source: Reddi et al., "Adaptive Federated Optimization", 2020, arXiv:2003.00295: beta1 0.9, beta2 0.99, tau 1e-3.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from decentral.errors import ConfigError
from decentral.optimizers.base import OuterMethod, Preset, RoundInfo, State, key, rate
from decentral.optimizers.steps import root

__all__ = ["FedOpt"]

_VARIANTS = ("adam", "yogi", "adagrad")
_LARGEST = 1e18  # of a change: its square, and sums of squares up to it, are within float32


@dataclass(frozen=True, slots=True)
class FedOpt(OuterMethod):
    """Adaptive outer step; state {"mean": (N,), "square": (N,)}: m and v."""

    name: ClassVar[str] = "fedopt"
    equation: ClassVar[str] = "m <- beta1*m + (1-beta1)*g ; v by variant ; x <- x - lr*m/(sqrt(v) + tau)"
    source: ClassVar[str] = 'Reddi et al., "Adaptive Federated Optimization", 2020, arXiv:2003.00295'
    preset: ClassVar[Preset] = Preset(
        hyper={"learning_rate": 0.01, "variant": "adam", "beta1": 0.9, "beta2": 0.99, "tau": 1e-3},
        compressor="int8(block=4096)",
        exchange="reduce",
        norm_clip="median",
    )
    lr: float = rate(0.01)
    variant: str = key("adam", "how squares are gathered: adam, yogi or adagrad")
    beta1: float = key(0.9, "of the moving mean of changes", within="[0, 1)")
    beta2: float = key(0.99, "of the moving mean of squares, for adam and yogi; 1 keeps them at tau^2", within="[0, 1]")
    tau: float = key(1e-3, "added to the root of squares, and the root they begin at", within="[1e-12, 1e12]")

    def __post_init__(self) -> None:
        OuterMethod.__post_init__(self)
        if self.variant not in _VARIANTS:
            raise ConfigError(f"{self}: variant must be one of {', '.join(_VARIANTS)}")

    def init(self, anchor: Tensor) -> dict[str, Tensor]:
        """No mean yet, and squares of tau."""
        with torch.no_grad():
            return {"mean": torch.zeros_like(anchor), "square": torch.full_like(anchor, self.tau * self.tau)}

    def outer_step(
        self, anchor: Tensor, received: State, state: State, info: RoundInfo
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Make an adaptive step."""
        with torch.no_grad():
            change = received["change"].clamp(-_LARGEST, _LARGEST)
            mean = state["mean"] * self.beta1 + change * (1 - self.beta1)
            square = self._next_second_moment(state["square"], change * change).clamp(max=_LARGEST * _LARGEST)
            move = mean / (root(square) + self.tau)
            return anchor - move * self.lr, {"mean": mean, "square": square}

    def _next_second_moment(self, square: Tensor, fresh: Tensor) -> Tensor:
        """v with one more round's squares in it."""
        if self.variant == "adagrad":
            return square + fresh
        if self.variant == "adam":
            return square * self.beta2 + fresh * (1 - self.beta2)
        return square - fresh * (1 - self.beta2) * torch.sign(square - fresh)
