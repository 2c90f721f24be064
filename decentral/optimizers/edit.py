"""EDiT and A-EDiT: contributions count by a softmax over their norms, and one far off what was usual counts nothing.

Both make one step around that mean, and differ in when a contribution is due.
"""

from __future__ import annotations

import math
import statistics
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from decentral.optimizers.aggregation.base import LARGEST_NORM, NOTHING_LEARNT, is_outlier, norm, with_learnt
from decentral.optimizers.base import Contributor, Live, Preset, RoundInfo, Speaking, State, Timing, key, rate
from decentral.optimizers.mean import MOST
from decentral.optimizers.steps import exp, nesterov

__all__ = ["AEDiT", "EDiT"]

# Shape suffix: N = elements of one fragment, flat float32.

_NORM = struct.Struct("<d")
_UNEVEN = 2.0  # times its share of a whole that a part may be: what peers learn is not spread alike over parameters

# ---- EDiT ----
#
# G_i = ||g_i|| ;  w = softmax(-G / (T median G)) over those that are no outliers (`is_outlier`)
# g = sum w_i g_i ;  g <- min(1, clip / (||g|| + 1e-6)) g ;  m <- mu*m + g ;  x <- x - lr*(g + mu*m)
#
# When all contributions are outliers nothing moves, every live copy goes back to the anchor, and all peers are told;
# after ``relearn_after`` such rounds in a row the detector begins anew, so that a run whose norms have grown goes on.
#
# What differs from the paper. It works layer by layer; here by fragment, and [outer] fragments cuts them. Its detector
# is one for each worker; here one over all, in the shared state, so that it survives a worker's leaving and is in
# every snapshot. Outliers never enter it, where the authors' FSDP code lets one poison it. Equal norms give the plain
# mean. There the softmax is over norms as they are, -G / T. A norm grows with the root of the number of parameters, and
# the differences of norms with it: four peers that counted .30, .12, .29 and .29 at 0.64 M parameters counted .37, .04,
# .47 and .12 at 10.7 M. In units of the median norm the weights are those of a model of any size. It is the lower
# median: of two the longer one would choose the unit.
#
# In a gather every peer measures the norms of what came, to the same bits. In a reduce nobody has a whole change, and
# each owner measures its part of it:
#
# G_i = stated_i            where k part_i <= 2 stated_i      k = median over j of stated_j / part_j, 1 at least
# G_i = k part_i            else
#
# so that who states its norm as it is counts as in a gather, and who understates it is taken for what it sends. All
# but the owners know the stated norms only; from those the detector learns, each for four times their median at most.
#
# Source: Cheng et al., "EDiT: A Local-SGD-Based Efficient Distributed Training Method for Large Language Models",
# 2024, arXiv:2412.07210; constants as in intelligent-machine-learning/atorch (outer mu 0.8, a 0.02, threshold 3, clip
# 10).


