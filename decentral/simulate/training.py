"""The training side of a simulated peer: it steps, contributes and merges exactly when a real one would."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import anyio
import torch
from torch import Tensor

from decentral.compressors.feedback import DEBT
from decentral.errors import GroupBroken
from decentral.node.node import Node
from decentral.pipeline.cut import Machine, holes_of
from decentral.pipeline.group import GroupSide, Wanted
from decentral.pipeline.lines import Forms, LoopBell
from decentral.pipeline.stage import Done
from decentral.pipeline.turns import Turns
from decentral.replica.contribution import Contribution
from decentral.replica.pair_step import GossipStep
from decentral.rounds.local_state import CommittedUpdate
from decentral.simulate.equations import state_name
from decentral.simulate.lessons import Lesson
from decentral.training.outer_loop import LoopControl, LoopParts, OuterLoop
from decentral.training.progress import Away, read_live
from decentral.training.schedule import SyncSchedule
from decentral.training.stage_loop import Membership, StageLoop, StepGivenUp
from decentral.training.swarm_side import SameLoop
from decentral.wire.groups import GroupRecord

CHECKPOINT_EVERY = 5  # commits
Note = Callable[..., None]  # event, tensors, fields

# Shape suffix: N = elements of one fragment, flat float32.


class FlatModel:
    """The live parameters, fragment by fragment."""

    def __init__(self, fragments: Sequence[Tensor]) -> None:
        self.fragments = [fragment.clone() for fragment in fragments]

    def read(self, fragment: int) -> Tensor:
        """A copy of one fragment."""
        return self.fragments[fragment].clone()

    def write(self, fragment: int, flat_N: Tensor) -> None:
        """Overwrite one fragment."""
        self.fragments[fragment] = flat_N.clone()

    def keeps(self, fragment: int) -> bool:
        """It is float32."""
        return True

    def in_place(self, fragment: int) -> list[Tensor]:
        """All of it."""
        return [self.fragments[fragment]]

    def check_trained(self) -> None:
        """All of it is, always."""

    def read_buffers(self) -> Tensor:
        """It has none."""
        return torch.zeros(0)

    def write_buffers(self, flat_B: Tensor) -> None:
        """It has none."""


@dataclass(slots=True)
class StepPace:
    """Seconds of one inner step: a peer's own speed, a factor per step, and now and then a straggle.

    Sources: proposals of ours, with the tail as in Dean and Barroso, "The Tail at Scale", 2013.
    """

    generator: random.Random
    seconds: float
    jitter: float = 0.0  # sigma of the lognormal factor
    straggles: float = 0.0  # share of steps that take a Pareto(1.3) factor of at most 50

    def next(self) -> float:
        """Seconds that the next step takes."""
        factor = self.generator.lognormvariate(0.0, self.jitter) if self.jitter else 1.0
        if self.straggles and self.generator.random() < self.straggles:
            factor *= min(50.0, self.generator.paretovariate(1.3))
        return self.seconds * factor


class TraceEvents:
    """Events of the loop, as entries of the trace."""

    def __init__(self, node: Node, model: FlatModel, lesson: Lesson, note: Note) -> None:
        self._node, self._model, self._lesson, self._note = node, model, lesson, note
        self._before: dict[str, Tensor] = {}  # the gossip step in progress
        self._sent: tuple[Tensor, Tensor] | None = None  # of its change, in a pair and alone

    def waits(self, waiting: bool) -> None:
        """Its clock shows that."""

    def holds(self, seconds: float) -> None:
        """Copying takes none of its time."""

    def round_ended(self, update: CommittedUpdate, *, of_pairs: bool = False) -> None:
        """It was noted as it was applied."""

    def swap_begins(self, mine: Contribution) -> None:
        """Note what the checker of pairs needs of before."""
        state = self._node.replica.states[mine.fragment]
        self._before = {state_name(name): one_N for name, one_N in state.items()}
        self._sent = self._as_sent(mine)

    def _as_sent(self, mine: Contribution) -> tuple[Tensor, Tensor]:
        """Return what compression leaves of the change with the residual, and all of both, which a peer alone takes."""
        replica, change_N = self._node.replica, mine.gradient_N
        if replica.method.channels()[0].is_replica:
            return change_N, change_N
        owed, shapes = replica.feedback[mine.fragment], replica.shapes(mine.fragment)
        payloads = replica.codec.encode(change_N, owed, shapes).payloads
        return replica.codec.decompress(payloads), replica.codec.all_of(change_N, owed, shapes)[0]

    def swap_ended(self, outcome: GossipStep) -> None:
        """A gossip step."""
        assert self._sent is not None, "it began"
        change_N = self._sent[0 if outcome.partner else 1]
        tensors = {"before": outcome.before_N, "after": outcome.after_N, "change": change_N, **self._before}
        loss = self._lesson.loss(self._model.fragments)
        self._note("swapped", tensors, round=outcome.step, partner=outcome.partner, loss=loss)

    def branch_left(self, outer_step: int) -> None:
        """The trace has the branch by its records."""

    def away(self, away: Away) -> None:
        """Progress, and with what starts over its debt, that is given up."""
        self._note("away", {str(away.fragment): away.dropped_N}, **away.fields())

    def starts_over(self, why: str) -> None:
        """Nothing here becomes NaN."""
        self._note("restarted", None, why=why)


class Trainer:
    """The training of one life of one peer: ``run`` it beside the node."""

    def __init__(
        self,
        side: SameLoop,
        model: FlatModel,
        schedule: SyncSchedule,
        pace: StepPace,
        lesson: Lesson,
        note: Note,
        save: Callable[[SyncSchedule], bool],
        *,
        is_stage: bool = False,
    ) -> None:
        self.node, self.model, self.schedule, self.pace = side.node, model, schedule, pace
        self.lesson, self.note = lesson, note
        self.num_steps = 0  # a process that goes on for a previous incarnation says from where
        self.asleep = False
        self.busy_seconds = 0.0
        self._control, self._scope, self._ended = LoopControl(), anyio.CancelScope(), anyio.Event()
        self.loop = OuterLoop(
            LoopParts(
                manifest=side.node.manifest,
                tokens_per_step=1,
                checkpoint_every=CHECKPOINT_EVERY,
                on_nan="stop",
                model=model,
                schedule=schedule,
                swarm=side,
                events=TraceEvents(side.node, model, lesson, note),
                control=self._control,
                clock=anyio.current_time,
                save=save,
                is_stage=is_stage,
            )
        )

    @property
    def idle(self) -> bool:
        """Return whether it makes no inner steps any more, and only follows."""
        return self._control.paused

    def rest(self) -> None:
        """Make no inner step any more."""
        self._control.paused = True
        self.schedule.timing.overlap = 0  # no inner step comes that a merge could wait for

    async def run(self) -> None:
        """Train until the run is over, or until stopped."""
        try:
            with self._scope:
                while not self.loop.done:
                    await self._train()
        finally:
            self._ended.set()

    async def stop(self) -> bool:
        """Interrupt it as Ctrl-C does, wherever it is, and wait for what a partner may have taken; False: not known."""
        self._scope.cancel()
        await self._ended.wait()
        return await self.loop.settle()

    async def _train(self) -> None:
        seconds = self.pace.next()
        await anyio.sleep(seconds)
        if self.asleep:
            return
        if not self.idle:
            self._step()
            self.busy_seconds += seconds
        await self.loop.step_boundary()

    def _step(self) -> None:
        self.num_steps += 1
        steps = self.lesson.step(self.model.fragments, self.num_steps, self.schedule.calls.before_step)
        for fragment in self.schedule.part:
            self.model.fragments[fragment] -= steps[fragment]
        self.schedule.stepped()
        self.note("stepped", number=self.num_steps, part=list(self.schedule.part))

    def uncommitted(self) -> dict[str, Tensor]:
        """Return what no commit has taken yet, per fragment: local progress and the debt of what was sent by halves."""
        return {str(f): self._uncommitted(f, anchor_N) for f, anchor_N in enumerate(self.node.replica.anchors)}

    def without_debts(self) -> dict[str, Tensor]:
        """The local progress alone: all that is left when a partner may hold what was owed."""
        anchors = enumerate(self.node.replica.anchors)
        return {f"learnt/{f}": self._learnt(f, anchor_N) for f, anchor_N in anchors}

    def _learnt(self, fragment: int, anchor_N: Tensor) -> Tensor:
        """As if training had gone on where a contribution was taken, which is where a restart goes on from."""
        return anchor_N - read_live(self.model, fragment, self.schedule.progress[fragment])

    def _uncommitted(self, fragment: int, anchor_N: Tensor) -> Tensor:
        debt_N = self.node.replica.feedback[fragment].get(DEBT)
        progress_N = self._learnt(fragment, anchor_N)
        return progress_N if debt_N is None else progress_N + debt_N


# ---- a peer that shares a replica ----
#
# It forms groups and steps with them as a real one does. What crosses is one number for each micro-batch; who waits for
# whom, and for how long, is as it is.

MICRO_BATCHES = 2
PATIENCE = 60.0  # s of virtual time
ONE = torch.zeros(1, dtype=torch.float32, device="cpu")


def wanted(fragments: int, stages: int, skipped: int) -> Wanted:
    """Return what such a peer wants a group for: so many machines hold the model together, and fewer do not.

    ``skipped``: fragments that fewer may do without.
    """
    held = -(-fragments // stages)
    return Wanted(
        mine=Machine(held, 1.0),
        work=[1] * fragments,
        needs=len,
        nbytes=4.0,
        micro_batches=lambda count: MICRO_BATCHES,
        holes=holes_of([True] * fragments, skipped),
    )


class StageTrainer(Trainer):
    """The training of one life of a peer that shares."""

    def __init__(self, *given: Any, side: GroupSide, swarm: SameLoop, stages: int) -> None:
        super().__init__(*given, is_stage=True)
        self._wanted = wanted(self.schedule.num_fragments, stages, self.node.manifest.outer.most_skipped)
        self._stages = StageLoop(side, swarm, self, LoopBell(), PATIENCE)
        self._side = side

    async def _train(self) -> None:
        if self.asleep or self.idle:
            if self._stages.group is not None:
                await self._stages.leave("it rests")
            await super()._train()
            return
        try:
            group = self._stages.group or await self._enter()
            with group.lines.in_step():
                await self._step_with(group)
        except GroupBroken as error:
            self.note("group_over", why=str(error))
            await self._stages.leave(str(error))
            return
        except StepGivenUp:
            await self.stand_by()
            return
        self._step()
        await self.loop.step_boundary()

    async def _enter(self) -> Membership:
        group = await self._stages.enter(self._wanted)
        part = group.record.part_of(self.node.driver.state.me)
        hole = list(group.record.hole or ())
        self.note("group_formed", members=list(group.record.members), part=[part.start, part.stop], left_out=hole)
        return group

    async def _step_with(self, group: Membership) -> None:
        """Do in a step what a stage does, without a model."""
        lines, last = group.lines, len(group.record.members) - 1
        seconds = self.pace.next() / (2 * MICRO_BATCHES)
        if group.place == 0:
            for micro in range(MICRO_BATCHES):
                await lines.send_targets(micro, ONE)
        turns = Turns(group.place, last + 1, MICRO_BATCHES)
        while able := turns.next():
            turns.take(turn := await lines.first_here(able))
            if turn.forward and group.place > 0:
                await lines.receive_states(turn.micro)
            elif not turn.forward:
                await (lines.receive_gradient if group.place < last else lines.receive_targets)(turn.micro)
            await anyio.sleep(seconds)
            self.busy_seconds += seconds
            if turn.forward and group.place < last:
                await lines.send_on(turn.micro, ONE)
            elif not turn.forward and group.place > 0:
                await lines.send_back(turn.micro, ONE)
        await lines.exchange(Done(torch.empty(0, dtype=torch.float32, device="cpu")))

    # ---- as the loop of stages asks for it ----

    def goes_on(self) -> None:
        """Raise StepGivenUp where nothing is to be waited for any more."""
        if self.asleep or self.idle or self.loop.done:
            raise StepGivenUp

    async def stand_by(self) -> None:
        """Merge what came; it takes a moment."""
        await self.loop.stand_by()

    async def train_part(self, part: range) -> bool:
        """Train these fragments from the anchor on, and no others."""
        return bool(await self.loop.train_part(part))

    def forms(self, record: GroupRecord) -> Forms:
        """Return the forms of one number."""
        place = record.members.index(self.node.driver.state.me)
        before: Tensor | None = ONE if place else None
        after: Tensor | None = ONE if place < len(record.members) - 1 else None
        return Forms.of(record, before, after, ONE, dict.fromkeys(record.members, 0))
