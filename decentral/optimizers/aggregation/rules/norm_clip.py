"""Contributions longer than the typical one are shortened to it; ``outer.norm_clip = "median"`` is its older spelling.

g = sum(w_i x_i min(1, median |x| / |x_i|)) / sum(w_i)

The median is the lower one, of all contributors, those without a weight included. A wrong direction at the usual length
is not found: f of n still turn f/n of the result.

Source: Templar's SparseLoCo runs, "Covenant-72B", 2026; Lidin et al., "Incentivizing Permissionless Distributed
Learning of LLMs", 2025, arXiv:2505.21684. There it is per parameter, here per fragment.
"""

from dataclasses import dataclass
from typing import ClassVar

from decentral.optimizers.aggregation.rule import Aggregation, Needs, typical_scales
from decentral.optimizers.aggregation.sent import Sent

__all__ = ["NormClip"]


@dataclass(frozen=True, slots=True)
class NormClip(Aggregation):
    """No contribution is longer than the typical one."""

    name: ClassVar[str] = "norm_clip"
    equation: ClassVar[str] = "g = sum w_i x_i min(1, median|x| / |x_i|) / sum w_i"
    source: ClassVar[str] = 'Lidin et al., "Incentivizing Permissionless Distributed Learning", 2025, arXiv:2505.21684'

    @property
    def needs(self) -> Needs:
        """Norms: an owner of a reduce has those of its part."""
        return "norms"

    def weigh(self, sent: Sent) -> list[float]:
        """By the norms of all."""
        return typical_scales(sent)

    def scales(self, sent: Sent) -> list[float]:
        """By the norms of all."""
        return typical_scales(sent)
