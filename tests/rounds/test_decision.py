"""How a commit came about, as the members of its round tell it."""

from __future__ import annotations

from collections.abc import Callable

from decentral.consensus.chain import VOTING
from decentral.manifest import Manifest
from tests.kit.nodes import Lab, tiny_model


def test_a_commit_names_the_leader_of_its_own_round_and_not_of_the_next(
    run_lab: Callable[..., None], terms: Callable[..., Manifest]
) -> None:
    async def script(lab: Lab) -> None:
        members = [lab.add() for _ in range(3)]
        await lab.all_members()
        await lab.rounds(5)
        history = members[0].node.driver.machine.state.history
        seen = [update for update in members[0].all_updates if update.record is not None]
        for update in seen:
            assert update.record is not None
            assert update.decision is not None
            before = history.at((update.record.round - 1, update.record.previous))
            assert before is not None
            leaders = VOTING.leaders(before)
            assert update.decision.leader == leaders[update.decision.ballot % len(leaders)]
        assert len(seen) > 5

    run_lab(terms("sparseloco"), script, make_model=tiny_model)
