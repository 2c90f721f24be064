"""DES-LOC and MT-DAO: beside the parameters, moments of the inner optimizer are averaged.

Each moment is a channel by torch's name, and its last mean a state, so that a peer that joins, starts over or was away
has it from its donors. Who has no moments yet, or an inner optimizer that has none, says so beside its offer and counts
in no mean of them. Moments have a compressor of their own, which must keep 95 % of them, so that the change may be
sparse, with feedback.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from decentral.compressors import parse_compressor
from decentral.optimizers.base import (
    CHANGE,
    Channel,
    Contributor,
    Live,
    OuterMethod,
    Preset,
    RoundInfo,
    Speaking,
    State,
    key,
    rate,
)
from decentral.optimizers.steps import sgd

__all__ = [
    "MOMENTS",
    "MTDAO",
    "DESLoc",
    "adopted",
    "average_moments",
    "moments_sent",
    "no_means",
    "which_it_has",
    "who_has_it",
]

# ---- hooks of methods that average moments ----
#
# The methods put them into their classes: ``adopt = adopted``.

MOMENTS = "bf16"  # the range of float32: fp16 would flush most of a variance to zero
SECOND = "exp_avg_sq"  # a variance

# Shape suffix: N = elements of one fragment, flat float32.


class _Averages(Protocol):
    @property
    def lr(self) -> float: ...


def moments_sent(method: OuterMethod, anchor_N: Tensor, live: Live, fragment: int) -> dict[str, Tensor]:
    """Return the moments that the inner optimizer has."""
    found = {channel.name: live.read_moment(channel.name, fragment) for channel in method.channels()[1:]}
    return {name: moment_N for name, moment_N in found.items() if moment_N is not None}


def which_it_has(method: OuterMethod, live: Live, fragment: int, sent: Sequence[Tensor]) -> bytes:
    """A summary, of the channels: a bit for each moment that is due. One of zeros stands for none."""
    moments = sent[1:]
    return bytes([sum(1 << place for place, moment_N in enumerate(moments) if moment_N.any())]) if moments else b""


def who_has_it(
    method: OuterMethod, place: int, contributors: Sequence[Contributor], weights: Sequence[float], state: State
) -> list[float]:
    """Count a peer that has no moment yet in no mean of it, rather than let it pull that to zero."""
    return [
        weight if one.summary and one.summary[0] >> place & 1 else 0.0
        for one, weight in zip(contributors, weights, strict=True)
    ]


def no_means(method: OuterMethod, anchor: Tensor) -> dict[str, Tensor]:
    """Before the first mean: zeros stand for none."""
    return {channel.name: torch.zeros_like(anchor) for channel in method.channels()[1:]}


def average_moments(
    method: _Averages, anchor: Tensor, received: State, state: State, info: RoundInfo
) -> tuple[Tensor, dict[str, Tensor]]:
    """The mean of the parameters, and of the moments that are due, the others as they were."""
    return sgd(anchor, received["change"], method.lr), _last_means(received, state)


def adopted(method: OuterMethod, state: State, live: Live, fragment: int, fresh: Collection[str]) -> bool:
    """Put the means that are new into the inner optimizer, all or none: it is asked again after every step, and before
    its first one it has no place for them, as one that has other moments never has for some.
    """
    means = [(name, state[name]) for name in fresh if name in state and state[name].any()]
    if any(live.read_moment(name, fragment) is None for name, _ in means):
        return False
    return all(live.write_moment(name, fragment, mean_N) for name, mean_N in means)


def _last_means(received: State, state: State) -> dict[str, Tensor]:
    """The state with the means that came; rounding of what was sent must not make a variance negative."""
    with torch.no_grad():
        kept = {name: received.get(name, mean_N).clone() for name, mean_N in state.items()}
        if SECOND in received and SECOND in kept:
            kept[SECOND].clamp_min_(0.0)
        return kept


# ---- DES-LOC ----
#
# Parameters are averaged every H inner steps, the moments of the inner Adam every few rounds of that.
#
# x <- mean(x_i) every H ;  u <- mean(u_i) every 3 H ;  v <- mean(v_i) every 6 H   u, v: Adam's first and second moment
#
# A moment changes by its own half-life, ln .5 / ln beta, so averaging it as often as the parameters sends what has
# hardly changed: with these periods a round costs 1.5 times DiLoCo's bytes in the mean. Left apart, as in local Adam,
# moments drift; and a joiner that begins with none makes Adam's largest steps.
#
# What differs from the paper. Its averages are of all workers; here of those who contributed, with the run's weights.
# Moments are sent uncompressed there, and here in "bf16" unless a key says otherwise: it has the range of float32,
# where fp16 would flush most of v to zero. A fragment's periods are counted in its own outer steps.
#
# Source: Iacob et al., "DES-LOC: Desynced Low Communication Adaptive Optimizers for Training Foundation Models", 2025,
# arXiv:2505.22549.


@dataclass(frozen=True, slots=True)
class DESLoc(Speaking):
    """Plain averaging at lr = 1; state {"exp_avg": (N,), "exp_avg_sq": (N,)}: the last means of Adam's moments."""

    name: ClassVar[str] = "des_loc"
    equation: ClassVar[str] = (
        "x <- x - lr*g ; every first_moment-th round u <- mean(u) ; second_moment-th: v <- mean(v)"
    )
    source: ClassVar[str] = 'Iacob et al., "DES-LOC", 2025, arXiv:2505.22549'
    preset: ClassVar[Preset] = Preset(hyper={"learning_rate": 1.0}, compressor="bf16", exchange="reduce")
    inner: ClassVar[bool] = True
    lr: float = rate(1.0)
    first_moment: int = key(3, "rounds from one average of Adam's first moment to the next", within="[1, inf)")
    second_moment: int = key(6, "rounds from one average of Adam's second moment to the next", within="[1, inf)")
    moments: str = key(MOMENTS, "what compresses the moments, whatever the change is sent with; loses 5 % at most")

    def __post_init__(self) -> None:
        OuterMethod.__post_init__(self)
        parse_compressor(self.moments)

    def channels(self) -> tuple[Channel, ...]:
        """The change, and both moments, by torch's names."""
        periods = {"exp_avg": self.first_moment, "exp_avg_sq": self.second_moment}
        return CHANGE, *(Channel(name, every, compressor=self.moments) for name, every in periods.items())

    states_sent = moments_sent
    says = which_it_has
    state_weights = who_has_it
    init = no_means
    outer_step = average_moments
    adopt = adopted


