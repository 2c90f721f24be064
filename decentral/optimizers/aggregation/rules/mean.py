"""The weighted mean of all: best where nobody is wrong, and one contributor can move it anywhere.

g = sum(w_i x_i) / sum(w_i)
"""

from dataclasses import dataclass
from typing import ClassVar

from decentral.optimizers.aggregation.rule import Aggregation, Needs
from decentral.optimizers.aggregation.sent import Sent

__all__ = ["Mean"]


@dataclass(frozen=True, slots=True)
class Mean(Aggregation):
    """Every contribution as it is."""

    name: ClassVar[str] = "mean"
    equation: ClassVar[str] = "g = sum w_i x_i / sum w_i"
    source: ClassVar[str] = 'McMahan et al., "Federated Averaging", 2016, arXiv:1602.05629'

    @property
    def needs(self) -> Needs:
        """Nothing."""
        return "nothing"

    @property
    def least(self) -> int:
        """Any number."""
        return 1

    def scales(self, sent: Sent) -> list[float]:
        """All 1."""
        return [1.0] * len(sent)
