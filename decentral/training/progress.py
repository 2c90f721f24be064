"""Progress that no commit accounts for yet: how it is read, how much of it counts, where training goes on meanwhile.

All are functions of a fragment's `Progress` and of the live model; `SyncSchedule` has one `Progress` for each fragment.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from decentral.optimizers import OuterMethod, carry
from decentral.optimizers.base import Live
from decentral.optimizers.steps import Taken, only_drawn
from decentral.tensors.device import on_device_of
from decentral.tensors.memory import values_of
from decentral.tensors.ops import carry_and_copy, copy_and_difference, copy_and_norm, difference, difference_and_norm
from decentral.training.live_side import Parameters

# Shape suffix: N = elements of one fragment, flat float32; live ones lie where the model's copies do.

# ---- progress after an absence ----
#
# A peer that was away may bring back as much as it would have sent in one round, or nothing.
#
# Progress is measured from an anchor. While a peer is away (paused, out of upload, cut off, asleep, too slow) the
# others move that anchor, in the same direction as a rule, so its own progress is applied a second time when it is
# carried on to the new one. Three DiLoCo peers on a quadratic, one of them away (largest ratio of the anchor's loss to
# its loss had the peer stayed away, over conditions and noise): after 1, 2, 3, 6, 10 missed rounds 3.0, 2.4, 1.3, 6.2,
# 89 when all is carried; 1.2, 1.2, 1.2, 4.4, 1.2 when it counts as one contribution of H steps; 1.0 when it is dropped.
# Hence both bounds: up to ``ROUNDS`` missed rounds it is scaled to H steps, beyond them it is dropped with its debt. So
# is what took more than as many rounds of inner steps, by a peer that trained on while one slow round passed: scaled to
# H steps of a thousand it would only dilute the others' mean (a ratio of 2.4 through real peers). Where no round passed
# a peer by, its progress is of the present anchor, and is shortened to its usual norm.
#
# Scaling by steps is the normalisation of Wang et al., "Tackling the Objective Inconsistency Problem in Heterogeneous
# Federated Optimization" (FedNova), 2020, arXiv:2007.07481, for peers that made more steps than the others.

ROUNDS = 2  # outer steps of a fragment that may pass a peer by before its progress is dropped; evidence above
NORM = 4.0  # times its usual norm, beyond which a peer's progress after an absence is dropped, too
USUAL = 9  # contributions in time whose median is the usual norm: odd, and a few minutes of a run


@dataclass(slots=True)
class Progress:
    """Progress of one fragment that no commit accounts for: its age, and where the live model holds it."""

    steps: int = 0  # inner steps since a commit named a contribution
    missed: int = 0  # outer steps of the fragment that passed by since then
    undrawn: int = 0  # inner steps before, behind parameters that contributions did not speak of: about, and at most
    overdue: int = 0  # outer steps that passed by then, one of all parameters among them
    rounding_N: Tensor | None = None  # live parameters as written, less what was to be written; None: no difference
    norms: deque[float] = field(default_factory=lambda: deque(maxlen=USUAL))  # of one round, when sent in time
    left_N: Tensor | None = None  # live parameters when a contribution was taken, where training went on elsewhere
    begun_N: Tensor | None = None  # and what it went on from, as the model holds it

    @property
    def behind(self) -> int:
        """Inner steps behind the oldest of it."""
        return self.steps + self.undrawn

    @property
    def usual_norm(self) -> float | None:
        """Median norm of a round's progress, of this peer's contributions in time; None while none moved anything."""
        return statistics.median_low(self.norms) if self.norms else None

    @property
    def is_elsewhere(self) -> bool:
        """True while training goes on from other parameters than those that a contribution was taken of."""
        return self.begun_N is not None

    def drop(self) -> None:
        """Forget all of it, as the live parameters are put to the anchor."""
        self.steps = self.missed = self.undrawn = self.overdue = 0

    def end_detour(self) -> None:
        """Note that the live parameters are overwritten."""
        self.left_N = self.begun_N = None

    def memory(self) -> dict[str, Any]:
        """Write down for a restart, as JSON, all but the tensors, which are the checkpoint's."""
        names = ("steps", "missed", "undrawn", "overdue")
        return {**{name: getattr(self, name) for name in names}, "norms": list(self.norms)}

    @classmethod
    def recall(cls, memory: Mapping[str, Any], rounding_N: Tensor | None) -> Progress:
        """Make it of its ``memory``."""
        norms = deque((float(norm) for norm in memory["norms"]), maxlen=USUAL)
        undrawn, overdue = (int(memory.get(name, 0)) for name in ("undrawn", "overdue"))  # an older one has none
        return cls(int(memory["steps"]), int(memory["missed"]), undrawn, overdue, rounding_N, norms)


