"""The mean of the m contributions with the least Krum scores: Krum with less of the honest work thrown away.

g = weighted mean of the m with the least score_i ;  m = n - f - 2 unless it is given

What differs. The paper leaves m open up to n - f - 2; a well-known implementation returns the sum of the m, another
takes m = n - f with other scores.

Source: Blanchard et al., "Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent", 2017,
arXiv:1703.02757.
"""

from dataclasses import dataclass
from typing import ClassVar

from decentral.errors import ConfigError
from decentral.optimizers.aggregation.rule import Aggregation, check_f, chosen_scales
from decentral.optimizers.aggregation.rules.krum import krum_order
from decentral.optimizers.aggregation.sent import Sent
from decentral.optimizers.base import key

__all__ = ["MultiKrum"]


@dataclass(frozen=True, slots=True)
class MultiKrum(Aggregation):
    """A mean of those that lie together."""

    name: ClassVar[str] = "multi_krum"
    equation: ClassVar[str] = "g = mean of the m with the least Krum scores"
    source: ClassVar[str] = 'Blanchard et al., "Machine Learning with Adversaries", 2017, arXiv:1703.02757'
    f: int = key(1, "contributors that may send anything")
    m: int | None = key(None, "contributions that are averaged; unset: n - f - 2")

    def __post_init__(self) -> None:
        check_f(self, self.f)
        if self.m is not None and not (isinstance(self.m, int) and self.m >= 1):
            raise ConfigError(f"{self}: m contributions are averaged, want a whole number of 1 or more, or none")

    @property
    def least(self) -> int:
        """As Krum, and with m given f more than that."""
        return 2 * self.f + 3 if self.m is None else max(2 * self.f + 3, self.m + self.f)

    def scales(self, sent: Sent) -> list[float]:
        """Nothing of those that lie apart."""
        count = len(sent) - self.f - 2 if self.m is None else self.m
        return chosen_scales(sent, krum_order(sent, self.f)[:count])
