"""What a contribution carries: named vectors, each as long as the fragment."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from decentral.errors import ConfigError

__all__ = ["CHANGE", "PROPOSED", "Channel", "compressor_beside"]


@dataclass(frozen=True, slots=True)
class Channel:
    """One vector of a contribution. The first channel of a method is a flow unless it is a replica; others are states.

    Of a flow, what compression loses is owed and sent later (error feedback), and a norm clip shortens it. A state is
    sent whole again next time, so that nothing of it is owed. A replica is a state of a pair: parameters, which both
    tell each other, and on which their disagreement is measured.
    """

    name: str
    every: int = 1  # outer steps of a fragment from one time that it is sent to the next; the first channel: 1
    combine: Literal["mean", "each"] = "mean"  # each: the outer step sees all that came, see OuterMethod.outer_step
    is_replica: bool = False
    compressor: str | None = None  # a spelling; None: the run's, as always of the first channel

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ConfigError(f"channel {self.name}: every = {self.every}; want 1 or more outer steps")

    def is_due(self, step: int) -> bool:
        """Whether it is sent in outer step ``step`` of a fragment, counted from 0."""
        return (step + 1) % self.every == 0


def compressor_beside(channels: Sequence[Channel]) -> str | None:
    """What compresses the channels beside the first; None: the run's compressor.

    ConfigError unless it is the same for all of them: a frame says how many channels it has, and not which.
    """
    first, *others = channels
    if first.compressor is not None:
        raise ConfigError(f"channel {first.name}: compressor = {first.compressor!r}; the first channel has the run's")
    if len({one.compressor for one in others}) > 1:
        told = ", ".join(f"{one.name}: {one.compressor or 'as the run'}" for one in others)
        raise ConfigError(f"compressors of channels differ ({told}); give all channels beside the first the same one")
    return others[0].compressor if others else None


CHANGE = Channel("change")
"""What inner steps did to the parameters: anchor - local, a descent direction, unless the method says otherwise."""

PROPOSED = Channel("proposed", combine="each", is_replica=True)
"""The one vector of a gossip method that keeps its change to itself: where it would go alone (OuterMethod.proposal)."""
