"""Frames of a kind that a run has no use for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from decentral.consensus import leader
from decentral.consensus.chain import contributions
from decentral.consensus.round_state import RoundState
from decentral.replica.contribution import Contribution
from decentral.wire.frames import FrameKind
from tests.kit.liars import acting_as
from tests.kit.nodes import Lab, Member, tiny_model


class Merging(Member):
    """Offers its parameters themselves, as at the end of a gossip run, where changes of them are due."""

    def __init__(self, lab: Lab, number: int, founder: bool) -> None:
        super().__init__(lab, number, founder)
        driver, contribute, replica = self.node.driver, self.node.driver.contribute, self.node.replica

        async def as_a_merge(made: Contribution) -> bool:
            made.kind = FrameKind.MERGE
            made.encoded = replica.merge_codec.encode(made.local_N, {}, replica.shapes(made.fragment))
            machine, offer = driver.machine, type(driver.machine).offer
            machine.offer = lambda said, now: offer(machine, replace(said, nbytes=1), now)  # type: ignore[method-assign]
            return await contribute(made)

        driver.contribute = as_a_merge  # type: ignore[method-assign]


@pytest.mark.parametrize("first", [0, 1, 2])
def test_parameters_in_a_run_that_sends_changes_are_left_out_and_end_nobody(
    run_lab: Any, terms: Any, first: int
) -> None:
    async def script(lab: Lab) -> None:
        for number in range(3):
            lab.add(kind=Merging if number == first else Member)
        await lab.all_members()
        await lab.rounds(3)
        liar = lab.members[first].signer.peer
        records = [commit.record for commit in lab.members[first].log if len(commit.record.members) == 3]
        assert sum(bool(record.frames) for record in records) >= 3
        assert all(ref.peer != liar for record in records for ref in contributions(record))

    run_lab(terms("diloco").changed(exchange={"kind": "gather"}), script, make_model=tiny_model)


class Cutting(Member):
    """Proposes records whose ranges are none that results were made for."""

    async def _train(self) -> None:
        make = leader.make_record

        def cut(
            state: RoundState, now: float, frames: Any = (), contributors: Any = (), partition: Any = (), plan: int = 0
        ) -> Any:
            shorter = tuple((owner, start, stop - 1) for owner, start, stop in partition)
            return make(state, now, frames, contributors, shorter, plan)

        with acting_as(self.node.driver.me, leader, make_record=cut):
            await super()._train()


def test_a_leader_whose_record_has_other_ranges_than_its_plan_finds_no_votes(run_lab: Any, terms: Any) -> None:
    async def script(lab: Lab) -> None:
        for number in range(3):
            lab.add(kind=Cutting if number == 1 else Member)
        await lab.all_members()
        await lab.rounds(6)
        whole = sum(fragment.numel for fragment in lab.schema.fragments)
        records = [commit.record for commit in lab.members[0].log]
        assert all(record.partition[-1][2] == whole for record in records if record.partition)

    run_lab(terms("diloco").changed(exchange={"kind": "reduce"}), script, make_model=tiny_model)
