"""DES-LOC and MT-DAO: beside the parameters, moments of the inner optimizer are averaged.

Each moment is a channel by torch's name, and its last mean a state, so that a peer that joins, starts over or was away
has it from its donors. Who has no moments yet, or an inner optimizer that has none, says so beside its offer and counts
in no mean of them. Moments have a compressor of their own, which must keep 95 % of them, so that the change may be
sparse, with feedback.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

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

__all__ = ["MTDAO", "DESLoc"]

_MOMENTS = "bf16"  # the range of float32: fp16 would flush most of a variance to zero

# ---- methods that average moments ----

_SECOND = "exp_avg_sq"  # a variance

# Shape suffix: N = elements of one fragment, flat float32.


class AveragingMoments(Speaking):
    """Plain averaging at lr = 1, and of the moments that ``periods`` names; state: the last mean of each, by name."""

    __slots__ = ()
    inner: ClassVar[bool] = True
    lr: float
    moments: str  # a compressor

    @property
    def periods(self) -> Mapping[str, int]:
        """Return, by torch's name, the rounds from one average of a moment to the next."""
        raise NotImplementedError

    def __post_init__(self) -> None:
        OuterMethod.__post_init__(self)
        parse_compressor(self.moments)

    def channels(self) -> tuple[Channel, ...]:
        """Return the change, and the moments."""
        return CHANGE, *(Channel(name, every, compressor=self.moments) for name, every in self.periods.items())

    def states_sent(self, anchor_N: Tensor, live: Live, fragment: int) -> dict[str, Tensor]:
        """Return the moments that the inner optimizer has."""
        found = {name: live.read_moment(name, fragment) for name in self.periods}
        return {name: moment_N for name, moment_N in found.items() if moment_N is not None}

    def says(self, live: Live, fragment: int, sent: Sequence[Tensor]) -> bytes:
        """Return a bit for each moment that is due. One of zeros stands for none."""
        moments = sent[1:]
        return bytes([sum(1 << place for place, moment_N in enumerate(moments) if moment_N.any())]) if moments else b""

    def state_weights(
        self, place: int, contributors: Sequence[Contributor], weights: Sequence[float], state: State
    ) -> Sequence[float]:
        """Count a peer that has no moment yet in no mean of it, rather than let it pull that to zero."""
        return [
            weight if one.summary and one.summary[0] >> place & 1 else 0.0
            for one, weight in zip(contributors, weights, strict=True)
        ]

    def init(self, anchor: Tensor) -> dict[str, Tensor]:
        """Return zeros, which stand for none, before the first mean."""
        return {name: torch.zeros_like(anchor) for name in self.periods}

    def outer_step(
        self, anchor: Tensor, received: State, state: State, info: RoundInfo
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Take the mean of the parameters, and of the moments that are due, the others as they were."""
        return sgd(anchor, received["change"], self.lr), _last_means(received, state)

    def adopt(self, state: State, live: Live, fragment: int, fresh: Collection[str]) -> bool:
        """Put the means that are new into the inner optimizer, all or none: it is asked again after every step, and
        before its first one it has no place for them, as one that has other moments never has for some.
        """
        means = [(name, state[name]) for name in fresh if name in state and state[name].any()]
        if any(live.read_moment(name, fragment) is None for name, _ in means):
            return False
        return all(live.write_moment(name, fragment, mean_N) for name, mean_N in means)


def _last_means(received: State, state: State) -> dict[str, Tensor]:
    """The state with the means that came; rounding of what was sent must not make a variance negative."""
    with torch.no_grad():
        kept = {name: received.get(name, mean_N).clone() for name, mean_N in state.items()}
        if _SECOND in received and _SECOND in kept:
            kept[_SECOND].clamp_min_(0.0)
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
class DESLoc(AveragingMoments):
    """Plain averaging at lr = 1; state {"exp_avg": (N,), "exp_avg_sq": (N,)}: the last means of Adam's moments."""

    name: ClassVar[str] = "des_loc"
    equation: ClassVar[str] = (
        "x <- x - lr*g ; every first_moment-th round u <- mean(u) ; second_moment-th: v <- mean(v)"
    )
    source: ClassVar[str] = 'Iacob et al., "DES-LOC", 2025, arXiv:2505.22549'
    preset: ClassVar[Preset] = Preset(hyper={"learning_rate": 1.0}, compressor="bf16", exchange="reduce")
    lr: float = rate(1.0)
    first_moment: int = key(3, "rounds from one average of Adam's first moment to the next", within="[1, inf)")
    second_moment: int = key(6, "rounds from one average of Adam's second moment to the next", within="[1, inf)")
    moments: str = key(_MOMENTS, "what compresses the moments, whatever the change is sent with; loses 5 % at most")

    @property
    def periods(self) -> Mapping[str, int]:
        """Return those of its keys."""
        return {"exp_avg": self.first_moment, "exp_avg_sq": self.second_moment}


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
class MTDAO(AveragingMoments):
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
    lr: float = rate(1.0)
    slow: int = key(1, "rounds from one average of the slow momentum u to the next", within="[1, inf)")
    variance: int = key(1, "rounds from one average of the second moment v to the next", within="[1, inf)")
    moments: str = key(_MOMENTS, "what compresses the moments, whatever the change is sent with; loses 5 % at most")

    @property
    def periods(self) -> Mapping[str, int]:
        """Return those of its keys."""
        return {"exp_avg": self.slow, "exp_avg_sq": self.variance}
