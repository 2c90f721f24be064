"""What an outer loop is given: its terms, what it acts on, and who is told.

The shipped peer, the simulator and the tests each give their own, and run the same loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

from decentral.manifest import Manifest
from decentral.replica.contribution import Contribution
from decentral.rounds.gossip import Swapped
from decentral.rounds.local_state import CommittedUpdate
from decentral.training.live_side import Parameters
from decentral.training.schedule.absence import Away
from decentral.training.schedule.sync_schedule import SyncSchedule
from decentral.training.swarm.side import SwarmSide

# Shape suffix: B = elements of all buffers, flat float32.


class LiveParameters(Parameters, Protocol):
    """The model that is being trained, with its buffers."""

    def check_trained(self) -> None:
        """Raise ConfigError when other parameters are trained than at the join."""
        ...

    def read_buffers(self) -> Tensor:
        """A copy of all buffers (B,)."""
        ...

    def write_buffers(self, flat_B: Tensor) -> None:
        """Overwrite all buffers."""
        ...


class LoopEvents(Protocol):
    """What is called when something happens at a boundary."""

    def waits(self, waiting: bool) -> None:
        """The loop begins or ends to stand still for a commit."""
        ...

    def held(self, seconds: float) -> None:
        """The loop stood still to copy parameters out for a contribution, or in after a commit."""
        ...

    def round_ended(self, update: CommittedUpdate, *, of_pairs: bool = False) -> None:
        """A commit was merged, or changed the membership; ``of_pairs``: in a gossip run, where it is no round."""
        ...

    def swap_begins(self, mine: Contribution) -> None:
        """The loop stands still for a gossip step."""
        ...

    def swapped(self, outcome: Swapped) -> None:
        """A gossip step was taken, and is in the live model."""
        ...

    def away(self, away: Away) -> None:
        """Progress of an absence is given up, in part or whole."""
        ...

    def restarted(self, why: str) -> None:
        """The live model was put back to the anchor because it held NaN or Inf."""
        ...


@dataclass(slots=True)
class LoopControl:
    """What people asked of a peer. Any thread may write it; the loop reads it at every boundary."""

    paused: bool = False  # contribute nothing
    leaving: bool = False  # wait for nothing any more
    finishes_after: float | None = None  # outer steps, beyond which the peer leaves; inf: asked before it had any


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopParts:
    """One peer's."""

    manifest: Manifest
    tokens_per_step: int
    checkpoint_every: int  # commits
    on_nan: Literal["stop", "restart"]  # raise, or put the live model back to the anchor
    model: LiveParameters
    schedule: SyncSchedule
    swarm: SwarmSide
    events: LoopEvents
    control: LoopControl
    clock: Callable[[], float]  # s, monotonic
    save: Callable[[SyncSchedule], bool]  # begin to write a checkpoint; False when this is no moment for one

    @contextmanager
    def holding(self) -> Iterator[None]:
        """Tell how long what is done inside held the training thread."""
        began = self.clock()
        yield
        self.events.held(self.clock() - began)

    @property
    def all_fragments(self) -> list[int]:
        """Of the live model."""
        return list(range(self.manifest.outer.fragments))

    @property
    def rests(self) -> bool:
        """Whether contributions are held back: by a person, or because the day's upload is used up."""
        return self.control.paused or bool(self.swarm.node.resting)

    def tail(self, fragment: int) -> bytes:
        """This peer's buffers as they are now, where ``fragment`` carries them."""
        tail = self.swarm.node.replica.tail
        return tail.pack(self.model.read_buffers()) if tail.nbytes(fragment) else b""

    def take_buffers(self, buffers_B: Tensor | None) -> None:
        """Bring shared buffers into the live model; None: there are none."""
        if buffers_B is not None:
            self.model.write_buffers(buffers_B)
