"""Progress that no commit accounts for yet: how it is read, how much of it counts, where training goes on meanwhile."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from decentral.optimizers import OuterMethod, carry
from decentral.optimizers.base import Live
from decentral.optimizers.steps import Taken, only_drawn
from decentral.tensors.device import beside
from decentral.tensors.lazy import values_of
from decentral.tensors.ops import (
    carry_and_copy,
    carry_rows,
    copy_and_difference,
    copy_and_norm,
    difference,
    difference_and_norm,
)
from decentral.training.live_side import Parameters

__all__ = [
    "NORM",
    "ROUNDS",
    "Away",
    "Counted",
    "Detours",
    "Passes",
    "Progress",
    "Spoken",
    "as_written",
    "counted",
    "sent_of",
    "share_of",
    "spoken_of",
    "states_due",
]

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
    """What the live parameters of one fragment have learnt that no commit accounts for."""

    steps: int = 0  # inner steps since a commit named a contribution
    missed: int = 0  # outer steps of the fragment that passed by since then
    undrawn: int = 0  # inner steps before, behind parameters that contributions did not speak of: about, and at most
    overdue: int = 0  # outer steps that passed by then, one of all parameters among them
    rounding_N: Tensor | None = None  # live parameters as written, less what was to be written; None: no difference
    norms: deque[float] = field(default_factory=lambda: deque(maxlen=USUAL))  # of one round, when sent in time

    @property
    def behind(self) -> int:
        """Inner steps behind the oldest of it."""
        return self.steps + self.undrawn

    @property
    def usual_norm(self) -> float | None:
        """Median norm of a round's progress, of this peer's contributions in time; None while none moved anything."""
        return statistics.median_low(self.norms) if self.norms else None

    def given_up(self) -> None:
        """The live parameters are put to the anchor."""
        self.steps = self.missed = self.undrawn = self.overdue = 0

    def memory(self) -> dict[str, Any]:
        """What a restart has to know, as JSON; the rounding is a tensor of the checkpoint."""
        names = ("steps", "missed", "undrawn", "overdue")
        return {**{name: getattr(self, name) for name in names}, "norms": list(self.norms)}

    @classmethod
    def recalled(cls, memory: Mapping[str, Any], rounding_N: Tensor | None) -> Progress:
        """The progress that ``memory`` tells of."""
        norms = deque((float(norm) for norm in memory["norms"]), maxlen=USUAL)
        undrawn, overdue = (int(memory.get(name, 0)) for name in ("undrawn", "overdue"))  # an older one has none
        return cls(int(memory["steps"]), int(memory["missed"]), undrawn, overdue, rounding_N, norms)


@dataclass(frozen=True, slots=True)
class Away:
    """What came of one fragment's progress after an absence."""

    fragment: int
    missed: int  # outer steps of the fragment that passed by
    steps: int  # inner steps made
    counted: int  # inner steps that the contribution stands for; 0: dropped, the fragment starts from the anchor
    dropped_N: Tensor  # progress that is given up, flat float32, a descent direction

    def sentence(self) -> str:
        """For people."""
        passed = f"{self.missed} round{'s' if self.missed != 1 else ''} passed by: "
        if self.counted:
            return f"{passed}{self.steps} inner steps count as {self.counted}"
        return f"{passed}{self.steps} inner steps are dropped, training goes on from the anchor"

    def fields(self) -> dict[str, object]:
        """As an event tells it."""
        return {"fragment": self.fragment, "missed": self.missed, "steps": self.steps, "counted": self.counted}


