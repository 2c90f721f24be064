"""EDiT: contributions count by a softmax over their norms, and one that is far off what was usual counts nothing.

G_i = ||g_i|| ;  w = softmax(-G / T) over those that are no outliers (aggregation/usual_norm.py)
g = sum w_i g_i ;  g <- min(1, clip / (||g|| + 1e-6)) g ;  m <- mu*m + g ;  x <- x - lr*(g + mu*m)

When all contributions are outliers nothing moves, every live copy goes back to the anchor, and all peers are told;
after ``relearn_after`` such rounds in a row the detector begins anew, so that a run whose norms have grown goes on.

What differs from the paper. It works layer by layer; here by fragment, and [outer] fragments cuts them. Its detector is
one for each worker; here one over all, in the shared state, so that it survives a worker's leaving and is in every
snapshot. Outliers never enter it, where the authors' FSDP code lets one poison it. In a gather every peer measures the
norms of what came, to the same bits. In a reduce nobody has a whole change: norms are those that senders state, signed,
and the record names them; who states a small one counts more than it should. Equal norms give the plain mean.

Source: Cheng et al., "EDiT: A Local-SGD-Based Efficient Distributed Training Method for Large Language Models", 2024,
arXiv:2412.07210; constants as in intelligent-machine-learning/atorch (outer mu 0.8, a 0.02, threshold 3, clip 10).
"""

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from decentral.errors import ConfigError
from decentral.optimizers.aggregation.exponential import exp
from decentral.optimizers.aggregation.norm_clip import norm
from decentral.optimizers.aggregation.usual_norm import LARGEST, UNKNOWN, is_outlier, learnt
from decentral.optimizers.base import OuterMethod, Preset, State, key
from decentral.optimizers.round_info import Contributor, RoundInfo
from decentral.optimizers.steps import check_momentum, check_rate, nesterov

__all__ = ["EDiT"]

_NORM = struct.Struct("<d")


@dataclass(frozen=True, slots=True)
class EDiT(OuterMethod):
    """Nesterov on a guarded mean; state {"momentum": (N,), "usual": (4,), "frozen": (1,)}: what norms are usual, and
    rounds in a row in which all were outliers.
    """

    name: ClassVar[str] = "edit"
    equation: ClassVar[str] = "w = softmax(-||g_i||/T) without outliers ; m <- mu*m + g ; x <- x - lr*(g + mu*m)"
    source: ClassVar[str] = 'Cheng et al., "EDiT", 2024, arXiv:2412.07210'
    preset: ClassVar[Preset] = Preset(
        hyper={"learning_rate": 0.7, "momentum": 0.8}, compressor="int8(block=4096)", exchange="reduce"
    )
    measures: ClassVar[bool] = True
    lr: float = 0.7
    momentum: float = key(0.8, "of the outer step; 0 is none")
    temperature: float = key(1.0, "T of the softmax over norms: large counts all alike")
    clip: float = key(10.0, "largest norm of the mean of a fragment's changes")
    warmup: int = key(100, "norms that are learnt from before any is called an outlier")
    relearn_after: int = key(5, "rounds in a row of outliers alone, after which norms are learnt anew")

    def __post_init__(self) -> None:
        check_rate(self, self.lr)
        check_momentum(self, self.momentum)
        if not (self.temperature > 0 and self.clip > 0 and self.warmup >= 2):
            raise ConfigError(f"{self}: temperature and clip must be above 0, warmup at least 2")
        if self.relearn_after < 1:
            raise ConfigError(f"{self}: relearn_after is a number of rounds, 1 or more; 5 is usual")

    def init(self, anchor: Tensor) -> dict[str, Tensor]:
        """No momentum, and no norm seen."""
        return {"momentum": torch.zeros_like(anchor), "usual": torch.tensor(UNKNOWN), "frozen": torch.zeros(1)}

    def summary(self, sent: Sequence[Tensor]) -> bytes:
        """The change's norm."""
        return _NORM.pack(norm(sent[0]))

    def weights(self, contributors: Sequence[Contributor], given: Sequence[float], state: State) -> Sequence[float]:
        """A softmax over the norms of those that are no outliers, times what is given."""
        norms = [_norm_of(one) for one in contributors]
        fit = [value for value in norms if not is_outlier(value, state["usual"], self.warmup)]
        if not fit:
            return [0.0] * len(norms)
        least = min(fit)
        return [
            0.0 if is_outlier(value, state["usual"], self.warmup) else weight * exp((least - value) / self.temperature)
            for value, weight in zip(norms, given, strict=True)
        ]

    def outer_step(
        self, anchor: Tensor, received: State, state: State, info: RoundInfo
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """One Nesterov step along the clipped mean."""
        change = received["change"]
        shrunk = min(1.0, self.clip / (norm(change) + 1e-6))
        after, momentum = nesterov(anchor, change * shrunk, state["momentum"], self.lr, self.momentum)
        usual = state["usual"]
        for one, weight in zip(info.contributors, info.weights, strict=True):
            usual = learnt(usual, _norm_of(one), self.warmup) if weight > 0 else usual
        return after, {"momentum": momentum, "usual": usual.clone(), "frozen": torch.zeros(1)}

    def nobody_counts(self, state: State, info: RoundInfo) -> State:
        """One more round of outliers alone; after some of them what was usual is forgotten."""
        frozen = state["frozen"] + 1
        if float(frozen) < self.relearn_after:
            return {**state, "frozen": frozen}
        return {**state, "usual": torch.tensor(UNKNOWN), "frozen": torch.zeros(1)}


def _norm_of(contributor: Contributor) -> float:
    """As measured, or as it said; one that said nothing, or what cannot be, is taken for infinitely large."""
    if contributor.norm is not None:
        return contributor.norm if contributor.norm <= LARGEST else math.inf
    if len(contributor.summary) != _NORM.size:
        return math.inf
    (value,) = _NORM.unpack(contributor.summary)
    return float(value) if 0 <= value <= LARGEST else math.inf
