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

from dataclasses import dataclass
from typing import ClassVar

from decentral.compressors import parse_compressor
from decentral.errors import ConfigError
from decentral.optimizers.base import OuterMethod, Preset, key
from decentral.optimizers.channels import CHANGE, Channel
from decentral.optimizers.coupled.inner_moments import (
    MOMENTS,
    adopted,
    averaged,
    moments_sent,
    no_means,
    which_it_has,
    who_has_it,
)
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

    states_sent = moments_sent
    summary = which_it_has
    state_weights = who_has_it
    init = no_means
    outer_step = averaged
    adopt = adopted
