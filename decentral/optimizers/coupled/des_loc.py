"""DES-LOC: parameters are averaged every H inner steps, the moments of the inner Adam every few rounds of that.

x <- mean(x_i) every H ;  u <- mean(u_i) every 3 H ;  v <- mean(v_i) every 6 H      u, v: Adam's first and second moment

A moment changes by its own half-life, ln .5 / ln beta, so averaging it as often as the parameters sends what has hardly
changed: with these periods a round costs 1.5 times DiLoCo's bytes in the mean. Left apart, as in local Adam, moments
drift; and a joiner that begins with none makes Adam's largest steps. Here the last means stay in the shared state, so a
peer that joins, starts over or was away has them from its donors. Who has no moments yet, or an inner optimizer that
has none, says so beside its offer and counts in no mean of them.

What differs from the paper. Its averages are of all workers; here of those who contributed, with the run's weights.
Moments are sent uncompressed there, and here by a compressor of their own, which must keep 95 % of them: "bf16" has the
range of float32, where fp16 would flush most of v to zero. So the change may be sparse, with feedback. A fragment's
periods are counted in its own outer steps.

Source: Iacob et al., "DES-LOC: Desynced Low Communication Adaptive Optimizers for Training Foundation Models", 2025,
arXiv:2505.22549.
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

__all__ = ["DESLoc"]


@dataclass(frozen=True, slots=True)
class DESLoc(OuterMethod):
    """Plain averaging at lr = 1; state {"exp_avg": (N,), "exp_avg_sq": (N,)}: the last means of Adam's moments."""

    name: ClassVar[str] = "des_loc"
    equation: ClassVar[str] = (
        "x <- x - lr*g ; every first_moment-th round u <- mean(u) ; second_moment-th: v <- mean(v)"
    )
    source: ClassVar[str] = 'Iacob et al., "DES-LOC", 2025, arXiv:2505.22549'
    preset: ClassVar[Preset] = Preset(hyper={"learning_rate": 1.0}, compressor="bf16", exchange="reduce")
    inner: ClassVar[bool] = True
    lr: float = 1.0
    first_moment: int = key(3, "rounds from one average of Adam's first moment to the next")
    second_moment: int = key(6, "rounds from one average of Adam's second moment to the next")
    moments: str = key(MOMENTS, "what compresses the moments, whatever the change is sent with; loses 5 % at most")

    def __post_init__(self) -> None:
        check_rate(self, self.lr)
        if min(self.first_moment, self.second_moment) < 1:
            raise ConfigError(f"{self}: first_moment and second_moment are rounds, 1 or more; 3 and 6 are usual")
        parse_compressor(self.moments)

    def channels(self) -> tuple[Channel, ...]:
        """The change, and both moments, by torch's names."""
        periods = {"exp_avg": self.first_moment, "exp_avg_sq": self.second_moment}
        return CHANGE, *(Channel(name, every, compressor=self.moments) for name, every in periods.items())

    states_sent = moments_sent
    summary = which_it_has
    state_weights = who_has_it
    init = no_means
    outer_step = averaged
    adopt = adopted
