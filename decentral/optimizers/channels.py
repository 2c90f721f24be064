"""What a contribution carries: named vectors, each as long as the fragment."""

from dataclasses import dataclass
from typing import Literal

from decentral.errors import ConfigError

__all__ = ["CHANGE", "Channel"]


@dataclass(frozen=True, slots=True)
class Channel:
    """One vector of a contribution. The first channel of a method is a flow, the others are states.

    Of a flow, what compression loses is owed and sent later (error feedback), and a norm clip shortens it. A state is
    sent whole again next time, so that nothing of it is owed.
    """

    name: str
    every: int = 1  # outer steps of a fragment from one time that it is sent to the next; the first channel: 1
    combine: Literal["mean", "each"] = "mean"  # each: the outer step sees all that came, see OuterMethod.outer_step

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ConfigError(f"channel {self.name}: every = {self.every}; want 1 or more outer steps")

    def is_due(self, step: int) -> bool:
        """Whether it is sent in outer step ``step`` of a fragment, counted from 0."""
        return (step + 1) % self.every == 0


CHANGE = Channel("change")
"""What inner steps did to the parameters: anchor - local, a descent direction, unless the method says otherwise."""