# ---- MT-DAO ----
#
# Parameters and the inner optimizer's slow momentum are averaged together; outside there is none.
#
# inside, H times (QH-ADOPT): u <- b1*u + (1-b1)*n ;  x <- x - lr*((1-w)*n + w*u)      n: gradient over sqrt(v), clipped
# every round: x <- mean(x_i) ;  every slow-th: u <- mean(u_i) ;  every variance-th: v <- mean(v_i)
#
# An outer momentum remembers the last rounds, and what it says of the next one is as old as they are. Here the memory
# is inside: u decays so slowly that its mean over the peers holds for a whole round, and every inner step of every
# peer is drawn along the direction of all. 1-w of the fresh gradient keeps the steps quick. w must be tuned.
#
# What differs from the paper. Its averages are of all workers, here of those who contributed, with the run's weights.
# How often it averages v was not to be found: here as often as u, both periods keys. Its channels are float32. A round
# costs three times DiLoCo's bytes at these periods, half of that in bf16. An inner Adam or AdamW fits, too; its
# momentum is too fast to outlive a round.
#
# Source: Iacob et al., "MT-DAO: Multi-Timescale Distributed Adaptive Optimizers with Local Updates", 2025,
# arXiv:2510.05361: b1 0.99 to 0.999, b2 0.9999, H 32, outer lr 1 without momentum.


@dataclass(frozen=True, slots=True)
class MTDAO(Speaking):
    """Plain averaging at lr = 1; state {"exp_avg": (N,), "exp_avg_sq": (N,)}: the last means of u and v."""

    name: ClassVar[str] = "mt_dao"
    equation: ClassVar[str] = "x <- x - lr*g ; every slow-th round u <- mean(u) ; variance-th: v <- mean(v)"
    source: ClassVar[str] = 'Iacob et al., "MT-DAO", 2025, arXiv:2510.05361'
    preset: ClassVar[Preset] = Preset(
        hyper={"learning_rate": 1.0},
        compressor="bf16",
        exchange="reduce",
        inner={"optimizer": "qh_adopt", "steps": 32},
    )
    inner: ClassVar[bool] = True
    lr: float = rate(1.0)
    slow: int = key(1, "rounds from one average of the slow momentum u to the next", within="[1, inf)")
    variance: int = key(1, "rounds from one average of the second moment v to the next", within="[1, inf)")
    moments: str = key(MOMENTS, "what compresses the moments, whatever the change is sent with; loses 5 % at most")

    def __post_init__(self) -> None:
        OuterMethod.__post_init__(self)
        parse_compressor(self.moments)

    def channels(self) -> tuple[Channel, ...]:
        """The change, and both moments, by torch's names."""
        periods = {"exp_avg": self.slow, "exp_avg_sq": self.variance}
        return CHANGE, *(Channel(name, every, compressor=self.moments) for name, every in periods.items())

    states_sent = moments_sent
    says = which_it_has
    state_weights = who_has_it
    init = no_means
    outer_step = average_moments
    adopt = adopted