@dataclass(frozen=True, slots=True)
class Away:
    """A fragment's progress of an absence: so many steps count, and the rest is dropped."""

    fragment: int
    missed: int  # outer steps of the fragment that passed by
    steps: int  # inner steps made
    counted: int  # inner steps that the contribution stands for; 0: dropped, the fragment starts from the anchor
    dropped_N: Tensor  # progress that is given up, flat float32, a descent direction

    def sentence(self) -> str:
        """Tell people."""
        passed = f"{self.missed} round{'s' if self.missed != 1 else ''} passed by: "
        if self.counted:
            return f"{passed}{self.steps} inner steps count as {self.counted}"
        return f"{passed}{self.steps} inner steps are dropped, training goes on from the anchor"

    def fields(self) -> dict[str, object]:
        """Return the fields of its event."""
        return {"fragment": self.fragment, "missed": self.missed, "steps": self.steps, "counted": self.counted}


def share_of(
    progress: Progress, norm: float, *, whole: int, held: int, overdue: int, stale: int = ROUNDS, rounds: int = 1
) -> float:
    """Return the share of a fragment's progress that may be sent: 1 for a peer that was not away, 0 to drop it.

    Args:
        progress: steps, missed rounds and usual norm of the fragment.
        norm: of its pseudo-gradient.
        whole: H, the inner steps between two outer steps of one fragment.
        held: inner steps made while a contribution was due and could not be sent.
        overdue: outer steps that passed by what is to be sent; 0: none, or only such as drew other parameters.
        stale: outer steps of the fragment that may pass by before it is dropped.
        rounds: that are behind what is sent as a rule: more than one where a method draws parameters.

    """
    if progress.missed > stale or (progress.missed and progress.steps > (stale + 1) * whole):
        return 0.0
    if not overdue and (progress.missed or held < whole):
        return 1.0
    each, by_steps = progress.usual_norm, min(1.0, rounds * whole / max(1, progress.behind))
    usual = None if each is None else each * rounds
    if not overdue:
        return by_steps if usual is None else min(1.0, usual / max(norm, usual))
    if each is not None and norm > NORM * each * max(rounds, 1 + progress.undrawn / whole):
        return 0.0
    return by_steps if usual is None or norm * by_steps <= usual else usual / norm


# ---- the update of a contribution ----
#
# How it is read off the live model, and how much of it counts.
#
# A method may draw the parameters that a round speaks of. What a peer learnt of the others stays in its live model, so
# what is behind a contribution is older than one round, in rounds that speak of all the most. The bound on an absence
# compares with as many rounds as the method says are behind it as a rule; while a peer that missed a round of all has
# parameters that it was not in time with, they are as old as its own last round of all.
#
# A round that draws some, and passes a peer by, leaves one in ``parts`` of its parameters late. Those are not told
# apart from the others when they are drawn again, and count in full.


@dataclass(slots=True)
class LocalUpdate:
    """A fragment's progress as far as a round draws its parameters: the vectors of DiLoCo's pseudo-gradient."""

    base_N: Tensor  # the parameters as written
    live_N: Tensor  # as they are now
    local_N: Tensor  # the same, as written where nothing is drawn
    norm: float  # of the pseudo-gradient, had all been drawn
    is_all: bool = True
    difference_N: Tensor | None = None  # the pseudo-gradient; None: nobody has asked for it yet
    memory: Sequence[tuple[int, int]] = ()  # state of the live model's memory, of one that a merge kept

    @property
    def gradient_N(self) -> Tensor:
        """The pseudo-gradient: what was written, less ``local_N``."""
        if self.difference_N is None:
            self.difference_N = difference(self.base_N, self.local_N)
        return self.difference_N


