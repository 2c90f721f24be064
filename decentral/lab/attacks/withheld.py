"""Withheld frame: hostile peers offer a contribution, and then hand it to nobody.

delivered with chance 1 - share, each peer and round by itself

A round of this project ends without it: a record names only frames that a majority holds, and the divisor counts nobody
who is not named. What is left to harm is the number: a rule that was given f, and waits for 2f + 3 contributors,
finds fewer, and all honest peers lose what the hostile ones would have trained. Frames that are delivered are honest.

Source: the threat of this project's own protocol (docs/protocol.md); dropped uploads as in Lidin et al.,
"Incentivizing Permissionless Distributed Learning of LLMs", 2025, arXiv:2505.21684.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

from decentral.errors import ConfigError
from decentral.lab.attacks.attack import Attack
from decentral.optimizers.base import key

__all__ = ["Withheld"]


@dataclass(frozen=True, slots=True)
class Withheld(Attack):
    """An offer without a frame."""

    name: ClassVar[str] = "withheld"
    equation: ClassVar[str] = "delivered with chance 1 - share"
    source: ClassVar[str] = 'Lidin et al., "Incentivizing Permissionless Distributed Learning", 2025, arXiv:2505.21684'
    withholds: ClassVar[bool] = True
    share: float = key(0.5, "of the rounds in which a frame is kept back")

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ConfigError(f"{self}: share is of rounds, want it in (0, 1]; 1 withholds always")

    def delivers(self, num_hostile: int, generator: torch.Generator) -> list[bool]:
        """Drawn for each peer."""
        return (torch.rand(num_hostile, generator=generator) >= self.share).tolist()