def share_of(
    progress: Progress, norm: float, *, whole: int, held: int, overdue: int, stale: int = ROUNDS, rounds: int = 1
) -> float:
    """The share of a fragment's progress that may be sent: 1 for a peer that was not away, 0 when it is to be dropped.

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


# ---- what a contribution speaks of ----
#
# And how much of it counts: the pure part of taking one.
#
# A method may draw the parameters that a round speaks of. What a peer learnt of the others stays in its live model, so
# what is behind a contribution is older than one round, in rounds that speak of all the most. The bound on an absence
# compares with as many rounds as the method says are behind it as a rule; while a peer that missed a round of all has
# parameters that it was not in time with, they are as old as its own last round of all.
#
# A round that draws some, and passes a peer by, leaves one in ``parts`` of its parameters late. Those are not told
# apart from the others when they are drawn again, and count in full.


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
    places = method.drawn(step).places
    drawn_N = None if places is None else places(len(live_N))
    local_N, norm_of_all = (live_N, 1.0) if drawn_N is None else only_drawn(drawn_N, base_N, live_N)
    gradient_N, norm = difference_and_norm(base_N, local_N)
    return Spoken(base_N, live_N, local_N, norm_of_all * norm, drawn_N is None, gradient_N)


def sent_of(method: OuterMethod, spoken: Spoken, scale: float) -> tuple[Tensor | None, Tensor | None]:
    """What is sent, ``scale`` times as long, and the progress that it was made of where that is not what is sent.

    The first is None where it is the progress, and nobody has asked for that yet.
    """
    taken_N = Taken(lambda: spoken.local_N, lambda: spoken.gradient_N)
    change_N = method.contribute(spoken.base_N, taken_N)
    if scale == 1.0 and change_N is taken_N.progress:
        return spoken.made_N, None
    change_N = values_of(change_N)
    return change_N if scale == 1.0 else change_N * scale, spoken.gradient_N


def counted(
    method: OuterMethod, step: int, fragment: int, progress: Progress, spoken: Spoken, *, whole: int, held: int
) -> Counted:
    """How much counts of what outer step ``step`` of the fragment speaks of; ``whole`` and ``held``: see `share_of`.

    The norm of what is in time is remembered. All counts of NaN and Inf: the check of what is sent names the parameter.
    """
    drawn = method.drawn(step)
    rounds, most = drawn.rounds, drawn.most_rounds
    overdue, stale, share = _overdue(method, step, progress, rounds * whole), method.quorum.staleness, 1.0
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
    looked_at = range(max(0, step - progress.missed), step)[: method.quorum.staleness + 1]
    if progress.missed and (before or not looked_at or any(method.drawn(s).places is None for s in looked_at)):
        return before + progress.missed
    return before


def states_due(method: OuterMethod, step: int, anchor_N: Tensor, live: Live, fragment: int) -> tuple[Tensor, ...]:
    """The channels beside the change that are due in outer step ``step`` of the fragment; zeros where none is."""
    due = [channel for channel in method.channels()[1:] if channel.is_due(step)]
    told = method.states_sent(anchor_N, live, fragment) if due else {}
    return tuple(told.get(channel.name, torch.zeros_like(anchor_N)) for channel in due)


# ---- detours while one is in flight ----
#
# Fragments of the live model may train on elsewhere while their contributions are in flight, and find the way back.
#
# A method may guess what the round in progress will bring, and train on from that. What is learnt there counts, where
# it began does not: when the round is decided, for this peer or without it, that is taken out again, and the commit is
# merged as if training had gone on from where the contribution was taken.


class Detours:
    """By fragment."""

    def __init__(self) -> None:
        self._left_N: dict[int, Tensor] = {}  # the live parameters when the contribution was taken
        self._begun_N: dict[int, Tensor] = {}  # and what training went on from, as the model holds it
        self._untold: set[int] = set()  # fragments that were written

    def __contains__(self, fragment: int) -> bool:
        """Whether training goes on elsewhere."""
        return fragment in self._begun_N

    def live(self, model: Parameters, fragment: int) -> Tensor:
        """The live parameters had training gone on where it was: bit for bit what they were if nothing was learnt."""
        live_N = model.read(fragment)
        if fragment not in self._begun_N:
            return live_N
        return carry(live_N, self._begun_N[fragment], self._left_N[fragment])

    def go(self, model: Parameters, fragment: int, live_N: Tensor, wanted_N: Tensor | None) -> None:
        """Train on from ``wanted_N``; None: from ``live_N``, which `live` gave: back, where it was elsewhere."""
        if wanted_N is None and fragment not in self._begun_N:
            return
        self.end(fragment)
        self._untold.add(fragment)
        model.write(fragment, live_N if wanted_N is None else wanted_N)
        if wanted_N is not None:
            self._left_N[fragment], self._begun_N[fragment] = live_N, model.read(fragment)

    def end(self, fragment: int) -> None:
        """The live parameters are overwritten."""
        self._left_N.pop(fragment, None)
        self._begun_N.pop(fragment, None)

    def told(self) -> set[int]:
        """The fragments that were written since this was asked last: other ranks must have them, too."""
        untold, self._untold = self._untold, set()
        return untold

    # ---- over a restart ----

    def tensors(self) -> dict[str, Tensor]:
        """The way there, by names in a checkpoint."""
        places = (("left", self._left_N), ("begun", self._begun_N))
        return {_detour_name(f, place): one_N for place, by_fragment in places for f, one_N in by_fragment.items()}

    def recall(
        self, model: Parameters, tensors: Mapping[str, Tensor], num_fragments: int
    ) -> Iterator[tuple[int, Tensor]]:
        """Of a model that is as its checkpoint has it: each fragment that was elsewhere, and what it is without that.

        What was in flight is not any more. Whoever asks writes it.
        """
        for f in range(num_fragments):
            if _detour_name(f, "begun") in tensors:
                self._left_N[f], self._begun_N[f] = (tensors[_detour_name(f, place)] for place in ("left", "begun"))
                self._untold.add(f)
                yield f, self.live(model, f)


def _detour_name(fragment: int, place: str) -> str:
    return f"detour/{fragment}/{place}"


# ---- few passes over the parameters ----
#
# Training is held while a boundary reads and writes the live model, so it does that in as few passes as there can be.
#
# One each where the model lies in this process's memory as peers send it (`Parameters.in_place`). Of a model in another
# dtype or order, sharded, or on a device, copies are read and written, and what is made of them is made in between.


@dataclass(frozen=True, slots=True)
class _Copied:
    """A fragment as a merge left it, for a contribution at the same boundary."""

    fragment: int
    base_N: Tensor  # what its progress is measured from
    live_N: Tensor
    norm: float  # of ``base_N - live_N``
    state: Sequence[tuple[int, int]]  # of the live model's memory then

    def is_of(self, fragment: int, base_N: Tensor, rows: Sequence[Tensor]) -> bool:
        """Whether nobody has written to the fragment since, and its progress is measured from there."""
        return self.fragment == fragment and self.base_N is base_N and self.state == _memory_state(rows)


class Passes:
    """Of one peer's schedule."""

    def __init__(self, method: OuterMethod, detours: Detours, num_fragments: int) -> None:
        self._method, self._detours = method, detours
        touches = method.inner or method.draws or method.acts_after_commits
        self._may_copy = num_fragments == 1 and not touches  # else a merge may not be the last that moves what is taken
        self._copied: _Copied | None = None

    def forget(self) -> None:
        """The live parameters move, or are overwritten."""
        self._copied = None

    def spoken(
        self, model: Parameters, fragment: int, step: int, anchor_N: Tensor, rounding_N: Tensor | None, *, late: bool
    ) -> Spoken:
        """What outer step ``step`` of the fragment speaks of; ``rounding_N``: see ``as_written``.

        ``late``: what is sent is made when somebody asks for it, and not while training stands still.
        """
        copied, self._copied = self._copied, None
        own_way = fragment in self._detours or self._method.draws
        rows = None if own_way else model.in_place(fragment)
        if rows is None:
            live_N = self._detours.live(model, fragment)
            return spoken_of(self._method, step, as_written(beside(anchor_N, live_N), rounding_N), live_N)
        base_N = as_written(anchor_N, rounding_N)
        if copied is not None and copied.is_of(fragment, base_N, rows):
            return Spoken(base_N, copied.live_N, copied.live_N, copied.norm)
        if late:
            live_N, norm = copy_and_norm(rows, base_N)
            return Spoken(base_N, live_N, live_N, norm)
        live_N, gradient_N, norm = copy_and_difference(rows, base_N)
        return Spoken(base_N, live_N, live_N, norm, made_N=gradient_N)

    def carries(self, fragment: int) -> bool:
        """Whether a carry without an inner step since the contribution gives the anchor, which need not be computed."""
        return not self._method.draws and fragment not in self._detours

    def carried(
        self, model: Parameters, fragment: int, sent_N: Tensor, anchor_N: Tensor, *, due: bool
    ) -> Tensor | None:
        """What was learnt since ``sent_N``, on the new anchor, to be written; None: the live model holds it by now.

        ``due``: a contribution may be taken at this boundary.
        """
        self._copied = None
        rows = None if fragment in self._detours else model.in_place(fragment)
        if rows is None:
            live_N = self._detours.live(model, fragment)
            return carry(live_N, beside(sent_N, live_N), beside(anchor_N, live_N))
        if due and self._may_copy:
            live_N, norm = carry_and_copy(rows, sent_N, anchor_N)
            self._copied = _Copied(fragment, anchor_N, live_N, norm, _memory_state(rows))
        else:
            carry_rows(rows, sent_N, anchor_N)
        return None


def as_written(anchor_N: Tensor, rounding_N: Tensor | None) -> Tensor:
    """What the live model held after an anchor was written to it; ``rounding_N``: by how much it rounds it."""
    return anchor_N if rounding_N is None else anchor_N + beside(rounding_N, anchor_N)


def _memory_state(rows: Sequence[Tensor]) -> Sequence[tuple[int, int]]:
    """Where they lie, and how often torch has written to them."""
    return [(row.data_ptr(), row._version) for row in rows]
