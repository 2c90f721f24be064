"""FedBuff: a round goes on with the first K contributions, and one that is late counts less.

s_i = (1 + age_i)^(-discount/2) ;  x <- x - lr * sum(s_i g_i) / K

The divisor is K, the number of contributions in the buffer, as in the paper, and not the sum of s_i, as in FLSim: three
contributions that are all old make a short step. With a weighting it is the sum of weights without their shares s_i.
``lr=1, discount=0`` is plain averaging.

What differs from the paper. Its buffer fills up over any time; here it is a round, which begins with ``wait_for``
contributions, takes those of the grace period, too (none in the paper), and at the deadline goes on with fewer: K is
then how many came. Its clients send a change of the anchor that they began with; here a late peer's progress is carried
to the present anchor, and ``age`` is the outer steps since it began. Its K is 10, of thousands of clients. Its secure
aggregation is no part of this.

Source: Nguyen et al., "Federated Learning with Buffered Asynchronous Aggregation", 2021, arXiv:2106.06639.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from decentral.optimizers.aggregation.base import aged_share, mean_share
from decentral.optimizers.base import Contributor, OuterMethod, Preset, RoundInfo, State, Timing, key, rate
from decentral.optimizers.steps import sgd

__all__ = ["FedBuff"]


class Buffered(OuterMethod):
    """A method whose rounds wait for some contributions and a little longer for others, and take what comes late."""

    __slots__ = ()
    wait_for: int
    grace: float
    staleness: int

    @property
    def timing(self) -> Timing:
        """As its keys say."""
        return Timing(self.wait_for, self.grace, self.staleness)


@dataclass(frozen=True, slots=True)
class FedBuff(Buffered):
    """A step along the mean of a buffer; no state."""

    name: ClassVar[str] = "fedbuff"
    equation: ClassVar[str] = "x <- x - lr*sum(s_i*g_i)/K ; s = (1 + age)^(-discount/2)"
    source: ClassVar[str] = 'Nguyen et al., "FedBuff", 2021, arXiv:2106.06639'
    preset: ClassVar[Preset] = Preset(
        hyper={"learning_rate": 1.0}, compressor="int8(block=4096)", exchange="gather", norm_clip="median"
    )
    lr: float = rate(1.0)
    discount: int = key(
        1, "power of 1/sqrt(1 + age) that a contribution counts; 0: late ones count in full", within="[0, 8]"
    )
    wait_for: int = key(2, "K: contributions that a round waits for", within="[1, inf)")
    grace: float = key(1.0, "seconds after those in which further ones are still taken", within="[0, 3600]")
    staleness: int = key(8, "outer steps by which a contribution may be late", within="[0, inf)")

    def weights(self, contributors: Sequence[Contributor], given: Sequence[float], state: State) -> Sequence[float]:
        """Return what is given, and less for a peer that is late."""
        return [weight * aged_share(one.age, self.discount) for one, weight in zip(contributors, given, strict=True)]

    def outer_step(
        self, anchor: Tensor, received: State, state: State, info: RoundInfo
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The mean, divided by how many there are instead of by their shares."""
        shares = [aged_share(one.age, self.discount) for one in info.contributors]
        return sgd(anchor, received["change"], self.lr * mean_share(info.weights, shares)), {}
