"""Copycat: each hostile peer sends the places of another honest peer's frame, and hides that its values are the same.

x = x_i * (1 + noise * normal(0, 1)) for the honest peer i of its own

It trains nothing and is counted, paid where that is paid, and takes weight from those who trained. Only sparse frames
show it: places in common are few among honest peers (Covenant-72B's runs saw a share of 0.07 to 0.12 and put the bound
at 0.4), and all of a copy. Who copied whom is not to be seen from two frames: a bound on the overlap blames whoever is
later, so that a quick copier has its victim thrown out, unless all commit to a hash first, as offers here do.

Source: Lidin et al., "Incentivizing Permissionless Distributed Learning of LLMs", 2025, arXiv:2505.21684;
"Covenant-72B", 2026.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from decentral.errors import ConfigError
from decentral.lab.attacks.attack import Attack, Rule
from decentral.optimizers.base import key

__all__ = ["Copycat", "index_overlap"]


@dataclass(frozen=True, slots=True)
class Copycat(Attack):
    """The work of others, once more."""

    name: ClassVar[str] = "copycat"
    equation: ClassVar[str] = "x = x_i * (1 + noise * normal(0, 1))"
    source: ClassVar[str] = 'Lidin et al., "Incentivizing Permissionless Distributed Learning", 2025, arXiv:2505.21684'
    noise: float = key(0.1, "by what share of itself a value is changed")

    def __post_init__(self) -> None:
        if not 0 <= self.noise <= 1:
            raise ConfigError(f"{self}: noise is a share of each value, want it in [0, 1]; 0 is a plain copy")

    def changes(self, honest_KN: Tensor, num_hostile: int, rule: Rule, generator: torch.Generator) -> Tensor:
        """Of the honest peers in turn."""
        copied_FN = honest_KN[torch.arange(num_hostile) % len(honest_KN)]
        hidden_FN = torch.randn(copied_FN.shape, generator=generator, dtype=honest_KN.dtype)
        return copied_FN * (1 + self.noise * hidden_FN)


def index_overlap(one_N: Tensor, other_N: Tensor) -> float:
    """The share of the shorter frame's places that the other one has, too; 0 where one has none."""
    one, other = one_N != 0, other_N != 0
    fewest = min(int(one.sum()), int(other.sum()))
    return int((one & other).sum()) / fewest if fewest else 0.0
