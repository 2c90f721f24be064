"""MT-DAO: parameters and the inner optimizer's slow momentum are averaged together; outside there is none.

inside, H times (QH-ADOPT): u <- b1*u + (1-b1)*n ;  x <- x - lr*((1-w)*n + w*u)      n: gradient over sqrt(v), clipped
every round: x <- mean(x_i) ;  every slow-th: u <- mean(u_i) ;  every variance-th: v <- mean(v_i)

An outer momentum remembers the last rounds, and what it says of the next one is as old as they are. Here the memory is
inside: u decays so slowly that its mean over the peers holds for a whole round, and every inner step of every peer is
drawn along the direction of all. 1-w of the fresh gradient keeps the steps quick. w must be tuned.

What differs from the paper. Its averages are of all workers, here of those who contributed, with the run's weights. How
often it averages v was not to be found: here as often as u, both periods keys. Its channels are float32; here u and
v have a compressor of their own, which must keep 95 % of them, so that the change may be sparse. A round costs three
times DiLoCo's bytes at these periods, half of that in bf16. An inner Adam or AdamW fits, too; its momentum is too fast
to outlive a round. Who has no moments yet says so beside its offer, and counts in no mean of them.

Source: Iacob et al., "MT-DAO: Multi-Timescale Distributed Adaptive Optimizers with Local Updates", 2025,
arXiv:2510.05361: b1 0.99 to 0.999, b2 0.9999, H 32, outer lr 1 without momentum.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from decentral.compressors import parse_compressor
from decentral.errors import ConfigError
from decentral.optimizers.base import Live, OuterMethod, Preset, State, key
from decentral.optimizers.channels import CHANGE, Channel
from decentral.optimizers.coupled.inner_moments import (
    MOMENTS,
    adopted,
    last_means,
    no_means,
    read_all,
    which_it_has,
    who_has_it,
)
from decentral.optimizers.round_info import Contributor, RoundInfo
from decentral.optimizers.steps import check_rate

__all__ = ["MTDAO"]


@dataclass(frozen=True, slots=True)
class MTDAO(OuterMethod):
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
    lr: float = 1.0
    slow: int = key(1, "rounds from one average of the slow momentum u to the next")
    variance: int = key(1, "rounds from one average of the second moment v to the next")
    moments: str = key(MOMENTS, "what compresses the moments, whatever the change is sent with; loses 5 % at most")

    def __post_init__(self) -> None:
        check_rate(self, self.lr)
        if min(self.slow, self.variance) < 1:
            raise ConfigError(f"{self}: slow and variance are rounds, 1 or more; 1 and 1 are usual")
        parse_compressor(self.moments)

    def channels(self) -> tuple[Channel, ...]:
        """The change, and both moments, by torch's names."""
        periods = {"exp_avg": self.slow, "exp_avg_sq": self.variance}
        return CHANGE, *(Channel(name, every, compressor=self.moments) for name, every in periods.items())

    def states_sent(self, anchor_N: Tensor, live: Live, fragment: int) -> dict[str, Tensor]:
        """The moments of this peer's inner optimizer."""
        return read_all(self.channels()[1:], live, fragment)

    def summary(self, sent: Sequence[Tensor]) -> bytes:
        """Which of the moments that are due it has."""
        return which_it_has(sent)

    def state_weights(
        self, place: int, contributors: Sequence[Contributor], weights: Sequence[float], state: State
    ) -> Sequence[float]:
        """Who has no moment yet counts nothing in its mean."""
        return who_has_it(place, contributors, weights)

    def init(self, anchor: Tensor) -> dict[str, Tensor]:
        """No means yet."""
        return no_means(self.channels()[1:], anchor)

    def outer_step(
        self, anchor: Tensor, received: State, state: State, info: RoundInfo
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The mean of the parameters, and of the moments that are due."""
        with torch.no_grad():
            return anchor - received["change"] * self.lr, last_means(received, state)

    def adopt(self, state: State, live: Live, fragment: int, fresh: Collection[str]) -> bool:
        """Every peer goes on with the swarm's momentum; a newcomer has it after its first step."""
        return adopted(state, live, fragment, fresh)
