"""The place of a peer in a replica of several machines (``join(share=True)``), on its training thread.

`StageLoop` enters groups and leaves them; here are the model's segments, what this machine has for a group, and what
people hear of it. Moments of what is not trained any more go; those of what stays, stay.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from concurrent.futures import CancelledError
from contextlib import suppress
from time import perf_counter

import psutil
import torch
from torch import Tensor

from decentral.errors import ConfigError, GroupBroken
from decentral.peer.boundary import Boundary
from decentral.peer.participation import Participation, settle_device
from decentral.peer.settings import Settings
from decentral.pipeline.boundary import ROUNDINGS
from decentral.pipeline.cut import Machine, holes_of
from decentral.pipeline.group import Wanted
from decentral.pipeline.lines import Forms, ThreadBell
from decentral.pipeline.stage import Loss, Segment, Stage, segments_of, work_of
from decentral.pipeline.turns import FAR, NEAR, count_micro_batches
from decentral.training.live_model import in_evaluation
from decentral.training.outer_loop import LoopControl
from decentral.training.part import SPARE, Needs
from decentral.training.stage_loop import Membership, StageLoop, StepGivenUp
from decentral.training.swarm_side import AcrossThreads, LoopEnded, run_blocking
from decentral.wire.groups import GroupRecord
from decentral.wire.keys import peer_name

logger = logging.getLogger("decentral.peer")

ROUNDS = 4.0  # times the ceiling of a round, and a minute, for which a member may send nothing


class SharedReplica:
    """The inner steps of a peer that shares a replica: gradients of its own stage, as far as there is a group."""

    def __init__(self, settings: Settings, boundary: Boundary, control: LoopControl) -> None:
        self._settings, self._boundary, self._control = settings, boundary, control
        self._model = settings.model
        self._segments = segments_of(self._model.bare, self._model.schema.fragments)
        self._host: _Host | None = None  # once the first batch is there

    def gradients(
        self, part: Participation, inputs: Tensor, targets: Tensor, loss: Loss, clip: float | None
    ) -> float | None:
        """Make the gradients of one inner step with the others; return its loss, or None where none could be made.

        It waits for a group, as long as it takes; meanwhile commits come in.
        """
        try:
            return run_blocking(self._gradients(part, inputs, targets, loss, clip))
        except (LoopEnded, CancelledError):  # the swarm's side ends just now, and its error says more
            raise part.swarm.reason() from None

    async def _gradients(
        self, part: Participation, inputs: Tensor, targets: Tensor, loss: Loss, clip: float | None
    ) -> float | None:
        if self._host is None:
            self._host = _Host(self, part, inputs, targets)
            logger.warning("looking for other machines that share", extra={"plain": True})
        loop = self._host.loop
        self._host.check_batch(inputs, targets)
        try:
            self._host.goes_on()
            group = loop.group or await self._host.enter()
            count = group.record.micro_batches
            with group.lines.in_step():
                return await self._host.stage.step(group.lines, inputs.chunk(count), targets.chunk(count), loss, clip)
        except GroupBroken as error:
            await loop.leave(str(error))
            self._host.tell_over(str(error))
        except StepGivenUp:
            if self._control.leaving or self._host.rests:
                await loop.rest("this peer leaves" if self._control.leaving else "this peer rests")
            self._boundary.stand_by(part)
        for parameter in self._model.trained.values():  # half made
            parameter.grad = None
        return None

    def close(self) -> None:
        """Leave the group, for good."""
        if self._host is not None:
            with suppress(LoopEnded, CancelledError):  # the swarm's side has ended, and with it the group
                run_blocking(self._host.loop.leave("this peer leaves"))


class _Host:
    """The training of one peer, as `StageLoop` asks for it."""

    def __init__(self, shared: SharedReplica, part: Participation, inputs: Tensor, targets: Tensor) -> None:
        self._shared, self._part, self._inputs, self._targets = shared, part, inputs, targets
        self._model, self._segments = shared._model, shared._segments
        assert part.sharing is not None, "made at the start of a peer that shares"
        patience = ROUNDS * part.swarm.node.manifest.swarm.deadline_ceiling + 60.0
        self.loop = StageLoop(part.sharing, AcrossThreads(part.swarm), self, ThreadBell(), patience)
        self.stage = Stage((), 0, 1)
        self._wanted = self._describe()

    def check_batch(self, inputs: Tensor, targets: Tensor) -> None:
        """Raise ConfigError for a batch of another shape than the first: the others wait for as many micro-batches."""
        for given, first in ((inputs, self._inputs), (targets, self._targets)):
            if given.shape != first.shape:
                raise ConfigError(
                    f"peer.gradients: a batch of {tuple(given.shape)} after one of {tuple(first.shape)}; in a replica "
                    "of several machines all have one shape: give a DataLoader drop_last=True"
                )

    async def enter(self) -> Membership:
        """Wait for a group, and stand at the anchor as its stage. GroupBroken, StepGivenUp."""
        group = await self.loop.enter(self._wanted)
        others = [peer_name(peer) for peer in group.record.members if peer != self._part.identity.peer]
        rounding = type(ROUNDINGS[group.record.rounding]).__name__.lower()
        made = {"stage": group.place, "micro_batches": group.record.micro_batches, "rounding": rounding}
        left_out = list(group.record.hole or ())
        self._part.announce("group_formed", {"peers": others, **made, "left_out": left_out})
        told = ", ".join(name[-8:] for name in others)
        short = f", without fragments {', '.join(map(str, left_out))}" if left_out else ""
        logger.warning(
            "one replica with %s: stage %d of %d%s",
            told,
            group.place + 1,
            len(others) + 1,
            short,
            extra={"plain": True},
        )
        return group

    def tell_over(self, why: str) -> None:
        """Say that the group is no more."""
        self._part.announce("group_over", {"why": why})
        logger.warning("the replica came apart: %s; looking for others", why, extra={"plain": True})

    # ---- as the loop asks for it ----

    @property
    def rests(self) -> bool:
        """True while a person, or the day's upload, holds this peer back."""
        return self._shared._control.paused or bool(self._part.swarm.node.resting.reasons)

    def goes_on(self) -> None:
        """Raise StepGivenUp where nothing is to be waited for any more."""
        swarm, shared = self._part.swarm, self._shared
        over = swarm.node.driver.head.final or shared._boundary.done or shared._control.hurries
        if over or self.rests or not swarm.alive:
            raise StepGivenUp

    async def stand_by(self) -> None:
        """Merge what came; it takes a moment."""
        self._shared._boundary.stand_by(self._part)

    async def train_part(self, part: range) -> bool:
        """Train these fragments from the anchor on, and no others."""
        self._model.train_only(part)
        for optimizer in self._shared._settings.optimizers.parts:
            for parameter in self._model.untrained:
                optimizer.state.pop(parameter, None)
        self._part.reporter.part = part
        written = await self._part.loop.train_part(part)
        self._shared._boundary.share(self._part, written)
        return bool(written)

    def forms(self, record: GroupRecord) -> Forms:
        """Return the forms of what crosses, by running a micro-batch up to there; from now on this peer is that stage.

        What others send is so held against what this peer itself knows of the model.
        """
        me, last = self._part.identity.peer, len(record.members) - 1
        place, part = record.members.index(me), record.part_of(me)
        micro, targets = (given.chunk(record.micro_batches)[0] for given in (self._inputs, self._targets))
        segments = self._of(part)
        before = self._run(micro, self._of(record.before(me)))
        after = None if place == last else self._run(before, segments)
        fragments = self._model.schema.fragments
        norms = {peer: sum(len(fragments[f].names) for f in range(first, stop)) for peer, first, stop in record.stages}
        self.stage = Stage(segments, place, last + 1, NEAR if record.rounding == 0 else FAR)
        return Forms.of(record, before if place else None, after, targets, norms)

    # ---- what this machine has ----

    def _describe(self) -> Wanted:
        """Return what a group is wanted for, and what this machine has for it, its speed by a measurement."""
        sizes, needs = self._model.schema.sizes, Needs()
        work = [work_of(fragment, self._segments[fragment.index]) for fragment in self._model.schema.fragments]
        free = int(psutil.virtual_memory().available * (1 - SPARE)) + psutil.Process().memory_info().rss
        given, batch = self._shared._settings.memory, len(self._inputs)
        speed, width = self._measure()
        return Wanted(
            mine=Machine(free if given is None else given, speed, self._part.links.uplink),
            work=work,
            needs=lambda held: needs.in_files(sizes, held),
            nbytes=4.0 * width,
            micro_batches=lambda stages: count_micro_batches(batch, stages),
            holes=self._holes(),
        )

    def _holes(self) -> list[range]:
        """Return what may be left out, by the run's terms, and because states have one form before and after."""
        most = self._part.swarm.node.manifest.outer.most_skipped
        if not most:
            return []
        skippable, made = [], self._inputs[:1]
        for fragment in range(len(self._segments)):
            came, made = made, self._run(made, self._of((fragment,)))
            skippable.append(came.shape == made.shape and came.dtype == made.dtype)
        return holes_of(skippable, most)

    def _measure(self) -> tuple[float, int]:
        """Return parameters times tokens a second, of the fragment in the middle, and the values of a token's state."""
        middle, best = len(self._segments) // 2, float("inf")
        came = self._run(self._inputs[:1], self._of(range(middle)))
        for _ in range(3):
            state = came.detach().requires_grad_(came.is_floating_point())
            settle_device()
            began, made = perf_counter(), state
            for segment in self._segments[middle]:
                made = segment.run(made)
            if made.requires_grad:
                torch.autograd.backward(made, torch.ones_like(made))
            settle_device()
            best = min(best, perf_counter() - began)
        numel, tokens = self._model.schema.fragments[middle].numel, came.numel() // came.shape[-1]
        return numel * tokens / max(best, 1e-6), came.shape[-1]

    def _of(self, part: Iterable[int]) -> list[Segment]:
        return [one for fragment in part for one in self._segments[fragment]]

    def _run(self, inputs: Tensor, segments: Sequence[Segment]) -> Tensor:
        """Go forward to see what comes out; nothing of the model changes, nor is anything drawn."""
        with in_evaluation(self._model.bare):
            for segment in segments:
                inputs = segment.run(inputs)
        return inputs