@dataclass(frozen=True, slots=True)
class EDiT(Speaking):
    """Nesterov on a guarded mean; state {"momentum": (N,), "usual": (4,), "frozen": (1,)}: what norms are usual, and
    rounds in a row in which all were outliers.
    """

    name: ClassVar[str] = "edit"
    equation: ClassVar[str] = "w = softmax(-||g_i|| / (T*median)) ; m <- mu*m + g ; x <- x - lr*(g + mu*m)"
    source: ClassVar[str] = 'Cheng et al., "EDiT", 2024, arXiv:2412.07210'
    preset: ClassVar[Preset] = Preset(
        hyper={"learning_rate": 0.7, "momentum": 0.8}, compressor="int8(block=4096)", exchange="reduce"
    )
    measures: ClassVar[bool] = True
    lr: float = rate(0.7)
    momentum: float = key(0.8, "of the outer step; 0 is none", within="[0, 1)")
    relative_temperature: float = key(
        1.0, "T of the softmax, in units of the median norm: large counts all alike", within="(0, inf]"
    )
    clip: float = key(10.0, "largest norm of the mean of a fragment's changes", within="(0, inf]")
    warmup: int = key(100, "norms that are learnt from before any is called an outlier", within="[2, inf)")
    relearn_after: int = key(
        5, "rounds in a row of outliers alone, after which norms are learnt anew", within="[1, inf)"
    )

    def init(self, anchor: Tensor) -> dict[str, Tensor]:
        """Return no momentum, and no norm seen."""
        return {
            "momentum": torch.zeros_like(anchor),
            "usual": anchor.new_tensor(NOTHING_LEARNT),
            "frozen": anchor.new_zeros(1),
        }

    def says(self, live: Live, fragment: int, sent: Sequence[Tensor]) -> bytes:
        """Return the change's norm."""
        return _NORM.pack(norm(sent[0]))

    def weights(self, contributors: Sequence[Contributor], given: Sequence[float], state: State) -> Sequence[float]:
        """Return a softmax over the norms of those that are no outliers, in units of their lower median, times what is
        given. Where that is 0 all of them count alike.
        """
        norms = _norms_of(contributors)
        fits = [not is_outlier(value, state["usual"], self.warmup) for value in norms]
        fit = [value for value, is_fit in zip(norms, fits, strict=True) if is_fit]
        if not fit:
            return [0.0] * len(norms)
        least, unit = min(fit), statistics.median_low(fit)

        def share(value: float) -> float:
            return exp((least - value) / unit / self.relative_temperature) if unit > 0 else 1.0

        found = zip(norms, given, fits, strict=True)
        return [weight * share(value) if is_fit else 0.0 for value, weight, is_fit in found]

    def outer_step(
        self, anchor: Tensor, received: State, state: State, info: RoundInfo
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Make one Nesterov step along the clipped mean, and learn what norms are usual."""
        change = received["change"]
        shrunk = min(1.0, self.clip / (norm(change) + 1e-6))
        after, momentum = nesterov(anchor, change * shrunk, state["momentum"], self.lr, self.momentum)
        usual = state["usual"]
        for value, weight in zip(_learnable(info.contributors), info.weights, strict=True):
            usual = with_learnt(usual, value, self.warmup) if weight > 0 else usual
        return after, {"momentum": momentum, "usual": usual.clone(), "frozen": usual.new_zeros(1)}

    def nobody_counts(self, state: State, info: RoundInfo) -> State:
        """Count one more round of outliers alone; after some of them forget what was usual."""
        frozen = state["frozen"] + 1
        if float(frozen) < self.relearn_after:
            return {**state, "frozen": frozen}
        return {**state, "usual": frozen.new_tensor(NOTHING_LEARNT), "frozen": torch.zeros_like(frozen)}


# ---- A-EDiT, due by time ----
#
# EDiT whose peers train for a time and not for a number of steps, so that no fast one waits for a slow one.
#
# A contribution is due after ``seconds`` of training, or after ``inner.steps`` steps if those are made sooner, and
# never before ``least`` steps. All else is EDiT's.
#
# Peers of different speed then come to a round at one time with different numbers of steps behind their changes. A
# fast peer's change is longer for it, and the softmax over norms counts it less; ``[outer] weighting = "tokens"``
# counts it by the tokens behind it. ``seconds`` is the time of inner steps: waiting for a round is not counted.
#
# What differs from the paper, beside EDiT's differences. There time alone decides; here inner.steps bounds it, so that
# the bounds on what a peer brings back from an absence, which count in steps, hold: choose it for the fastest peer.
# Time is each peer's own, where the authors' code looks at the clock of one rank. Its option to mix step counts into
# the weights is the run's weighting.
#
# Source: the same paper and code; there 600 s, and at least 100 steps.


@dataclass(frozen=True, slots=True)
class AEDiT(EDiT):
    """EDiT's step and state, due by time."""

    name: ClassVar[str] = "a_edit"
    equation: ClassVar[str] = "edit, due after so many seconds of training, or inner.steps if those are sooner"
    source: ClassVar[str] = 'Cheng et al., "EDiT", 2024, arXiv:2412.07210'
    preset: ClassVar[Preset] = Preset(
        hyper={"learning_rate": 0.7, "momentum": 0.8, "seconds": 600.0},
        compressor="int8(block=4096)",
        exchange="reduce",
        demo={"outer": {"seconds": 5.0}},
    )
    seconds: float = key(
        600.0, "of training after which a contribution is due; inner.steps at the latest", within="(0, 86400]"
    )
    least: int = key(
        1, "inner steps that a contribution has at least, whatever the time; 100 is the authors'", within="[1, inf)"
    )

    @property
    def timing(self) -> Timing:
        """After the time, or the steps; never with fewer than ``least``."""
        return Timing(seconds=self.seconds, least_steps=self.least)


# ---- norms of contributions ----


def _norms_of(contributors: Sequence[Contributor]) -> list[float]:
    """Return the norm of each: as measured, or by the part that was, or as it said where nobody can measure it."""
    times = _whole_of_part(contributors)
    return [_norm_of(one, times) for one in contributors]


def _norm_of(contributor: Contributor, times: float) -> float:
    """Give what cannot be, or was not said, is taken for infinitely large."""
    if contributor.norm is not None:
        return _possible(contributor.norm)
    said = _norm_said_by(contributor)
    if contributor.part is None or times * contributor.part <= _UNEVEN * said:
        return said
    return _possible(times * contributor.part)


def _whole_of_part(contributors: Sequence[Contributor]) -> float:
    """How many times the norm of a part is that of the whole: at the lower median of the contributors."""
    ratios = [_norm_said_by(one) / one.part for one in contributors if one.part and _norm_said_by(one) < math.inf]
    return max(1.0, statistics.median_low(ratios)) if ratios else 1.0


def _learnable(contributors: Sequence[Contributor]) -> list[float]:
    """Return the norms, those that nobody measured up to ``MOST`` times the lower median: saying is free."""
    norms = _norms_of(contributors)
    most = MOST * statistics.median_low(norms) if norms else 0.0
    pairs = zip(contributors, norms, strict=True)
    return [min(value, most) if one.norm is None and most > 0 else value for one, value in pairs]


def _possible(norm_: float) -> float:
    return norm_ if norm_ <= LARGEST_NORM else math.inf


def _norm_said_by(contributor: Contributor) -> float:
    if len(contributor.summary) != _NORM.size:
        return math.inf
    (value,) = _NORM.unpack(contributor.summary)
    return float(value) if 0 <= value <= LARGEST_NORM else math.inf
