"""The memory of a schedule in a checkpoint, and how a peer goes on from it: with its progress, or at an anchor."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from decentral.optimizers import carry
from decentral.optimizers.base import State
from decentral.state.snapshot import anchor_name
from decentral.tensors.device import beside, less
from decentral.training.live_side import Parameters
from decentral.training.progress import Progress, as_written
from decentral.training.schedule import SyncSchedule

# Shape suffix: N = elements of one fragment, flat float32.

ROUNDING = "rounding/{}"  # of a fragment, in a checkpoint


def memory_of(schedule: SyncSchedule) -> dict[str, Any]:
    """What a checkpoint keeps, as JSON."""
    return {
        "since": schedule.since,
        "held": schedule.held,
        "seconds": schedule.seconds,
        "fragments": [progress.memory() for progress in schedule.progress],
        "unadopted": {str(fragment): names for fragment, names in schedule.unadopted.items()},
    }


def tensors_of(schedule: SyncSchedule) -> dict[str, Tensor]:
    """The tensors that a checkpoint keeps."""
    given = ((f, progress.rounding_N) for f, progress in enumerate(schedule.progress))
    roundings = {ROUNDING.format(f): rounding_N for f, rounding_N in given if rounding_N is not None}
    return {**roundings, **schedule.detours.tensors(), **schedule.live.tensors()}


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
    for f, live_N in schedule.detours.recall(model, tensors, schedule.num_fragments):
        rounding_N = schedule.progress[f].rounding_N  # no progress before, nor when it is written anew
        schedule.put(model, f, live_N if rounding_N is None else less(live_N, rounding_N))
    for f, anchor_N in enumerate(anchors):
        before_N = tensors[anchor_name(f)]
        if not torch.equal(before_N, anchor_N):
            _carry_on(schedule, model, f, before_N, anchor_N, outer_steps)
            schedule.live.passed_by(f, states[f] if states else {})


def _recall(schedule: SyncSchedule, tensors: Mapping[str, Tensor], memory: Mapping[str, Any]) -> None:
    schedule.since, schedule.held = int(memory["since"]), int(memory["held"])
    schedule.seconds = float(memory.get("seconds", 0.0))  # an older checkpoint has none
    told = enumerate(memory["fragments"])
    schedule.progress = [Progress.recalled(one, tensors.get(ROUNDING.format(f))) for f, one in told]
    recall_unadopted(schedule, memory)


def _carry_on(
    schedule: SyncSchedule, model: Parameters, f: int, before_N: Tensor, anchor_N: Tensor, outer_steps: int
) -> None:
    progress = schedule.progress[f]
    progress.missed += -(-outer_steps // schedule.num_fragments) if progress.behind else 0
    live_N = model.read(f)
    base_N = as_written(beside(before_N, live_N), progress.rounding_N)
    schedule.put(model, f, carry(live_N, base_N, beside(anchor_N, live_N)))


def recall_unadopted(schedule: SyncSchedule, memory: Mapping[str, Any]) -> None:
    """What of the shared state the inner optimizer did not have yet when a checkpoint was written."""
    schedule.unadopted = {int(fragment): list(names) for fragment, names in memory.get("unadopted", {}).items()}


def note_replayed(schedule: SyncSchedule, outer_steps: Iterable[int]) -> None:
    """These outer steps of the run were replayed beside the live model: it lacks the channels that they had."""
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
        schedule.live.lost(f)