@dataclass(frozen=True, slots=True)
class Share:
    """The part of an update that counts, and the progress that is left once a commit named it."""

    fraction: float  # of the progress, in [0, 1]; 0: it is to be dropped
    steps: int  # inner steps that the contribution stands for
    away: Away | None  # what is dropped then
    undrawn: int  # see `Progress`, from then on
    overdue: int


# Training is held while a boundary reads and writes the live model, so it does that in as few passes as there can be:
# one each where the model lies in this process's memory as peers send it (`Parameters.in_place`). Of a model in another
# dtype or order, sharded, or on a device, copies are read and written, and the arithmetic lies in between.


def read_update(
    method: OuterMethod,
    model: Parameters,
    fragment: int,
    progress: Progress,
    step: int,
    anchor_N: Tensor,
    *,
    merged: LocalUpdate | None,
    late: bool,
) -> LocalUpdate:
    """Read what outer step ``step`` of the fragment draws of the progress.

    ``merged``: the update as a merge at this boundary kept it, see `carry_and_keep`. ``late``: the pseudo-gradient is
    made when somebody asks for it, and not while training stands still.
    """
    by_copy = progress.is_elsewhere or method.draws
    rows = None if by_copy else model.in_place(fragment)
    if rows is None:
        live_N = read_live(model, fragment, progress)
        return _drawn_update(method, step, as_written(on_device_of(anchor_N, live_N), progress.rounding_N), live_N)
    base_N = as_written(anchor_N, progress.rounding_N)
    if merged is not None and merged.base_N is base_N and merged.memory == _memory_state(rows):
        return merged
    if late:
        live_N, norm = copy_and_norm(rows, base_N)
        return LocalUpdate(base_N, live_N, live_N, norm)
    live_N, gradient_N, norm = copy_and_difference(rows, base_N)
    return LocalUpdate(base_N, live_N, live_N, norm, difference_N=gradient_N)


def _drawn_update(method: OuterMethod, step: int, base_N: Tensor, live_N: Tensor) -> LocalUpdate:
    places = method.drawn(step).places
    drawn_N = None if places is None else places(len(live_N))
    local_N, norm_of_all = (live_N, 1.0) if drawn_N is None else only_drawn(drawn_N, base_N, live_N)
    gradient_N, norm = difference_and_norm(base_N, local_N)
    return LocalUpdate(base_N, live_N, local_N, norm_of_all * norm, drawn_N is None, gradient_N)


def carry_and_keep(rows: Sequence[Tensor], sent_N: Tensor, anchor_N: Tensor) -> LocalUpdate:
    """Carry the live rows on to a new anchor where they lie; return the update that a contribution then begins with."""
    live_N, norm = carry_and_copy(rows, sent_N, anchor_N)
    return LocalUpdate(anchor_N, live_N, live_N, norm, memory=_memory_state(rows))


def as_written(anchor_N: Tensor, rounding_N: Tensor | None) -> Tensor:
    """Return what the live model held after an anchor was written to it; ``rounding_N``: by how much it rounds it."""
    return anchor_N if rounding_N is None else anchor_N + on_device_of(rounding_N, anchor_N)


def pseudo_gradient(progress: Progress, anchor_N: Tensor, local_N: Tensor) -> Tensor:
    """Return what was written of ``anchor_N``, less what the live model holds now."""
    return as_written(on_device_of(anchor_N, local_N), progress.rounding_N) - local_N


def _memory_state(rows: Sequence[Tensor]) -> Sequence[tuple[int, int]]:
    """Say where they lie, and how often torch has written to them."""
    return [(row.data_ptr(), row._version) for row in rows]


