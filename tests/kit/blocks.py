"""A model of two blocks, members that answer in turns, and a look at whether replicas are alike."""

from __future__ import annotations

import torch

from decentral.rounds.local_state import CommittedUpdate
from decentral.state.snapshot import outer_name
from decentral.training.schedule import SyncSchedule
from tests.kit.gossip_learners import Learner
from tests.kit.nodes import Lab, Member


def two_blocks() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 16))


class InTurns(Learner):
    """Its fragments take turns."""

    def __init__(self, lab: Lab, number: int, founder: bool) -> None:
        super().__init__(lab, number, founder)
        fragments = lab.manifest.outer.fragments
        method, live = self.node.replica.method, self.schedule.live
        self.schedule = SyncSchedule(self.interval, 0, method, bytes(32), fragments, live=live)

    def sent(self, update: CommittedUpdate) -> torch.Tensor:
        """Nobody asks."""
        return torch.zeros(0)


def states_of(member: Member) -> dict[str, torch.Tensor]:
    replica = member.node.replica
    named = ((outer_name(f, name), one) for f, state in enumerate(replica.states) for name, one in state.items())
    return dict(named)


def check_alike(members: list[Member]) -> None:
    first, *others = members
    for other in others:
        assert all(
            torch.equal(*pair) for pair in zip(first.node.replica.anchors, other.node.replica.anchors, strict=True)
        )
        theirs = states_of(other)
        for name, one in states_of(first).items():
            assert torch.equal(one, theirs[name]), name
