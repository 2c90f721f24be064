"""A member whose trainer has a live model and the real rhythm: every inner step moves it by known whole numbers."""

from __future__ import annotations

from typing import Any

import anyio
import torch

from decentral.replica.contribution import range_of
from decentral.rounds.driver import CommittedUpdate
from decentral.training.live_model import LiveModel
from decentral.training.starting_over import anchors_without_debt
from decentral.training.sync_schedule import SyncSchedule
from tests.peer.conftest import Lab, Member

UNIT = 60.0  # divisible by 1 to 6: the mean of so many contributions is exact in float32


class Learner(Member):
    """Makes ``interval`` inner steps of ``pace`` seconds, contributes, waits for the commit, merges."""

    interval = 4
    tokens = 10  # per inner step
    pace = 0.25

    def __init__(self, lab: Lab, number: int, founder: bool) -> None:
        super().__init__(lab, number, founder)
        self.model = LiveModel(lab.make_model(), lab.manifest.outer.fragments, None)
        for fragment, anchor in enumerate(self.node.replica.anchors):
            self.model.write(fragment, anchor)
        self.moved = [torch.zeros_like(anchor) for anchor in self.node.replica.anchors]
        self.given_up = [torch.zeros_like(anchor) for anchor in self.moved]  # because it was away, as movement
        self.given: dict[bytes, torch.Tensor] = {}  # record hash -> what it took from this peer
        self.generator = torch.Generator().manual_seed(number)
        self.rhythm = SyncSchedule(self.interval, 0, None, bytes(32))

    def step(self) -> None:
        for fragment, moved in enumerate(self.moved):
            change = UNIT * torch.randint(-2, 3, moved.shape, generator=self.generator)
            self.model.write(fragment, self.model.read(fragment) + change)
            self.moved[fragment] = moved + change
        self.rhythm.stepped()

    def due(self) -> bool:
        return self.rhythm.due or self.rhythm.due_early(self.node.driver.pressed, self.pace)

    async def _train(self) -> None:
        driver = self.node.driver
        self.rhythm.seen = driver.head.hash
        for fragment, anchor in enumerate(self.node.replica.anchors):
            self.model.write(fragment, anchor)
        while not driver.head.final:
            if not self.idle:
                await anyio.sleep(self.pace)
                self.step()
            else:
                await anyio.sleep(0.1)
            self.merge()
            if self.due() and not self.idle:
                await self.contribute()
                while self.rhythm.sent_at is not None:
                    await anyio.sleep(0.05)
                    self.merge()

    async def contribute(self) -> None:
        driver, head = self.node.driver, self.node.driver.head
        if head.anchor is None or head.final or head.hash != self.rhythm.seen or not driver.is_member:
            return
        fragment = head.fragment(self.lab.manifest.outer.fragments)
        anchor = self.node.replica.anchors[fragment]
        contribution = self.rhythm.take(self.model, fragment, anchor, head.hash, self.tokens)
        if contribution is None:
            await self.start_over(self.rhythm.away_too_long(fragment))
        elif not await driver.contribute(contribution):
            self.rhythm.withdrawn()

    async def start_over(self, fragments: list[int]) -> None:
        debts = [self.node.replica.feedback[f].get("debt") for f in fragments]
        standing = await anchors_without_debt(self.node, self.rhythm.seen, fragments)
        if standing is None:
            return
        for fragment, debt in zip(fragments, debts, strict=True):
            self.given_up[fragment] -= debt if debt is not None else 0.0
        self.rhythm.restart(self.model, standing[0], fragments)
        self.tell_given_up()

    def tell_given_up(self) -> None:
        for away in self.rhythm.given_up:
            self.given_up[away.fragment] -= away.dropped_N
        self.rhythm.given_up.clear()

    def merge(self) -> None:
        self.rhythm.waiting.extend(self.advances)
        self.advances.clear()
        while (advance := self.rhythm.mergeable()) is not None:
            self.rhythm.merge(advance, self.model)
            self.tell_given_up()
            if advance.contribution is not None:
                self.given[advance.head] = self.sent(advance)

    def sent(self, advance: CommittedUpdate) -> torch.Tensor:
        """What a commit took from this peer, as the others decoded it: a frame, or the slices of a reduce."""
        replica, mine, record = self.node.replica, advance.contribution, advance.record
        if mine.encoded is not None:
            return replica.codec.decode(mine.encoded.body, replica.shapes(0))
        made = mine.slices[record.plan]
        slices = [(made[part].body, range_of(record, part)) for part in range(len(record.partition))]
        return torch.cat([replica.codec.decode(body, shapes) for body, shapes in slices])

    def happened(self, event: str) -> list[dict[str, Any]]:
        return [fields for name, fields in self.events if name == event]


def given_by(member: Learner, chain: list[Any]) -> torch.Tensor:
    """What the commits of ``chain`` took from ``member``, as the others decoded it, over all of the one fragment."""
    given = (member.given.get(commit.record.hash) for commit in chain)
    return sum((one for one in given if one is not None), torch.zeros_like(member.moved[0]))


def accounted_for(member: Learner, given: torch.Tensor) -> torch.Tensor:
    """Everything this peer ever learnt: given, owed as debt, ahead of the anchor in the live model, or given up."""
    replica = member.node.replica
    debt = replica.feedback[0].get("debt", torch.zeros_like(given))
    return member.given_up[0] - (given + debt + replica.anchors[0] - member.model.read(0))
