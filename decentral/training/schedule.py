"""When a peer contributes, waits and merges, and after how many inner steps: the training side without a swarm."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from decentral.manifest import Manifest
from decentral.manifest.terms import Inner
from decentral.optimizers import OuterMethod, carry, make_outer
from decentral.optimizers.base import SILENT, State
from decentral.optimizers.steps import Carried
from decentral.replica.contribution import Contribution
from decentral.replica.weights import make_summary
from decentral.rounds.local_state import CommittedUpdate
from decentral.state.snapshot import anchor_name
from decentral.tensors.device import less, on_device_of
from decentral.tensors.memory import Lazy, values_of
from decentral.tensors.ops import carry_rows
from decentral.training.live_side import LiveSide, MethodCalls, Parameters
from decentral.training.progress import (
    Away,
    LocalUpdate,
    Progress,
    Share,
    as_written,
    carry_and_keep,
    change_to_send,
    go_elsewhere,
    measure_share,
    pseudo_gradient,
    read_live,
    read_update,
    states_due,
)
from decentral.wire.keys import Digest

# ---- when ----
#
# Every ``H / P`` inner steps one fragment is due; what a commit brings is merged at a step boundary, our own
# contribution ``overlap`` steps after it was sent, everybody else's at once.


@dataclass(slots=True)
class SyncTiming:
    """When one peer contributes and merges: by its inner steps, and seconds, since the last contribution."""

    interval: int  # inner steps between two contributions: H / number of fragments
    overlap: int  # tau: inner steps between sending a contribution and merging the commit that names it
    method: OuterMethod
    since: int = 0  # inner steps since the last contribution, of any fragment, that a commit named
    paced: int = 0  # of them, after which this peer contributes; 0: the interval
    seconds: float = 0.0  # of training since then; waiting for rounds is not counted
    held: int = 0  # of the steps those made while a contribution was due and could not be sent
    sent_at: int | None = None  # value of ``since`` when the contribution in flight was taken
    seconds_sent: float = 0.0  # value of ``seconds`` then

    @property
    def may_send(self) -> bool:
        """True when there is progress, and none is in flight."""
        return self.since > 0 and self.sent_at is None

    @property
    def due(self) -> bool:
        """True when the method wants a contribution of the progress, too."""
        return self.may_send and self.method.timing.is_due(self.since, self.seconds, self.paced or self.interval)

    def may_merge(self, update: CommittedUpdate) -> bool:
        """Tell whether the time of the oldest commit that is not merged yet has come."""
        return update.contribution is None or self.sent_at is None or self.since - self.sent_at >= self.overlap

    def count_step(self) -> None:
        """Count an inner step."""
        self.held += self.due
        self.since += 1

    def send(self) -> None:
        """Note that a contribution is in flight from now on."""
        self.sent_at, self.seconds_sent = self.since, self.seconds

    def withdraw(self) -> None:
        """Note that no commit will name the contribution in flight."""
        self.sent_at = None

    def go_past_ours(self) -> None:
        """Count from where the contribution in flight was taken, as a commit names it."""
        if self.sent_at is not None:
            self.since -= self.sent_at
            self.seconds -= self.seconds_sent

    def pass_by(self) -> None:
        """Count a round of a fragment that this peer does not train as one for which it made its steps."""
        self.since, self.held, self.seconds = max(0, self.since - (self.paced or self.interval)), 0, 0.0
        self.sent_at = None

    def restart(self) -> None:
        """Count from here."""
        self.since, self.held, self.seconds = 0, 0, 0.0


# ---- what is sent, and how a commit is merged ----
#
# Progress is measured from the value that was *written* into the live model, not from the anchor: a model in bfloat16
# rounds what is written, and a rounding that is counted as progress moved a run in which nobody trained.

# Shape suffix: N = elements of one fragment, flat float32; live ones lie where the model's copies do.


class SyncSchedule:
    """The progress of one peer's live model, taken for contributions by its ``timing`` and carried past commits."""

    def __init__(
        self,
        interval: int,
        overlap: int,
        method: OuterMethod,
        seen: Digest,
        num_fragments: int = 1,
        *,
        lengthens: bool = False,
        live: LiveSide | None = None,
        part: range | None = None,
    ) -> None:
        """``interval``, ``overlap``: see `SyncTiming`. ``lengthens``: whether what fewer steps made is sent as long as
        all steps would have made it. ``live``: this peer's training, as the method may see it. ``part``: the fragments
        that it trains; None: all.
        """
        self.timing = SyncTiming(interval, overlap, method)
        self.method, self.num_fragments = method, num_fragments
        self.part = range(num_fragments) if part is None else part
        self.seen = seen  # hash of the newest record that is merged into the live model
        self.progress = [Progress() for _ in range(num_fragments)]
        self.num_merged = 0  # commits, and steps of pairs
        self.unadopted: dict[int, list[str]] = {}  # by fragment, channels that training lacks
        self.absences: list[Away] = []  # what they cost, for the caller to report and to clear
        self._lengthens = lengthens
        self._written: set[int] = set()  # fragments that a contribution or a restart wrote
        self._share: Share | None = None  # of the contribution in flight
        self._merged: LocalUpdate | None = None  # kept by a merge for a contribution at the same boundary
        # Else a merge may not be the last that moves what is taken.
        self._may_keep = num_fragments == 1 and not (method.inner or method.draws or method.acts_after_commits)
        self.set_live(live or LiveSide())

    def set_live(self, live: LiveSide) -> None:
        """Let the method see and change this peer's training by way of ``live`` from now on."""
        live.begin(self.num_fragments, lambda fragment: self.progress[fragment].steps, self._stands_for)
        self.live, self.calls = live, MethodCalls(self.method, live, self.num_fragments)

    def _stands_for(self, fragment: int) -> int:
        """Count the inner steps that count: all, but for what an absence leaves of the contribution in flight."""
        share = self._share
        if share is not None and share.away is not None and share.away.fragment == fragment:
            return share.steps
        return self.progress[fragment].steps

    def stepped(self) -> None:
        """Count an inner step."""
        self.timing.count_step()
        self._merged = None
        for fragment in self.part:
            self.progress[fragment].steps += 1
        self.calls.after_step()

    def due_early(self, pressed: tuple[Digest, float] | None, step_seconds: float) -> bool:
        """Tell whether to contribute what there is, as the round after the next inner step would go on without it.

        ``pressed``: the head after which others wait, and the seconds left. A round whose beginning is not merged yet
        presses nobody.
        """
        waits = pressed is not None and pressed[0] == self.seen and pressed[1] <= step_seconds
        return waits and self.timing.may_send

    @property
    def was_away(self) -> bool:
        """True when contributions were held back for a round or more."""
        return self.timing.held >= self.timing.interval * self.num_fragments

    def collect_written(self) -> set[int]:
        """Return the fragments that contributions wrote since the last call: other ranks must have them, too."""
        written, self._written = self._written, set()
        return written

    # ---- sending ----

    def take(
        self, model: Parameters, fragment: int, anchor_N: Tensor, based_on: Digest, per_step: int, *, outer_step: int
    ) -> Contribution | None:
        """Make the contribution of a fragment, from now on in flight; ``per_step``: tokens behind one inner step,
        ``outer_step``: of the run, the one that it is for, counted from 0.

        After an absence only a share of the progress counts, and the rest is dropped when a commit names the
        contribution; or nothing counts: None, and ``restart`` is due. The live model is not changed here, unless the
        method has training go on elsewhere while the contribution is in flight.
        """
        progress, step = self.progress[fragment], outer_step // self.num_fragments
        timing = self.timing
        whole, late = timing.interval * self.num_fragments, timing.overlap > 0
        merged, self._merged = self._merged, None
        update = read_update(self.method, model, fragment, progress, step, anchor_N, merged=merged, late=late)
        share = measure_share(self.method, step, fragment, progress, update, whole=whole, held=timing.held)
        if share.fraction == 0.0:
            return None
        timing.send()
        self._share, in_time = share, self._lengthens and not progress.missed
        longer = lengthening(timing.interval, timing.paced, progress.steps / self.num_fragments) if in_time else 1.0
        sent_N, progress_N = change_to_send(self.method, update, share.fraction * longer)
        made = Contribution(fragment, based_on, update.local_N, sent_N, timing.since, share.steps * per_step)
        made.base_N, made.progress_N, made.trained = update.base_N, progress_N, progress.steps
        made.is_difference = progress_N is None
        made.is_finite = progress_N is None and math.isfinite(update.norm)
        made.begun_from = max(0, outer_step - progress.missed * self.num_fragments) if progress.missed else None
        self._complete(made, model, update, step, anchor_N)
        return made

    def _complete(
        self, made: Contribution, model: Parameters, update: LocalUpdate, step: int, anchor_N: Tensor
    ) -> None:
        """Add what the method adds to a contribution, and train on where it wants that meanwhile."""
        fragment = made.fragment
        late = self.timing.overlap > 0
        wanted_N = self.method.meanwhile(self.live, fragment, update.base_N, update.live_N) if late else None
        self.calls.after_take(fragment)
        made.states = states_due(self.method, step, anchor_N, self.live, fragment)
        if self.method.summary is not SILENT:
            made.summary, made.unsaid = make_summary(
                lambda: self.method.summary.says(self.live, fragment, made.vectors)
            )
        if go_elsewhere(model, fragment, self.progress[fragment], update.live_N, wanted_N):
            self._written.add(fragment)

    # ---- merging ----

    def merge(self, update: CommittedUpdate, model: Parameters) -> bool:
        """Bring one commit into the live model; returns whether parameters changed."""
        if update.whole:  # before that, live model and chain are not in step
            self.seen = update.head
        if update.before_N is None or update.after_N is None:
            return False
        if (mine := update.contribution) is None:
            wanted_N = self._past_others(update, model, update.before_N, update.after_N)
        else:
            wanted_N = self._past_ours(mine, model, update.fragment, update.after_N)
        if wanted_N is not None:  # else it is there already
            self.put(model, update.fragment, wanted_N)
        else:
            self.progress[update.fragment].rounding_N = None  # what is changed where it lies is float32
        self.calls.after_merge(update)
        self.num_merged += 1
        return True

    def put(self, model: Parameters, fragment: int, wanted_N: Tensor) -> None:
        """Write a fragment into the live model, and remember by how much the model rounds it."""
        self.progress[fragment].end_detour()
        self._merged = None
        model.write(fragment, wanted_N)
        rounds = not model.keeps(fragment)
        self.progress[fragment].rounding_N = less(model.read(fragment), wanted_N) if rounds else None

    def restart(
        self,
        model: Parameters,
        anchors: Sequence[Tensor],
        fragments: Sequence[int],
        debts: Mapping[int, Tensor] | None = None,
    ) -> None:
        """Put fragments to the anchor, their progress dropped with the ``debts`` of some. Nothing may be in flight."""
        for f in fragments:
            progress = self.progress[f]
            lost_N = pseudo_gradient(progress, anchors[f], read_live(model, f, progress))
            if debts is not None and f in debts:
                lost_N = lost_N + on_device_of(debts[f], lost_N)
            self.absences.append(Away(f, progress.missed, progress.behind, 0, lost_N))
            progress.drop()
            self.put(model, f, anchors[f])
            self.calls.after_loss(f)
        self.timing.restart()

    def merge_swap(self, model: Parameters, fragment: int, after_N: Tensor, *, unmoved: bool = False) -> None:
        """Bring in a gossip step, which took the contribution in flight and left ``after_N``; ``unmoved``: in vain."""
        self._account(self.progress[fragment], self.progress[fragment].steps)
        self.put(model, fragment, after_N)
        self.timing.restart()
        self.calls.after_swap(fragment, unmoved=unmoved)
        self.num_merged += 1

    def away_too_long(self, because_of: int) -> list[int]:
        """List the fragments to restart when ``because_of`` is dropped: those that rounds have passed by are as old."""
        return [f for f, progress in enumerate(self.progress) if f == because_of or progress.missed]

    def _past_others(
        self, update: CommittedUpdate, model: Parameters, before_N: Tensor, after_N: Tensor
    ) -> Tensor | None:
        """Go past a commit that took nothing of ours: our progress stays, measured from the new anchor."""
        progress, f = self.progress[update.fragment], update.fragment
        if f not in self.part:
            self.timing.pass_by()
            return after_N  # there was nothing of ours
        self._note_missed(update)
        before_N = as_written(before_N, progress.rounding_N)
        if update.taken_N is None:
            return self._carry_on(model, f, before_N, after_N)
        live_N = read_live(model, f, progress)  # what a previous incarnation sent is in the anchor, and no progress
        before_N, taken_N = on_device_of(before_N, live_N), on_device_of(update.taken_N, live_N)
        return carry(torch.where(taken_N, before_N, live_N), before_N, on_device_of(after_N, live_N))

    def _past_ours(self, mine: Contribution, model: Parameters, f: int, after_N: Tensor) -> Tensor | None:
        """Go past a commit that names our contribution: what was learnt since it was sent stays."""
        progress = self.progress[f]
        # Without an inner step since it was sent nothing stays but what a detour or a draw left aside.
        stood_still = self.timing.since == self.timing.sent_at and not (progress.is_elsewhere or self.method.draws)
        self.timing.go_past_ours()
        away = None if self._share is None else self._share.away
        self._account(progress, mine.trained)
        rounding_N, local_N = progress.rounding_N, mine.local_N

        def without(value_N: Tensor) -> Tensor:
            """Take out what a blend would keep a part of: what an absence left uncounted, and the model's rounding."""
            value_N = value_N if away is None else value_N + away.dropped_N
            return value_N if rounding_N is None else value_N - on_device_of(rounding_N, value_N)

        live_N = Lazy(lambda: without(read_live(model, f, progress)))
        sent_N, anchor_N = Lazy(lambda: without(local_N)), Lazy(lambda: on_device_of(after_N, live_N.tensor()))
        merged_N = self.method.merge(live_N, sent_N, anchor_N)
        if not isinstance(merged_N, Carried):
            return values_of(merged_N)
        if stood_still:
            return after_N
        return self._carry_on(model, f, local_N, after_N) if away is None else merged_N.tensor()

    def _carry_on(self, model: Parameters, f: int, sent_N: Tensor, anchor_N: Tensor) -> Tensor | None:
        """Put what was learnt since ``sent_N`` on the new anchor; return it to be written; None: it is there."""
        self._merged = None
        progress = self.progress[f]
        rows = None if progress.is_elsewhere else model.in_place(f)
        if rows is None:
            live_N = read_live(model, f, progress)
            return carry(live_N, on_device_of(sent_N, live_N), on_device_of(anchor_N, live_N))
        if self.timing.due and self._may_keep:
            self._merged = carry_and_keep(rows, sent_N, anchor_N)
        else:
            carry_rows(rows, sent_N, anchor_N)
        return None

    def _account(self, progress: Progress, trained: int) -> None:
        """Note that a commit took the contribution in flight, with the ``trained`` inner steps behind it."""
        self.timing.held, self.timing.sent_at = 0, None
        progress.steps, progress.missed = max(0, progress.steps - trained), 0
        self._settle_share(progress)

    def _settle_share(self, progress: Progress) -> None:
        """Drop what an absence left uncounted of a contribution that was taken; what was not drawn stays behind."""
        if self._share is not None:
            progress.undrawn, progress.overdue = self._share.undrawn, self._share.overdue
            self.absences += [self._share.away] if self._share.away is not None else []
            self._share = None

    def _note_missed(self, update: CommittedUpdate) -> None:
        progress, timing = self.progress[update.fragment], self.timing
        timing.withdraw()
        if update.took:
            self._settle_share(progress)
        timing.since = max(0, timing.since + update.reclaimed_steps // self.num_fragments)
        progress.steps = max(0, progress.steps + update.reclaimed_steps)
        progress.missed += update.rounds if progress.behind else 0


def make_schedule(
    manifest: Manifest, seen: bytes, live: LiveSide | None = None, part: range | None = None
) -> SyncSchedule:
    """Make the schedule of a peer, from the record ``seen`` on; ``part``: the fragments that it trains, None: all."""
    outer, inner = manifest.outer, manifest.inner
    method, interval = make_outer(outer.method, outer.hyper), inner.steps // outer.fragments
    lengthens = inner.pace == "speed"
    return SyncSchedule(
        interval, outer.overlap, method, seen, outer.fragments, lengthens=lengthens, live=live, part=part
    )


# ---- over a restart ----
#
# A checkpoint holds the schedule's memory. A peer goes on from it with its progress, or at an anchor.

ROUNDING = "rounding/{}"  # of a fragment, in a checkpoint
DETOURS = (("detour/{}/left", "left_N"), ("detour/{}/begun", "begun_N"))  # names there, and in `Progress`


def memory_of(schedule: SyncSchedule) -> dict[str, Any]:
    """Return the numbers that a checkpoint keeps, as JSON."""
    return {
        "since": schedule.timing.since,
        "held": schedule.timing.held,
        "seconds": schedule.timing.seconds,
        "fragments": [progress.memory() for progress in schedule.progress],
        "part": [schedule.part.start, schedule.part.stop],
        "unadopted": {str(fragment): names for fragment, names in schedule.unadopted.items()},
    }


def tensors_of(schedule: SyncSchedule) -> dict[str, Tensor]:
    """Return the tensors that a checkpoint keeps."""
    names = ((ROUNDING, "rounding_N"), *DETOURS)
    each = (
        (name.format(f), getattr(progress, field_))
        for name, field_ in names
        for f, progress in enumerate(schedule.progress)
    )
    return {**{name: one_N for name, one_N in each if one_N is not None}, **schedule.live.tensors()}


def resume(
    schedule: SyncSchedule,
    model: Parameters,
    tensors: Mapping[str, Tensor],
    memory: Mapping[str, Any] | None,
    anchors: Sequence[Tensor],
    outer_steps: int,
    states: Sequence[State] = (),
) -> None:
    """Go on from a checkpoint's ``tensors`` and ``memory``, its progress carried on to ``anchors``.

    The live model is as the checkpoint has it; ``anchors`` are ``outer_steps`` further, over all fragments, by
    commits that passed this peer by, and after which the shared ``states`` of the fragments are as given.
    """
    if memory is not None:  # None: of a version before 0.2, which kept no count
        _recall(schedule, tensors, memory)
    schedule.live.recall(tensors)
    for f, progress in enumerate(schedule.progress):
        _come_back(schedule, model, f, progress, tensors)
    for f, anchor_N in enumerate(anchors):
        before_N = tensors[anchor_name(f)]
        if not torch.equal(before_N, anchor_N):
            _carry_over(schedule, model, f, before_N, anchor_N, outer_steps)
            schedule.calls.after_others(f, states[f] if states else {})


def _recall(schedule: SyncSchedule, tensors: Mapping[str, Tensor], memory: Mapping[str, Any]) -> None:
    schedule.timing.since, schedule.timing.held = int(memory["since"]), int(memory["held"])
    schedule.timing.seconds = float(memory.get("seconds", 0.0))  # an older checkpoint has none
    each = enumerate(memory["fragments"])
    schedule.progress = [Progress.recall(one, tensors.get(ROUNDING.format(f))) for f, one in each]
    recall_unadopted(schedule, memory)


def _come_back(
    schedule: SyncSchedule, model: Parameters, f: int, progress: Progress, tensors: Mapping[str, Tensor]
) -> None:
    """Take a detour of the checkpoint out of the live model: what was in flight is not any more."""
    for name, field_ in DETOURS:
        setattr(progress, field_, tensors.get(name.format(f)))
    if progress.is_elsewhere:
        schedule._written.add(f)
        live_N, rounding_N = read_live(model, f, progress), progress.rounding_N
        # The rounding was no progress before, nor is it when it is written anew.
        schedule.put(model, f, live_N if rounding_N is None else less(live_N, rounding_N))


def _carry_over(
    schedule: SyncSchedule, model: Parameters, f: int, before_N: Tensor, anchor_N: Tensor, outer_steps: int
) -> None:
    progress = schedule.progress[f]
    progress.missed += -(-outer_steps // schedule.num_fragments) if progress.behind else 0
    live_N = model.read(f)
    base_N = as_written(on_device_of(before_N, live_N), progress.rounding_N)
    schedule.put(model, f, carry(live_N, base_N, on_device_of(anchor_N, live_N)))


def recall_unadopted(schedule: SyncSchedule, memory: Mapping[str, Any]) -> None:
    """Recall the channels of the shared state that the inner optimizer lacked when a checkpoint was written."""
    schedule.unadopted = {int(fragment): list(names) for fragment, names in memory.get("unadopted", {}).items()}


def note_replayed(schedule: SyncSchedule, outer_steps: Iterable[int]) -> None:
    """Note outer steps that were replayed beside the live model: it lacks the channels that they had."""
    for outer_step in outer_steps if schedule.method.inner else ():
        fragment, step = outer_step % schedule.num_fragments, outer_step // schedule.num_fragments
        names = {channel.name for channel in schedule.method.channels() if channel.is_due(step)}
        schedule.unadopted[fragment] = sorted(names.union(schedule.unadopted.get(fragment, ())))


def stand_at(
    schedule: SyncSchedule, model: Parameters, anchors: Sequence[Tensor], tensors: Mapping[str, Tensor]
) -> None:
    """Go on at ``anchors``: what a checkpoint's ``tensors`` have of progress is in there, or of another chain."""
    schedule.live.recall(tensors)
    for f, anchor_N in enumerate(anchors):
        schedule.put(model, f, anchor_N)
        schedule.calls.after_loss(f)


# ---- inner steps by speed ----
#
# A peer makes H inner steps before it contributes, or fewer where it is slower than the others:
#
# equal    H steps of every peer; who is slow is waited for until the deadline, or is late
# speed    min(H, T / s): T, the seconds that the typical peer takes for H steps; s, those of one inner step here
# clock    min(H, T / s): T, ``inner.seconds``: rounds begin at even times, with what each has learnt by then
#
# T of ``speed`` is the lower median over all members, this one included, of what their offers have shown
# (`decentral.consensus.timing.Paces`): half of the peers make all of their steps, and one that lies hurries nobody who
# has two honest ones beside it. It is never below a sixteenth of H, as weights are never below a sixteenth of the
# typical.
#
# Sources: steps by speed, as DyLU of Liu et al., "Asynchronous Local-SGD Training for Language Modeling", 2024,
# arXiv:2401.09135, which takes the fastest worker for T; peers that arrive together, Li et al., "FedCompass", 2023,
# arXiv:2309.14675, where a server assigns the steps; fixed times, Fraboni et al., "A General Theory for Federated
# Optimization with Asynchronous and Heterogeneous Clients Updates" (FedFix), 2022, arXiv:2206.10189.

TOLERANCE = 0.1  # share by which a peer may be slower and still makes all steps: as much do equal machines vary
SLOWEST = 16  # times slower than typical, beyond which a peer makes no fewer steps yet
KNOWN = 3  # inner steps of which one in the middle is this peer's speed; before them it makes all steps
USUAL = 31  # inner steps whose median is this peer's speed: an evaluation between two of them does not move it


def lengthening(interval: int, paced: int, steps: float) -> float:
    """Return the factor on the change of a slow peer that is in time: all inner steps count alike in a mean by tokens
    then, H sum(change_i) / sum(steps_i). FedNova's normalisation, see `share_of`.

    ``interval``: steps of a full contribution; ``paced``: those after which this peer makes one, 0: all; ``steps``:
    behind it, per fragment. By the pace, and not by H over its steps alone: of P fragments the first cycle has H / P
    steps and more at every peer, however fast.
    """
    if not 0 < paced < interval:
        return 1.0
    return max(1.0, min(float(SLOWEST), interval / paced, interval / max(steps, 1 / interval)))


class Pace:
    """The pace of one peer: the inner steps after which it contributes."""

    def __init__(self, inner: Inner, full: int, least: int) -> None:
        """``full``: inner steps of a full contribution, ``least``: of any."""
        self._kind, self._clock = inner.pace or "equal", inner.seconds
        self._full, self._least = full, min(full, max(least, math.ceil(full / SLOWEST)))
        self._seconds: deque[float] = deque(maxlen=USUAL)

    def stepped(self, seconds: float) -> None:
        """Note the time of an inner step."""
        self._seconds.append(seconds)

    def steps(self, others: Sequence[float]) -> int:
        """Return the inner steps after which to contribute; ``others``: each one's seconds of a full contribution."""
        if len(self._seconds) < KNOWN:
            return self._full
        step = statistics.median(self._seconds)
        target = self._target(others, step * self._full)
        if target is None or target >= step * self._full * (1 - TOLERANCE):
            return self._full
        return max(self._least, math.floor(target / step))

    def _target(self, others: Sequence[float], own: float) -> float | None:
        """Return T; None: nothing is known that would call for fewer steps."""
        if self._kind == "clock":
            return self._clock
        if self._kind == "equal" or not others:
            return None
        return statistics.median_low([*others, own])
