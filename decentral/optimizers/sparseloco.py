"""SparseLoCo: plain SGD on the average of sparse pseudo-gradients; error feedback takes the place of momentum.

a = beta*e + (anchor - local) ;  send Q(top-k(a)) ;  e <- a - sent ;  x <- x - lr*mean(sent)

Only the last equation is here; the others are ``ErrorFeedback.send`` in `decentral.compressors.feedback`, and ``sgd``
makes the mean and the step in one pass. The mean divides by *all* contributors, as the
paper's formula does; its reference code divides each coordinate by those who sent it, a step up to R times larger, and
multiplies by lr twice, as e is filled and in the step: the same at lr = 1.

What differs besides. The preset clips whole norms to the median of the peers' (``[outer] norm_clip``); Templar scales
what each peer sent, per parameter. The code decays all weights by lr * weight decay before the step;
here that is the inner optimizer's. The preset has k = 64 of 4096 and beta 0.95, as Covenant-72B; the sweeps released
with the paper have 128 at H = 15. Two bits are `signmag2`'s, published ones are `sparseloco2`; tiles at a border are
cut smaller (`regions`), where the code looks for a divisor of the dimension, 64 at most.

Source: Sarfi et al., "Communication Efficient LLM Pre-training with SparseLoCo", 2025, arXiv:2508.15706; real outer
momentum on top of sparsity hurts there, so there is none.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from decentral.optimizers.base import OuterMethod, Preset, RoundInfo, State, rate
from decentral.optimizers.steps import sgd

__all__ = ["SparseLoCo"]


@dataclass(frozen=True, slots=True)
class SparseLoCo(OuterMethod):
    """Outer SGD without momentum; no state."""

    name: ClassVar[str] = "sparseloco"
    equation: ClassVar[str] = "x <- x - lr*g"
    source: ClassVar[str] = 'Sarfi et al., "SparseLoCo", 2025, arXiv:2508.15706'
    preset: ClassVar[Preset] = Preset(
        hyper={"learning_rate": 1.0},
        compressor="topk(k=64, chunk=4096) >> signmag2",
        feedback="ef(beta=0.95)",
        exchange="gather",
        norm_clip="median",
        # Twenty rounds are too few for 64 of 4096 entries at rate 1: a coordinate would be sent every 64 rounds, and
        # the average divides by four what one peer sent. Five times the bytes per peer still leave a reduction above
        # 500. Twice the inner rate gains 0.03 to 0.09 bits at 200 steps; a solo peer is as good with either up to
        # there, and 0.06 worse with it at 500: its baseline is not the best one then.
        demo={
            "inner": {"learning_rate": 2e-3},
            "outer": {"learning_rate": 2.5},
            "compressor": {"chain": "topk(k=160, chunk=4096) >> signmag2"},
        },
    )
    lr: float = rate(1.0)

    def outer_step(
        self, anchor: Tensor, received: State, state: State, info: RoundInfo
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Subtract lr times the average."""
        return sgd(anchor, received["change"], self.lr), {}
