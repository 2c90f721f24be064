"""EDiT: contributions count by a softmax over their norms, and one that is far off what was usual counts nothing.

G_i = ||g_i|| ;  z_i = (G_i - mean) / sigma, an outlier when z_i > 3 max(1, std z) ;  w = softmax(-G / T) over the rest
g = sum w_i g_i ;  g <- min(1, clip / (||g|| + 1e-6)) g ;  m <- mu*m + g ;  x <- x - lr*(g + mu*m)
mean <- mean + a d ;  M2 <- (1-a) (M2 + a d d')  over the norms that are no outliers, a = 0.02

When all contributions are outliers nothing moves, and every live copy goes back to the anchor.

What differs from the paper. It works layer by layer; here by fragment, and [outer] fragments cuts them. Its detector is
one for each worker; here one over all, in the shared state, so that it survives a worker's leaving and is in every
snapshot. Outliers never enter it, where the authors' FSDP code lets one poison it. std z is learnt after the warm-up:
after two norms that are nearly equal the third one's z may be 500, and nothing would be an outlier for the next 400.
Norms are those that senders state beside their offers; the record names them, so that all peers weigh alike. Equal
norms give the plain mean.

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
from decentral.optimizers.base import OuterMethod, Preset, State, key
from decentral.optimizers.round_info import Contributor, RoundInfo
from decentral.optimizers.steps import check_momentum, check_rate, nesterov

__all__ = ["EDiT"]

_NORM = struct.Struct("<d")
_AVERAGING = 0.02  # a, of the moving mean and variance
_THRESHOLD = 3.0  # standard deviations
_MOST = 1e18  # of a norm, and of z: a square beyond float32 would stay in the state for ever


@dataclass(frozen=True, slots=True)
class EDiT(OuterMethod):
    """Nesterov on a guarded mean; state {"momentum": (N,), "usual": (4,)}: norms' count, mean, M2, and the mean z^2."""

    name: ClassVar[str] = "edit"
    equation: ClassVar[str] = "w = softmax(-||g_i||/T) without outliers ; m <- mu*m + g ; x <- x - lr*(g + mu*m)"
    source: ClassVar[str] = 'Cheng et al., "EDiT", 2024, arXiv:2412.07210'
    preset: ClassVar[Preset] = Preset(
        hyper={"learning_rate": 0.7, "momentum": 0.8}, compressor="int8(block=4096)", exchange="reduce"
    )
    lr: float = 0.7
    momentum: float = key(0.8, "of the outer step; 0 is none")
    temperature: float = key(1.0, "T of the softmax over norms: large counts all alike")
    clip: float = key(10.0, "largest norm of the mean of a fragment's changes")
    warmup: int = key(100, "norms that are learnt from before any is called an outlier")

    def __post_init__(self) -> None:
        check_rate(self, self.lr)
        check_momentum(self, self.momentum)
        if not (self.temperature > 0 and self.clip > 0 and self.warmup >= 2):
            raise ConfigError(f"{self}: temperature and clip must be above 0, warmup at least 2")

    def init(self, anchor: Tensor) -> dict[str, Tensor]:
        """No momentum, and no norm seen."""
        return {"momentum": torch.zeros_like(anchor), "usual": torch.zeros(4)}

    def summary(self, sent: Sequence[Tensor]) -> bytes:
        """The change's norm."""
        return _NORM.pack(norm(sent[0]))

    def weights(self, contributors: Sequence[Contributor], given: Sequence[float], state: State) -> Sequence[float]:
        """A softmax over the norms of those that are no outliers, times what is given."""
        norms = [_norm_of(one) for one in contributors]
        fit = [value for value in norms if not self._is_outlier(value, state["usual"])]
        if not fit:
            return [0.0] * len(norms)
        least = min(fit)
        return [
            0.0 if self._is_outlier(value, state["usual"]) else weight * exp((least - value) / self.temperature)
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
            usual = self._learnt(usual, _norm_of(one)) if weight > 0 else usual
        return after, {"momentum": momentum, "usual": usual.clone()}

    def _is_outlier(self, value: float, usual: Tensor) -> bool:
        count, mean, squares, deviation = usual.tolist()
        if not math.isfinite(value):
            return True
        if count < self.warmup or squares <= 0:
            return False
        return bool((value - mean) / math.sqrt(squares) > _THRESHOLD * max(1.0, math.sqrt(deviation)))

    def _learnt(self, usual: Tensor, value: float) -> Tensor:
        """The moving mean and variance with one more norm, in float64, stored as float32."""
        count, mean, squares, deviation = usual.tolist()
        if count == 0:
            return torch.tensor([1.0, value, 0.0, 0.0])
        off = value - mean
        if count >= self.warmup and squares > 0:
            z = min(abs(off) / math.sqrt(squares), _MOST)
            deviation += _AVERAGING * (z * z - deviation)
        mean += _AVERAGING * off
        squares = (1 - _AVERAGING) * (squares + _AVERAGING * off * (value - mean))
        return torch.tensor([count + 1, mean, squares, deviation])


def _norm_of(contributor: Contributor) -> float:
    """What it said of itself; one that said nothing, or what cannot be, is taken for infinitely large."""
    if len(contributor.summary) != _NORM.size:
        return math.inf
    (value,) = _NORM.unpack(contributor.summary)
    return float(value) if 0 <= value <= _MOST else math.inf
