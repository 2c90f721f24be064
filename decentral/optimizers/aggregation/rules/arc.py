"""Adaptive robust clipping: the longest contributions are shortened to the longest of the rest, then another rule.

k = floor(2 (f/n) (n - f)) ;  C = the (k+1)-th largest norm ;  y_i = x_i min(1, C / |x_i|) ;  g = then(y)

With ``then = "mean"`` only norms are needed, so that it works in a reduce. Needs n >= 2f + 1.

Source: Allouah et al., "The Vital Role of Gradient Clipping in Byzantine-Resilient Distributed Learning", 2024,
arXiv:2405.14432.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from decentral.optimizers.aggregation.registry import rule_after
from decentral.optimizers.aggregation.rule import Aggregation, Needs, check_f
from decentral.optimizers.aggregation.sent import Sent
from decentral.optimizers.base import key

__all__ = ["ARC"]


@dataclass(frozen=True, slots=True)
class ARC(Aggregation):
    """Shorten, then ask another rule."""

    name: ClassVar[str] = "arc"
    equation: ClassVar[str] = "y_i = x_i min(1, C / |x_i|), C the (k+1)-th largest norm, k = 2f(n-f)/n ; g = then(y)"
    source: ClassVar[str] = 'Allouah et al., "The Vital Role of Gradient Clipping", 2024, arXiv:2405.14432'
    f: int = key(1, "contributors that may send anything")
    then: str = key("rfa", "the rule for what was shortened: mean, nnm, or rfa(iterations=8)")

    def __post_init__(self) -> None:
        check_f(self, self.f)
        rule_after(self.then, self.f)

    @property
    def needs(self) -> Needs:
        """As the rule that follows, and norms."""
        after = rule_after(self.then, self.f).needs
        return "norms" if after == "nothing" else after

    @property
    def least(self) -> int:
        """So that some norm is honest."""
        return 2 * self.f + 1

    def scales(self, sent: Sent) -> list[float]:
        """What is left of each, times what the other rule makes of that."""
        longest = np.sort(sent.norm_K)[::-1]
        limit = float(longest[2 * self.f * (len(sent) - self.f) // len(sent)])
        short_K = sent.norm_K <= limit
        left_K = np.where(short_K, 1.0, limit / np.where(short_K, 1.0, sent.norm_K))
        after = rule_after(self.then, self.f).weigh(sent.shortened(left_K))
        return [float(left) * scale for left, scale in zip(left_K, after, strict=True)]
