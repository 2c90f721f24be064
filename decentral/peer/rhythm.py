"""When a peer contributes, waits and merges: the training side of a round, without a swarm.

Counts inner steps. Every ``H / P`` of them one fragment is due; what a commit brings is merged at a step boundary,
our own contribution ``overlap`` steps after it was sent, everybody else's at once.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from decentral.optimizers.merge import merge
from decentral.rounds.chain import Digest
from decentral.rounds.driver import Advance


class Parameters(Protocol):
    """The live parameters, fragment by fragment: a model, or what stands for one in a simulation."""

    def read(self, fragment: int) -> Tensor:
        """A copy of one fragment."""
        ...

    def write(self, fragment: int, flat_N: Tensor) -> None:
        """Overwrite one fragment."""
        ...


@dataclass(slots=True)
class Rhythm:
    """Step counters of one peer and the advances it has not merged yet."""

    interval: int  # inner steps between two contributions: H / number of fragments
    overlap: int  # tau: inner steps between sending a contribution and merging the commit that names it
    alpha: float | None  # weight of the local parameters at a merge; None: carry on from the anchor
    seen: Digest  # hash of the newest record that is merged into the live model
    since: int = 0  # inner steps that no commit accounts for
    sent_at: int | None = None  # value of ``since`` when the contribution in flight was taken
    num_merged: int = 0
    waiting: deque[Advance] = field(default_factory=deque)

    @property
    def due(self) -> bool:
        """Whether enough inner steps were made for a contribution, and none is in flight."""
        return self.sent_at is None and self.since >= self.interval and not self.waiting

    def due_early(self, pressed: tuple[Digest, float] | None, step_seconds: float) -> bool:
        """Whether to contribute what there is, because the round after the next inner step would go on without it.

        ``pressed``: the head after which others wait, and the seconds left. At least one inner step is needed, and a
        round whose beginning is not merged yet presses nobody.
        """
        ready = self.since > 0 and self.sent_at is None and not self.waiting
        return ready and pressed is not None and pressed[0] == self.seen and pressed[1] <= step_seconds

    def stepped(self) -> None:
        """One inner step was made."""
        self.since += 1

    def sent(self) -> None:
        """A contribution was taken from the live model just now."""
        self.sent_at = self.since

    def withdrawn(self) -> None:
        """The contribution in flight will not be named by any commit."""
        self.sent_at = None

    def mergeable(self) -> Advance | None:
        """The oldest advance if its time has come, taken off the queue."""
        if not self.waiting:
            return None
        named = self.waiting[0].contribution is not None
        early = named and self.sent_at is not None and self.since - self.sent_at < self.overlap
        return None if early else self.waiting.popleft()

    def merge(self, advance: Advance, model: Parameters) -> bool:
        """Bring one commit into the live model; returns whether parameters changed."""
        self.seen = advance.head
        if advance.before_N is None or advance.after_N is None:
            return False
        live_N = model.read(advance.fragment)
        model.write(advance.fragment, self._merged(advance, live_N, advance.before_N, advance.after_N))
        self.num_merged += 1
        return True

    def _merged(self, advance: Advance, live_N: Tensor, before_N: Tensor, after_N: Tensor) -> Tensor:
        mine = advance.contribution
        if mine is None:  # passed by: our progress stays, measured from the new anchor
            self.sent_at = None
            self.since += advance.owed_steps
            if advance.taken_N is not None:  # what an earlier life of this peer sent is in the anchor, and no progress
                live_N = torch.where(advance.taken_N, before_N, live_N)
            return merge(live_N, before_N, after_N, None)
        self.since -= self.sent_at if self.sent_at is not None else 0
        self.sent_at = None
        return merge(live_N, mine.local_N, after_N, self.alpha)
