"""The training side of a simulated peer that shares a replica: it forms groups and steps with them as a real one does.

What crosses is one number for each micro-batch; who waits for whom, and for how long, is as it is.
"""

from __future__ import annotations

from typing import Any

import anyio
import torch
from torch import Tensor

from decentral.errors import GroupBroken
from decentral.pipeline.cut import Machine
from decentral.pipeline.group import GroupSide, Wanted
from decentral.pipeline.lines import Forms, LoopBell
from decentral.pipeline.stage import Done
from decentral.pipeline.turns import turns_of
from decentral.simulate.training import Trainer
from decentral.training.stage_loop import Membership, StageLoop, StepGivenUp
from decentral.training.swarm_side import SameLoop
from decentral.wire.groups import GroupRecord

MICRO_BATCHES = 2
PATIENCE = 60.0  # s of virtual time
ONE = torch.zeros(1, dtype=torch.float32, device="cpu")


def wanted(fragments: int, stages: int) -> Wanted:
    """Return what such a peer wants a group for: so many machines hold the model together, and fewer do not."""
    held = -(-fragments // stages)
    return Wanted(
        mine=Machine(held, 1.0),
        work=[1] * fragments,
        needs=len,
        nbytes=4.0,
        micro_batches=lambda count: MICRO_BATCHES,
    )


class StageTrainer(Trainer):
    """The training of one life of a peer that shares."""

    def __init__(self, *given: Any, side: GroupSide, swarm: SameLoop, stages: int) -> None:
        super().__init__(*given, is_stage=True)
        fragments = self.schedule.num_fragments
        self._wanted = wanted(fragments, stages)
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
        self.note("group_formed", members=list(group.record.members), part=[part.start, part.stop])
        return group

    async def _step_with(self, group: Membership) -> None:
        """Do in a step what a stage does, without a model."""
        lines, last = group.lines, len(group.record.members) - 1
        seconds = self.pace.next() / (2 * MICRO_BATCHES)
        if group.place == 0:
            for micro in range(MICRO_BATCHES):
                await lines.send_targets(micro, ONE)
        for turn in turns_of(group.place, last + 1, MICRO_BATCHES):
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
