"""DeMo: peers keep momenta of their own, send the few cosine coefficients that are large, and step by the mean's sign.

a_i = beta*a_i + change_i ;  q_i = the k largest cosine coefficients of each tile of a_i ;  a_i <- a_i - q_i
x <- x - lr*sign(mean(q_i))        step = "sign", or "mean":  x <- x - lr*mean(q_i)

The first line is the sender's error feedback and compressor: "ef(beta=0.999)" keeps in a_i what "dct(k=32,
chunk=4096)" does not send, so the momentum is decoupled, and only the second line is the outer step. Steps have one
size in every coordinate, so near an optimum x goes on to and fro by lr; lower it as the run ends, or take step =
"mean", as the preset does: between two rounds it has 30 inner steps, of which a sign of .001 keeps next to nothing.

What differs from the paper. It sends after every inner step, of the gradient; here after ``inner.steps`` of them, of
what they changed, by whatever optimizer is inside: DeMo itself is inner.steps = 1 on SGD, with lr = .001, k = 32 and
the sign. Coefficients are averaged over all contributors; the code averages each over those who sent it, which weighs
what few sent as much as what all did. Other signs come of it: with k = 32 of a Gaussian tile 2 % of four peers who have
nothing in common and 16 % of those who have nine tenths, of sixteen 6 % and 24 %. Inverse transforms are linear, so the
mean is taken after them. A coordinate whose mean is exactly zero stays. Decoupled weight
decay is the inner optimizer's, and tiles are `dct`'s, without a divisor of the dimensions.

Source: Peng, Quesnelle, Kingma, "DeMo: Decoupled Momentum Optimization", 2024, arXiv:2411.19870: beta 0.999, k 32 of
64x64.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from decentral.errors import ConfigError
from decentral.optimizers.base import OuterMethod, Preset, RoundInfo, State, key, rate

__all__ = ["DeMoSGD"]


@dataclass(frozen=True, slots=True)
class DeMoSGD(OuterMethod):
    """A step by the sign of the mean; no state: the momenta are the senders' feedback."""

    name: ClassVar[str] = "demo_sgd"
    equation: ClassVar[str] = "a <- beta*a + change ; send q = largest DCT of a ; a <- a - q ; x <- x - lr*sign(mean q)"
    source: ClassVar[str] = 'Peng, Quesnelle, Kingma, "DeMo", 2024, arXiv:2411.19870'
    preset: ClassVar[Preset] = Preset(
        # A sign of thirty inner steps has one length where they moved much and where they moved little: on the student
        # (two layers, 1,500 steps) it ended at .152 with .01, the mean at .098, a peer alone at .102.
        hyper={"learning_rate": 1.6, "step": "mean"},
        compressor="dct(k=160, chunk=4096)",
        feedback="ef(beta=0.999)",
        exchange="gather",
    )
    lr: float = rate(1e-3)
    step: str = key("sign", "what a coordinate moves by, times the rate: sign, or the mean itself")

    def __post_init__(self) -> None:
        OuterMethod.__post_init__(self)
        if self.step not in ("sign", "mean"):
            raise ConfigError(f"{self}: step must be sign or mean; sign is the paper's")

    def outer_step(
        self, anchor: Tensor, received: State, state: State, info: RoundInfo
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Move every coordinate by lr, or by lr times the mean."""
        with torch.no_grad():
            change = received["change"]
            return anchor - (torch.sign(change) if self.step == "sign" else change) * self.lr, {}
