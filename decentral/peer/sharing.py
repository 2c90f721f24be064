"""The place of a peer in a replica of several machines (``join(share=True)``), on its training thread.

While it has no group it holds no fragment: it follows the run, votes, and looks for others. In a group it is a stage:
it trains the fragments of its part and offers them in their turns. When a member is gone the group is no more, and each
that is left looks again: a spare is who looks. A group begins at the anchor, with the moments that are there.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from time import perf_counter

import psutil
import torch
from torch import Tensor, nn

from decentral.errors import GroupBroken
from decentral.parameters import Fragment
from decentral.peer.boundary import Boundary
from decentral.peer.participation import Participation
from decentral.peer.settings import Settings
from decentral.peer.startup import tell_part
from decentral.pipeline.boundary import ROUNDINGS
from decentral.pipeline.cut import Machine
from decentral.pipeline.group import GroupSide, Wanted
from decentral.pipeline.lines import Forms, StageInbox, StageLines
from decentral.pipeline.stage import Loss, Segment, Stage, segments_of
from decentral.pipeline.turns import count_micro_batches
from decentral.training.live_model import LiveModel
from decentral.training.outer_loop import LoopControl
from decentral.training.part import SPARE, Needs
from decentral.training.swarm_side import run_blocking
from decentral.wire.groups import GroupRecord
from decentral.wire.keys import PeerId, peer_name

logger = logging.getLogger("decentral.peer")

NOTHING = range(0)  # fragments, of a peer that has no group
LOOK_EVERY = 0.2  # s


# ---- on the training thread ----


@dataclass(slots=True)
class _Group:
    """The group that this peer is in now."""

    stage: Stage
    inbox: StageInbox
    lines: StageLines
    micro_batches: int


class _RunOver(Exception):
    """The run is over, or this peer leaves: a step that others wait for is not ended."""


class SharedReplica:
    """The inner steps of a peer that shares a replica: gradients of its own stage, as far as there is a group."""

    def __init__(self, settings: Settings, boundary: Boundary, control: LoopControl) -> None:
        self._settings, self._boundary, self._control = settings, boundary, control
        self._model: LiveModel = settings.model
        self._segments = segments_of(self._model.bare, self._model.schema.fragments)
        self._group: _Group | None = None
        self._wanted: Wanted | None = None
        self._watched = ExitStack()  # whether optimizers undo what commits write

    def gradients(
        self, part: Participation, inputs: Tensor, targets: Tensor, loss: Loss, clip: float | None
    ) -> float | None:
        """Make the gradients of one inner step with the others; return its loss, or None where none could be made.

        It waits for a group, as long as it takes; meanwhile commits come in.
        """
        try:
            if self._group is None:
                self._enter_group(part, inputs, targets)
            assert self._group is not None
            group = self._group
            with group.lines.in_step():
                count = group.micro_batches
                pieces = inputs.chunk(count), targets.chunk(count)
                return group.stage.step(group.lines, *pieces, loss, clip)
        except GroupBroken as error:
            self._leave_group(part, str(error))
        except _RunOver:
            self._clear()
            self._boundary.stand_by(part)
        return None

    def close(self, part: Participation | None) -> None:
        """Leave the group, for good."""
        self._watched.close()
        if part is not None and self._group is not None:
            self._group.inbox.end("this peer leaves")
            self._group = None

    # ---- entering a group, and leaving it ----

    def _enter_group(self, part: Participation, inputs: Tensor, targets: Tensor) -> None:
        """Wait for a group and stand at the anchor as its stage. GroupBroken, _RunOver."""
        side = _side_of(part)
        if self._wanted is None:
            self._wanted = self._describe(part, inputs)
            logger.warning("looking for other machines that share; one begins with them at once", extra={"plain": True})
        self._tell(part, NOTHING)
        side.forget()
        part.swarm.call(side.formation.look, self._wanted)
        while (record := side.wait(LOOK_EVERY)) is None:
            self._boundary.stand_by(part)
            self._goes_on(part)
        self._train(part, record.part_of(part.identity.peer))
        self._group = self._begin(part, record, inputs, targets)
        self._group.lines.meet()
        self._tell_formed(part, record)

    def _tell_formed(self, part: Participation, record: GroupRecord) -> None:
        others = [peer_name(peer) for peer in record.members if peer != part.identity.peer]
        place, count = record.members.index(part.identity.peer), len(record.members)
        rounding = type(ROUNDINGS[record.rounding]).__name__.lower()
        made = {"stage": place, "micro_batches": record.micro_batches, "rounding": rounding}
        part.announce("group_formed", {"peers": others, **made})
        told = ", ".join(name[-8:] for name in others)
        logger.warning("one replica with %s: stage %d of %d", told, place + 1, count, extra={"plain": True})

    def _begin(self, part: Participation, record: GroupRecord, inputs: Tensor, targets: Tensor) -> _Group:
        me = part.identity.peer
        place, held = record.members.index(me), record.part_of(me)
        segments = [one for fragment in held for one in self._segments[fragment]]
        micro = inputs.chunk(record.micro_batches)[0]
        comes = self._run(micro, range(held.start)) if place else None
        is_last = place == len(record.members) - 1
        goes = None if is_last else _run(self._run(micro, range(held.start)) if comes is None else comes, segments)
        fragments = self._model.schema.fragments
        norms = {peer: sum(len(fragments[f].names) for f in range(first, stop)) for peer, first, stop in record.stages}
        forms = Forms.of(record, comes, goes, targets.chunk(record.micro_batches)[0], norms)
        inbox, side = StageInbox(record, me, forms), _side_of(part)
        part.swarm.begin(side.boundaries.run, inbox)
        part.swarm.begin(side.watch, inbox)
        patience = 4.0 * part.swarm.node.manifest.swarm.deadline_ceiling + 60.0

        def post(peer: PeerId, body: bytes) -> None:
            part.swarm.tell(side.boundaries.post, peer, body)

        lines = StageLines(inbox, me, forms, post, lambda: self._goes_on(part), patience)
        return _Group(Stage(segments, place, len(record.members)), inbox, lines, record.micro_batches)

    def _leave_group(self, part: Participation, why: str) -> None:
        self._clear()
        group, self._group = self._group, None
        if group is not None:
            group.inbox.end(why)
            if group.inbox.blamed is not None:
                part.swarm.call(_side_of(part).avoid, group.inbox.blamed)
        part.announce("group_over", {"why": why})
        logger.warning("the replica came apart: %s; looking for others", why, extra={"plain": True})

    def _train(self, part: Participation, held: range) -> None:
        """Train these fragments from the anchor on, and no others. _RunOver."""
        self._model.train_only(held)
        self._watched.close()
        self._watched.enter_context(self._model.undo_guard.watching())
        for optimizer in self._settings.optimizers.parts:
            for parameter in self._model.untrained:
                optimizer.state.pop(parameter, None)
        while not (written := run_blocking(part.loop.train_part(held))):
            self._boundary.stand_by(part)
            self._goes_on(part)
        self._boundary.share(part, written)
        self._tell(part, held)

    def _tell(self, part: Participation, held: range) -> None:
        part.reporter.part = held
        part.swarm.call(tell_part, part.swarm.node, held)

    def _clear(self) -> None:
        for parameter in self._model.trained.values():
            parameter.grad = None

    def _goes_on(self, part: Participation) -> None:
        """Raise where no step is to be waited for any more."""
        over = part.swarm.node.driver.head.final or self._boundary.done or self._control.hurries
        if over or not part.swarm.alive:
            raise _RunOver

    # ---- what this machine has ----

    def _describe(self, part: Participation, inputs: Tensor) -> Wanted:
        sizes = self._model.schema.sizes
        work = [_work_of(fragment, self._segments[fragment.index]) for fragment in self._model.schema.fragments]
        needs, memory = Needs(), self._settings.memory
        free = int(psutil.virtual_memory().available * (1 - SPARE)) + psutil.Process().memory_info().rss
        speed, width = self._measure(inputs[:1])
        uplink = part.links.uplink
        batch = len(inputs)
        return Wanted(
            mine=Machine(free if memory is None else memory, speed, uplink),
            work=work,
            needs=lambda held: needs.in_files(sizes, held),
            nbytes=4.0 * width,
            micro_batches=lambda stages: count_micro_batches(batch, stages),
        )

    def _measure(self, sample: Tensor) -> tuple[float, int]:
        """Return parameters times tokens a second, of the fragment in the middle, and the values of a token's state."""
        middle = len(self._segments) // 2
        came = self._run(sample, range(middle))
        state, count = came.detach().requires_grad_(came.is_floating_point()), 0
        best = float("inf")
        for _ in range(3):
            began = perf_counter()
            made = _run_free(state, self._segments[middle])
            if made.requires_grad:
                torch.autograd.backward(made, torch.ones_like(made))
            best = min(best, perf_counter() - began)
            count = made.numel() // made.shape[-1]
        numel = self._model.schema.fragments[middle].numel
        return numel * count / max(best, 1e-6), came.shape[-1]

    def _run(self, inputs: Tensor, fragments: range) -> Tensor:
        """Return what comes out of these fragments, from the first on, without gradients."""
        return _run(inputs, [one for fragment in fragments for one in self._segments[fragment]])


@torch.no_grad()
def _run(inputs: Tensor, segments: Sequence[Segment]) -> Tensor:
    for segment in segments:
        inputs = segment.run(inputs)
    return inputs


def _run_free(inputs: Tensor, segments: Sequence[Segment]) -> Tensor:
    for segment in segments:
        inputs = segment.run(inputs)
    return inputs


def _work_of(fragment: Fragment, segments: Sequence[Segment]) -> int:
    """Count the parameters that a token is multiplied with: an embedding is looked up."""
    modules = [inner for one in segments for module in one.modules for inner in module.modules()]
    looked_up = sum(module.weight.numel() for module in modules if isinstance(module, nn.Embedding))
    return fragment.numel - looked_up


def _side_of(part: Participation) -> GroupSide:
    assert part.sharing is not None, "made at the start of a peer that shares"
    return part.sharing
