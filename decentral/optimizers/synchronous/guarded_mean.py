"""EDiT's step around a mean that outliers have no part in: the hooks of methods that differ in when they are due.

G_i = ||g_i|| ;  w = softmax(-G / T) over those that are no outliers ;  g <- min(1, clip / (||g|| + 1e-6)) g ;  Nesterov

A method puts them into its class: ``weights = softmax_of_norms``. State {"momentum": (N,), "usual": (4,), "frozen":
(1,)}: what norms are usual, and rounds in a row in which all were outliers.

Source: Cheng et al., "EDiT", 2024, arXiv:2412.07210; what differs from it stands in `edit`.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from decentral.errors import ConfigError
from decentral.optimizers.aggregation.exponential import exp
from decentral.optimizers.aggregation.norm_clip import norm
from decentral.optimizers.aggregation.usual_norm import LARGEST, UNKNOWN, is_outlier, learnt
from decentral.optimizers.base import State
from decentral.optimizers.round_info import Contributor, RoundInfo
from decentral.optimizers.steps import check_momentum, check_rate, nesterov

__all__ = ["check_guard", "clipped_step", "nothing_usual", "own_norm", "relearnt", "softmax_of_norms"]

# Shape suffix: N = elements of one fragment, flat float32.

_NORM = struct.Struct("<d")


class Guarded(Protocol):
    """The keys that such a method has."""

    @property
    def lr(self) -> float: ...
    @property
    def momentum(self) -> float: ...
    @property
    def temperature(self) -> float: ...
    @property
    def clip(self) -> float: ...
    @property
    def warmup(self) -> int: ...
    @property
    def relearn_after(self) -> int: ...


def check_guard(method: Guarded) -> None:
    """Raise ConfigError where a key is out of bounds."""
    check_rate(method, method.lr)
    check_momentum(method, method.momentum)
    if not (method.temperature > 0 and method.clip > 0 and method.warmup >= 2):
        raise ConfigError(f"{method}: temperature and clip must be above 0, warmup at least 2")
    if method.relearn_after < 1:
        raise ConfigError(f"{method}: relearn_after is a number of rounds, 1 or more; 5 is usual")


def nothing_usual(method: Guarded, anchor: Tensor) -> dict[str, Tensor]:
    """No momentum, and no norm seen."""
    return {"momentum": torch.zeros_like(anchor), "usual": torch.tensor(UNKNOWN), "frozen": torch.zeros(1)}


def own_norm(method: Guarded, sent: Sequence[Tensor]) -> bytes:
    """The change's norm."""
    return _NORM.pack(norm(sent[0]))


def softmax_of_norms(
    method: Guarded, contributors: Sequence[Contributor], given: Sequence[float], state: State
) -> Sequence[float]:
    """A softmax over the norms of those that are no outliers, times what is given."""
    norms = [_norm_of(one) for one in contributors]
    fit = [value for value in norms if not is_outlier(value, state["usual"], method.warmup)]
    if not fit:
        return [0.0] * len(norms)
    least = min(fit)
    return [
        0.0 if is_outlier(value, state["usual"], method.warmup) else weight * exp((least - value) / method.temperature)
        for value, weight in zip(norms, given, strict=True)
    ]


def clipped_step(
    method: Guarded, anchor: Tensor, received: State, state: State, info: RoundInfo
) -> tuple[Tensor, dict[str, Tensor]]:
    """One Nesterov step along the clipped mean."""
    change = received["change"]
    shrunk = min(1.0, method.clip / (norm(change) + 1e-6))
    after, momentum = nesterov(anchor, change * shrunk, state["momentum"], method.lr, method.momentum)
    usual = state["usual"]
    for one, weight in zip(info.contributors, info.weights, strict=True):
        usual = learnt(usual, _norm_of(one), method.warmup) if weight > 0 else usual
    return after, {"momentum": momentum, "usual": usual.clone(), "frozen": torch.zeros(1)}


def relearnt(method: Guarded, state: State, info: RoundInfo) -> State:
    """One more round of outliers alone; after some of them what was usual is forgotten."""
    frozen = state["frozen"] + 1
    if float(frozen) < method.relearn_after:
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
