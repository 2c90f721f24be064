"""Peers of a fivefold difference in speed, in real rounds of a method that goes by time."""

from __future__ import annotations

from typing import Any

from decentral.consensus.chain import contributions
from tests.kit.gossip_learners import Learner
from tests.kit.nodes import Lab

SECONDS, STEPS = 2.0, 100
PACES = (0.05, 0.05, 0.25)  # s per inner step


class Paced(Learner):
    """Makes as many inner steps as it can."""

    interval = STEPS

    def __init__(self, lab: Lab, number: int, founder: bool) -> None:
        super().__init__(lab, number, founder)
        self.pace = PACES[number]


def test_a_round_has_all_with_the_steps_that_each_made_in_the_time(run_lab: Any, terms: Any) -> None:
    """By steps the slow one would hold up every round for 25 s, or be passed by."""

    async def script(lab: Lab) -> None:
        for _ in PACES:
            lab.add(kind=Paced)
        await lab.all_members()
        await lab.rounds(6)
        numbers = {member.signer.peer: number for number, member in enumerate(lab.members)}
        rounds = [
            {numbers[ref.peer]: ref.steps for ref in contributions(commit.record)} for commit in lab.members[0].log
        ]
        whole = [one for one in rounds if len(one) == len(PACES)]
        assert len(whole) >= 4
        for steps in whole[1:]:
            assert 35 <= min(steps[0], steps[1]) <= max(steps[0], steps[1]) <= 60
            assert 7 <= steps[2] <= 12

    manifest = terms("a_edit").changed(
        outer={"seconds": SECONDS}, compressor={"chain": "bf16", "feedback": "none"}, inner={"steps": STEPS}
    )
    run_lab(manifest, script)
