"""What a contribution speaks of, and how much of it counts: the pure part of taking one.

A method may draw the parameters that a round speaks of. What a peer learnt of the others stays in its live model, so
what is behind a contribution is older than one round, in rounds that speak of all the most. The bound on an absence
compares with as many rounds as the method says are behind it as a rule; while a peer that missed a round of all has
parameters that it was not in time with, they are as old as its own last round of all.

A round that draws some, and passes a peer by, leaves one in ``parts`` of its parameters late. Those are not told apart
from the others when they are drawn again, and count in full.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from decentral.optimizers import OuterMethod
from decentral.optimizers.base import Live
from decentral.optimizers.steps import only_drawn
from decentral.tensors.ops import difference, difference_and_norm
from decentral.training.schedule.absence import Away, Progress, share_of

__all__ = ["Counted", "Spoken", "counted", "sent_of", "spoken_of", "states_due"]

# Shape suffix: N = elements of one fragment, flat float32.


@dataclass(slots=True)
class Spoken:
    """The part of a fragment's progress that a round speaks of."""

    base_N: Tensor  # the parameters as written
    live_N: Tensor  # as they are now
    local_N: Tensor  # the same, as written where nothing is drawn
    norm: float  # of the pseudo-gradient, had all been drawn
    is_all: bool = True
    made_N: Tensor | None = None  # the pseudo-gradient; None: nobody has asked for it yet

    @property
    def gradient_N(self) -> Tensor:
        """What was written, less ``local_N``."""
        if self.made_N is None:
            self.made_N = difference(self.base_N, self.local_N)
        return self.made_N


@dataclass(frozen=True, slots=True)
class Counted:
    """How much of it counts, and what is behind the rest once a commit named it."""

    fragment: int
    share: float  # of the progress, in [0, 1]; 0: it is to be dropped
    steps: int  # inner steps that the contribution stands for
    away: Away | None  # what is given up then
    undrawn: int  # see `Progress`, from then on
    overdue: int


def spoken_of(method: OuterMethod, step: int, base_N: Tensor, live_N: Tensor) -> Spoken:
    """What outer step ``step`` of the fragment speaks of; ``base_N``: the parameters as written."""
    drawn_N = method.drawn(step, len(live_N))
    local_N, norm_of_all = (live_N, 1.0) if drawn_N is None else only_drawn(drawn_N, base_N, live_N)
    gradient_N, norm = difference_and_norm(base_N, local_N)
    return Spoken(base_N, live_N, local_N, norm_of_all * norm, drawn_N is None, gradient_N)


def sent_of(method: OuterMethod, spoken: Spoken, scale: float) -> tuple[Tensor | None, Tensor | None]:
    """What is sent, ``scale`` times as long, and the progress that it was made of where that is not what is sent.

    The first is None where it is the progress, and nobody has asked for that yet.
    """
    own = method.overrides("contribute")
    if scale == 1.0 and not own:
        return spoken.made_N, None
    change_N = method.contribute(spoken.base_N, spoken.local_N) if own else spoken.gradient_N
    return change_N if scale == 1.0 else change_N * scale, spoken.gradient_N


def counted(
    method: OuterMethod, step: int, fragment: int, progress: Progress, spoken: Spoken, *, whole: int, held: int
) -> Counted:
    """How much counts of what outer step ``step`` of the fragment speaks of; ``whole`` and ``held``: see `share_of`.

    The norm of what is in time is remembered. All counts of NaN and Inf: the check of what is sent names the parameter.
    """
    rounds, most = method.rounds_behind(step)
    overdue, stale, share = _overdue(method, step, progress, rounds * whole), method.max_staleness, 1.0
    if math.isfinite(spoken.norm):
        share = share_of(progress, spoken.norm, whole=whole, held=held, overdue=overdue, stale=stale, rounds=rounds)
    undrawn = 0 if spoken.is_all else min(progress.behind, (most - 1) * whole)
    left = (undrawn, overdue if undrawn else 0)
    if share == 1.0:
        if math.isfinite(spoken.norm) and spoken.norm > 0:
            progress.norms.append(spoken.norm / rounds)
        return Counted(fragment, share, max(1, progress.steps), None, *left)
    stands_for = max(1, min(progress.steps, round(progress.behind * share / rounds)))
    dropped_N, of_all = spoken.gradient_N - spoken.gradient_N * share, max(1, round(progress.behind * share))
    away = Away(fragment, max(progress.missed, overdue), progress.behind, of_all, dropped_N)
    return Counted(fragment, share, stands_for, away, *left)


def _overdue(method: OuterMethod, step: int, progress: Progress, usual: int) -> int:
    """Rounds that passed by the parameters, one of all among them; ``usual``: inner steps behind them as a rule."""
    before = progress.overdue if progress.behind > usual else 0
    looked_at = range(max(0, step - progress.missed), step)[: method.max_staleness + 1]
    if progress.missed and (before or not looked_at or any(method.drawn(s, 1) is None for s in looked_at)):
        return before + progress.missed
    return before


def states_due(method: OuterMethod, step: int, anchor_N: Tensor, live: Live, fragment: int) -> tuple[Tensor, ...]:
    """The channels beside the change that are due in outer step ``step`` of the fragment; zeros where none is."""
    due = [channel for channel in method.channels()[1:] if channel.is_due(step)]
    told = method.states_sent(anchor_N, live, fragment) if due else {}
    return tuple(told.get(channel.name, torch.zeros_like(anchor_N)) for channel in due)
