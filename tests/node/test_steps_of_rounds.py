"""The outer step that a record is of is the one that its contributions were made for."""

from __future__ import annotations

import pytest

from decentral.replica.apply import round_info
from tests.kit.nodes import Lab


@pytest.mark.parametrize("preset", ["des_loc", "delayed_nesterov"])
def test_a_method_with_channels_or_turns_of_its_own_commits_round_by_round_and_knows_the_step(run_lab, terms, preset):
    async def script(lab: Lab) -> None:
        first, _ = lab.add(), lab.add()
        await lab.all_members()
        await lab.rounds(4)
        records = [commit.record for commit in first.log if commit.record.frames]
        replica = first.node.replica
        infos = [round_info(replica, record, [1.0] * len(record.contributors or record.frames)) for record in records]
        assert [info.step for info in infos] == list(range(len(infos)))
        assert {one.age for info in infos for one in info.contributors} == {0}
        lab.check_equal()

    run_lab(terms(preset), script)
