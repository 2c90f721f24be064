"""How a peer enters a replica of several machines, and leaves it: the same for a training thread and a simulated peer.

While it has no group it holds no fragment: it follows the run, votes, and looks for others. In a group it is a stage:
it trains the fragments of its part and offers them in their turns. When a member is gone the group is no more, and each
that is left looks again: a spare is who looks. A group begins at the anchor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from decentral.node.node import Node
from decentral.pipeline.group import GroupSide, Wanted
from decentral.pipeline.lines import Bell, Forms, StageInbox, StageLines
from decentral.training.swarm_side import SwarmSide
from decentral.wire.groups import GroupRecord
from decentral.wire.keys import PeerId

__all__ = ["Membership", "StageHost", "StageLoop", "StepGivenUp"]


class StepGivenUp(Exception):
    """The run is over, or this peer leaves: a step that others wait for is not ended."""


class StageHost(Protocol):
    """The training that a stage is for."""

    def goes_on(self) -> None:
        """Raise StepGivenUp where nothing is to be waited for any more."""
        ...

    async def stand_by(self) -> None:
        """Merge what came while no inner step can be made; it takes a moment."""
        ...

    async def train_part(self, part: range) -> bool:
        """Train these fragments from the anchor on, and no others; False: ask again after a moment."""
        ...

    def forms(self, record: GroupRecord) -> Forms:
        """Return the forms of what crosses to and from this peer in a group."""
        ...


@dataclass(frozen=True, slots=True)
class Membership:
    """The place of a peer in a group that it is in now."""

    record: GroupRecord
    place: int
    inbox: StageInbox
    lines: StageLines


class StageLoop:
    """The groups of one peer, one after the other. ``patience``: s for which a member may send nothing."""

    def __init__(self, side: GroupSide, swarm: SwarmSide, host: StageHost, bell: Bell, patience: float) -> None:
        self._side, self._swarm, self._host, self._bell, self._patience = side, swarm, host, bell, patience
        self.group: Membership | None = None

    async def enter(self, wanted: Wanted) -> Membership:
        """Wait for a group, as long as it takes, and stand at the anchor as its stage.

        GroupBroken where it came to nothing, StepGivenUp.
        """
        await self._swarm.call(self._side.look, wanted)
        while (record := self._side.record) is None:
            await self._host.stand_by()
            self._host.goes_on()
        me = self._swarm.node.driver.state.me
        part = record.part_of(me)
        while not await self._host.train_part(part):
            await self._host.stand_by()
            self._host.goes_on()
        self.group = group = await self._begin(record, me)
        await self._swarm.call(_say, self._swarm.node, part)
        await group.lines.meet()
        return group

    async def leave(self, why: str) -> None:
        """Be in no group any more; the other members hear of it."""
        group, self.group = self.group, None
        if group is None:
            return
        group.inbox.end(why)
        if group.inbox.blamed is not None:
            await self._swarm.call(self._side.avoid, group.inbox.blamed)

    async def rest(self, why: str) -> None:
        """Be in no group, and look for none."""
        await self.leave(why)
        await self._swarm.call(self._side.look, None)

    async def _begin(self, record: GroupRecord, me: PeerId) -> Membership:
        forms = self._host.forms(record)
        inbox = StageInbox(record, me, forms, self._bell)
        self._swarm.begin(self._side.enter, inbox)

        async def post(peer: PeerId, body: bytes) -> None:
            self._swarm.begin(self._side.boundaries.post, peer, body)

        lines = StageLines(inbox, me, forms, post, self._host.goes_on, self._patience)
        return Membership(record, record.members.index(me), inbox, lines)


async def _say(node: Node, part: range) -> None:
    node.directory.own.train(part)
