"""Nearest-neighbour mixing: each contribution becomes the mean of the n - f nearest ones, then another rule decides.

y_i = weighted mean of the n - f contributions nearest to x_i, itself included ;  g = then(y)

Honest contributions come closer to one another, which rules want whose peers have different data. Needs n >= 2f + 1;
of equally near ones the first is taken.

Source: Allouah et al., "Fixing by Mixing: A Recipe for Optimal Byzantine ML under Heterogeneity", 2023,
arXiv:2302.01772.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from decentral.optimizers.aggregation.mixing import scales_through
from decentral.optimizers.aggregation.registry import rule_after
from decentral.optimizers.aggregation.rule import Aggregation, check_f
from decentral.optimizers.aggregation.sent import Sent
from decentral.optimizers.base import key

__all__ = ["NNM"]


@dataclass(frozen=True, slots=True)
class NNM(Aggregation):
    """Mix, then ask another rule."""

    name: ClassVar[str] = "nnm"
    equation: ClassVar[str] = "y_i = mean of the n-f nearest to x_i ; g = then(y)"
    source: ClassVar[str] = 'Allouah et al., "Fixing by Mixing", 2023, arXiv:2302.01772'
    f: int = key(1, "contributors that may send anything")
    then: str = key("rfa", "the rule for the mixtures: krum, or rfa(iterations=8)")

    def __post_init__(self) -> None:
        check_f(self, self.f)
        rule_after(self.then, self.f)

    @property
    def least(self) -> int:
        """So that most of every mixture may be honest."""
        return 2 * self.f + 1

    def scales(self, sent: Sent) -> list[float]:
        """What each counts through the mixtures that it is in."""
        order_KK = np.argsort(sent.squared_distances_KK(), axis=1, kind="stable")
        nearest = [order_K[: len(sent) - self.f].tolist() for order_K in order_KK]
        share_KK = np.stack([sent.mean_shares(places) for places in nearest])
        return scales_through(sent, share_KK, sent.weight_K, rule_after(self.then, self.f))
