"""Variance-corrected gossip: an average of two has less variance than either, and each matrix gets it back.

y = x - lr*D ;  w = mean of both y ;  v = mean of both Var(y)      D = anchor - local
x <- mean(w) + (w - mean(w))*sqrt((v + eps)/(Var(w) + eps))        matrix by matrix; vectors stay at w; eps 1e-4

Weights of replicas that are not correlated lose variance in every average, n of them the n-th part, and deep networks
stop learning. Between replicas that agree the factor is 1, and equal ones are not touched to the last bit. The mean of
a matrix's values is kept; the mean of the replicas is not, for the step is not linear. eps is as large as the variance
of weights of standard deviation 0.01, and then halves the correction.

Variances are of what both were sent, unbiased, over all values of a tensor of two dimensions or more, as in the
authors' code, which has eps in both places. A peer alone is not corrected, for it lost nothing.

It is for studies. There each replica begins with weights of its own seed; in a run all begin with those of its first
peer, so that averages lose next to nothing, and founding one is refused.

What differs from the paper. It corrects averages of all neighbours, here there is one; ``strength`` is ours. Of a model
that is fine-tuned it puts back noise that the average took out: use `ad_psgd` there.

Source: Tian et al., "Vanishing Variance Problem in Fully Decentralized Neural-Network Systems", 2024, arXiv:2404.04616.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from decentral.optimizers.aggregation.base import mean_and_variance
from decentral.optimizers.base import Preset, RoundInfo, State, key, rate
from decentral.optimizers.pair_averaging import Proposing, pull_to_mean
from decentral.parameters import split

__all__ = ["VarianceCorrected"]

_EPS = 1e-4  # the authors' code


@dataclass(frozen=True, slots=True)
class VarianceCorrected(Proposing):
    """The pair's mean, spread out again; no state."""

    name: ClassVar[str] = "variance_corrected"
    equation: ClassVar[str] = "w = mean of the pair's (x - lr*D) ; x <- mean(w) + (w - mean(w))*sqrt(mean(Var)/Var(w))"
    source: ClassVar[str] = 'Tian et al., "Vanishing Variance Problem", 2024, arXiv:2404.04616'
    begins_apart: ClassVar[bool] = True
    preset: ClassVar[Preset] = Preset(hyper={"learning_rate": 1.0}, compressor="fp16", exchange="pair")
    lr: float = rate(1.0)
    strength: float = key(
        1.0, "of the variance that an average lost, what is given back; 0 is ad_psgd", within="[0, 1]"
    )

    def outer_step(
        self, anchor: Tensor, received: State, state: State, info: RoundInfo
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The mean of the pair, each matrix with the variance of one."""
        with torch.no_grad():
            sent_KN = received["proposed"]
            w_N = self.proposal(anchor, received["change"], state) - pull_to_mean(sent_KN, 1.0)
            if len(sent_KN) == 1 or not info.shapes:
                return w_N, {}
            sent = zip(*(split(sent_N, info.shapes) for sent_N in sent_KN), strict=True)
            pieces = zip(split(w_N, info.shapes), sent, strict=True)
            return torch.cat([self._spread(w, both).flatten() for w, both in pieces]), {}

    def _spread(self, w: Tensor, sent: Sequence[Tensor]) -> Tensor:
        """Give a tensor of the mean the variance of those it is the mean of."""
        if w.dim() < 2 or w.numel() < 2:
            return w
        kept = sum(map(_variance, sent)) / len(sent)
        factor = math.sqrt((kept + _EPS) / (_variance(torch.stack(list(sent)).sum(0) / len(sent)) + _EPS))
        if factor == 1.0 or self.strength == 0.0:
            return w
        mean, _ = mean_and_variance(w.flatten())
        return (w - mean) * (1 + self.strength * (factor - 1)) + mean


def _variance(value: Tensor) -> float:
    return mean_and_variance(value.flatten())[1]