def change_to_send(method: OuterMethod, update: LocalUpdate, scale: float) -> tuple[Tensor | None, Tensor | None]:
    """Return the change that is sent, ``scale`` times as long, and the progress behind it where that is another.

    The change is None where it is the progress, and nobody has asked for that yet.
    """
    taken_N = Taken(lambda: update.local_N, lambda: update.gradient_N)
    change_N = method.contribute(update.base_N, taken_N)
    if scale == 1.0 and change_N is taken_N.progress:
        return update.difference_N, None
    change_N = values_of(change_N)
    return change_N if scale == 1.0 else change_N * scale, update.gradient_N


def measure_share(
    method: OuterMethod, step: int, fragment: int, progress: Progress, update: LocalUpdate, *, whole: int, held: int
) -> Share:
    """Say how much of an update of outer step ``step`` of the fragment counts; ``whole`` and ``held``: see `share_of`.

    The norm of one in time is remembered. All counts of NaN and Inf: the check of what is sent names the parameter.
    """
    drawn = method.drawn(step)
    rounds, most = drawn.rounds, drawn.most_rounds
    overdue, stale, fraction = _overdue(method, step, progress, rounds * whole), method.timing.staleness, 1.0
    if math.isfinite(update.norm):
        fraction = share_of(progress, update.norm, whole=whole, held=held, overdue=overdue, stale=stale, rounds=rounds)
    undrawn = 0 if update.is_all else min(progress.behind, (most - 1) * whole)
    left = (undrawn, overdue if undrawn else 0)
    if fraction == 1.0:
        if math.isfinite(update.norm) and update.norm > 0:
            progress.norms.append(update.norm / rounds)
        return Share(fraction, max(1, progress.steps), None, *left)
    stands_for = max(1, min(progress.steps, round(progress.behind * fraction / rounds)))
    dropped_N, of_all = update.gradient_N - update.gradient_N * fraction, max(1, round(progress.behind * fraction))
    away = Away(fragment, max(progress.missed, overdue), progress.behind, of_all, dropped_N)
    return Share(fraction, stands_for, away, *left)


def _overdue(method: OuterMethod, step: int, progress: Progress, usual: int) -> int:
    """Count rounds that passed the parameters by, one of all among them; ``usual``: inner steps behind as a rule."""
    before = progress.overdue if progress.behind > usual else 0
    looked_at = range(max(0, step - progress.missed), step)[: method.timing.staleness + 1]
    if progress.missed and (before or not looked_at or any(method.drawn(s).places is None for s in looked_at)):
        return before + progress.missed
    return before


def states_due(method: OuterMethod, step: int, anchor_N: Tensor, live: Live, fragment: int) -> tuple[Tensor, ...]:
    """Return the channels beside the change that are due in outer step ``step`` of the fragment, else zeros."""
    due = [channel for channel in method.channels()[1:] if channel.is_due(step)]
    states = method.states_sent(anchor_N, live, fragment) if due else {}
    return tuple(states.get(channel.name, torch.zeros_like(anchor_N)) for channel in due)


# ---- detours while a contribution is in flight ----
#
# Fragments of the live model may train on elsewhere while their contributions are in flight, and find the way back.
#
# A method may guess what the round in progress will bring, and train on from that. What is learnt there counts, where
# it began does not: when the round is decided, for this peer or without it, that is taken out again, and the commit is
# merged as if training had gone on from where the contribution was taken.


def read_live(model: Parameters, fragment: int, progress: Progress) -> Tensor:
    """Read the live parameters as if training had gone on where it was; bit for bit theirs if nothing was learnt."""
    live_N = model.read(fragment)
    if progress.begun_N is None or progress.left_N is None:
        return live_N
    return carry(live_N, progress.begun_N, progress.left_N)


def go_elsewhere(model: Parameters, fragment: int, progress: Progress, live_N: Tensor, wanted_N: Tensor | None) -> bool:
    """Train on from ``wanted_N``; None: from ``live_N``, as `read_live` gave it: back, where it was elsewhere.

    Returns whether the live model was written.
    """
    if wanted_N is None and not progress.is_elsewhere:
        return False
    progress.end_detour()
    model.write(fragment, live_N if wanted_N is None else wanted_N)
    if wanted_N is not None:
        progress.left_N, progress.begun_N = live_N, model.read(fragment)
    return True
