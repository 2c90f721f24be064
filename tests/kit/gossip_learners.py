"""A member whose trainer has a live model and the real outer loop: every inner step moves it by known whole numbers."""

from __future__ import annotations

from typing import Any

import anyio
import torch

from decentral.replica.contribution import Contribution, range_of
from decentral.replica.pair_step import GossipStep
from decentral.rounds.local_state import CommittedUpdate
from decentral.simulate.lessons import Descent
from decentral.training.live_model import LiveModel
from decentral.training.live_side import LiveSide
from decentral.training.outer_loop import LoopControl, LoopParts, OuterLoop
from decentral.training.progress import Away
from decentral.training.schedule import SyncSchedule
from decentral.training.swarm_side import SameLoop, Updates
from tests.kit.nodes import Lab, Member

UNIT = 60.0  # divisible by 1 to 6: the mean of so many contributions is exact in float32


class Learner(Member):
    """Makes ``interval`` inner steps of ``pace`` seconds, contributes, waits for the commit, merges."""

    interval = 4
    tokens = 10  # per inner step
    pace = 0.25

    def __init__(self, lab: Lab, number: int, founder: bool) -> None:
        super().__init__(lab, number, founder)
        self.updates, self.control = Updates(), LoopControl()
        self.model = LiveModel(lab.make_model(), lab.manifest.outer.fragments, None)
        self.moved = [torch.zeros_like(anchor) for anchor in self.node.replica.anchors]
        self.given_up = [torch.zeros_like(anchor) for anchor in self.moved]  # because it was away, as movement
        self.given: dict[bytes, torch.Tensor] = {}  # record hash -> what it took from this peer
        self.generator = torch.Generator().manual_seed(number)
        self.inner = Descent()
        live = LiveSide(self.model, self.inner, self.signer.peer, lab.schema)
        self.schedule = SyncSchedule(self.interval, 0, self.node.replica.method, bytes(32), live=live)

    @property
    def is_up_to_date(self) -> bool:
        """Whether it has merged every commit so far."""
        return self.schedule.seen == self.node.driver.head.hash and self.updates.empty()

    def step(self) -> None:
        wanted = [UNIT * torch.randint(-2, 3, moved.shape, generator=self.generator) for moved in self.moved]
        taken = self.inner.step([-change for change in wanted], self.schedule.calls.before_step)
        for fragment, (moved, step) in enumerate(zip(self.moved, taken, strict=True)):
            self.model.write(fragment, self.model.read(fragment) - step)
            self.moved[fragment] = moved - step
        self.schedule.stepped()

    def _on_update(self, update: CommittedUpdate) -> None:
        super()._on_update(update)
        self.updates.put(update)
        if update.contribution is not None:
            self.given[update.head] = self.sent(update)

    async def _train(self) -> None:
        self.updates.drain()  # those are in the anchors already
        self.schedule.seen = self.node.driver.head.hash
        for fragment, anchor in enumerate(self.node.replica.anchors):
            self.model.write(fragment, anchor)
        async with anyio.create_task_group() as group:
            loop = OuterLoop(self.parts(SameLoop(self.node, self.updates, group)))
            while not loop.done:
                self.control.paused = self.idle
                await anyio.sleep(self.pace if not self.idle else 0.1)
                if not self.idle:
                    self.step()
                await loop.step_boundary()

    def parts(self, swarm: SameLoop) -> LoopParts:
        return LoopParts(
            manifest=self.lab.manifest,
            tokens_per_step=self.tokens,
            checkpoint_every=1,
            on_nan="stop",
            model=self.model,
            schedule=self.schedule,
            swarm=swarm,
            events=self,
            control=self.control,
            clock=anyio.current_time,
            save=lambda schedule: True,
        )

    def away(self, away: Away) -> None:
        self.given_up[away.fragment] -= away.dropped_N

    def waits(self, waiting: bool) -> None: ...

    def holds(self, seconds: float) -> None: ...

    def round_ended(self, update: CommittedUpdate, *, of_pairs: bool = False) -> None: ...

    def branch_left(self, outer_step: int) -> None: ...

    def swap_begins(self, mine: Contribution) -> None: ...

    def swap_ended(self, outcome: GossipStep) -> None: ...

    def starts_over(self, why: str) -> None: ...

    def sent(self, update: CommittedUpdate) -> torch.Tensor:
        """What a commit took from this peer, as the others decoded it: a frame, or the slices of a reduce."""
        replica, mine, record = self.node.replica, update.contribution, update.record
        if mine.encoded is not None:
            return replica.codec.decode(mine.encoded.body, replica.shapes(0))
        made = mine.slices[record.plan]
        slices = [(made[part].body, range_of(record, part)) for part in range(len(record.partition))]
        return torch.cat([replica.codec.decode(body, shapes) for body, shapes in slices])


def given_by(member: Learner, chain: list[Any]) -> torch.Tensor:
    """What the commits of ``chain`` took from ``member``, as the others decoded it, over all of the one fragment."""
    given = (member.given.get(commit.record.hash) for commit in chain)
    return sum((one for one in given if one is not None), torch.zeros_like(member.moved[0]))


def accounted_for(member: Learner, given: torch.Tensor) -> torch.Tensor:
    """Everything this peer ever learnt: given, owed as debt, ahead of the anchor in the live model, or given up."""
    replica = member.node.replica
    debt = replica.feedback[0].get("debt", torch.zeros_like(given))
    return member.given_up[0] - (given + debt + replica.anchors[0] - member.model.read(0))
