"""The one outer loop, beside a node on its event loop and across threads."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from itertools import pairwise
from typing import Any

import anyio
import pytest
import torch

from decentral.optimizers.edit import AEDiT
from decentral.replica.contribution import Contribution
from decentral.replica.replica import OWED
from decentral.rounds.local_state import CommittedUpdate
from decentral.training.inner_states import forget_non_finite
from decentral.training.outer_loop import LoopParts, OuterLoop, anchors_without_debt
from decentral.training.progress import Away
from decentral.training.schedule import SyncSchedule
from decentral.training.swarm_side import SameLoop, Updates, run_blocking
from tests.kit.gossip_learners import Learner
from tests.kit.nodes import Lab, tiny_model
from tests.kit.partitions import DENSE, exact_terms


def test_a_coroutine_that_would_suspend_a_thread_is_an_error_and_not_a_loop_that_stands_still() -> None:
    async def blocks() -> int:
        return 7

    async def suspends() -> None:
        await asyncio.sleep(0)

    assert run_blocking(blocks()) == 7
    with pytest.raises(AssertionError, match="nobody would ever go on with it"):
        run_blocking(suspends())


class Overlapping(Learner):
    """Trains on while its contribution is on its way."""

    def __init__(self, lab: Lab, number: int, founder: bool) -> None:
        super().__init__(lab, number, founder)
        self.schedule = SyncSchedule(self.interval, 1, self.node.replica.method, bytes(32))


def test_a_contribution_that_is_refused_while_training_goes_on_is_withdrawn(run_lab: Any, terms: Any) -> None:
    async def script(lab: Lab) -> None:
        member = lab.add(kind=Overlapping)
        await lab.rounds(2)
        driver, refused = member.node.driver, list[Contribution]()
        contribute = driver.contribute

        async def refuse(contribution: Contribution) -> bool:
            refused.append(contribution)
            driver.contribute = contribute  # type: ignore[method-assign]
            return False

        driver.contribute = refuse  # type: ignore[method-assign]
        await lab.rounds(2)
        assert len(refused) == 1

    run_lab(exact_terms(terms, DENSE), script, make_model=tiny_model)


class Patient(Learner):
    """Merges its own contribution three inner steps after it was sent, and tells what was learnt by then."""

    def __init__(self, lab: Lab, number: int, founder: bool) -> None:
        super().__init__(lab, number, founder)
        self.schedule = SyncSchedule(self.interval, 3, self.node.replica.method, bytes(32))
        self.carried: list[int] = []

    def round_ended(self, update: CommittedUpdate, *, of_pairs: bool = False) -> None:
        if update.contribution is not None:
            self.carried.append(self.schedule.timing.since)


def test_a_commit_of_ours_stays_in_the_queue_for_the_overlap(run_lab: Any, terms: Any) -> None:
    async def script(lab: Lab) -> None:
        member = lab.add(kind=Patient)
        await lab.rounds(6)
        assert len(member.carried) >= 4
        assert set(member.carried) == {3}

    run_lab(exact_terms(terms, DENSE), script, make_model=tiny_model)


def test_what_lies_before_the_first_boundary_is_no_training(run_lab: Any, terms: Any) -> None:
    """A peer that waited for company contributed after one step, where the method goes by time."""

    async def script(lab: Lab) -> None:
        member = lab.add(kind=Learner)
        await lab.rounds(1)
        member.idle = True
        now, schedule = [1000.0], SyncSchedule(99, 0, AEDiT(seconds=600.0), bytes(32))
        async with anyio.create_task_group() as group:
            parts = member.parts(SameLoop(member.node, Updates(), group))
            loop = OuterLoop(replace(parts, clock=lambda: now[0], schedule=schedule))
            for between in (700.0, 2.0, 3.0):
                now[0] += between
                schedule.stepped()
                await loop.step_boundary()
            group.cancel_scope.cancel()
        assert (schedule.timing.since, schedule.timing.seconds) == (3, 5.0)
        assert not schedule.timing.due

    run_lab(exact_terms(terms, DENSE), script, make_model=tiny_model)


class Debtor(Learner):
    """Keeps what it is told."""

    def __init__(self, lab: Lab, number: int, founder: bool) -> None:
        super().__init__(lab, number, founder)
        self.told: list[Away] = []

    def away(self, away: Away) -> None:
        super().away(away)
        self.told.append(away)


def test_who_starts_over_is_told_of_its_debt_with_its_progress(run_lab: Any, terms: Any) -> None:
    async def script(lab: Lab) -> None:
        member = lab.add(kind=Debtor)
        await lab.rounds(2)
        member.idle = True
        await lab.until(lambda: member.is_up_to_date and member.node.driver.state.pending is None)
        debt_N = torch.full_like(member.moved[0], 7.0)
        member.node.replica.feedback[0] = {"debt": debt_N}
        ahead_N = member.node.replica.anchors[0] - member.model.read(0)
        member.schedule.progress[0].missed, member.schedule.progress[0].steps = 100, 100
        member.schedule.timing.since = member.interval
        member.idle = False
        member.step = lambda: None  # it learns nothing more
        await lab.until(lambda: bool(member.told))
        assert torch.equal(member.told[0].dropped_N, ahead_N + debt_N)

    run_lab(exact_terms(terms, DENSE), script, make_model=tiny_model)


class Saving(Learner):
    """Counts its checkpoints, one for every five commits or steps of pairs."""

    def __init__(self, lab: Lab, number: int, founder: bool) -> None:
        super().__init__(lab, number, founder)
        self.saved_at: list[int] = []

    def parts(self, swarm: Any) -> LoopParts:
        return replace(super().parts(swarm), checkpoint_every=5, save=self.save)

    def save(self, schedule: SyncSchedule) -> bool:
        self.saved_at.append(schedule.num_merged)
        return True


@pytest.mark.parametrize("preset", ["sparseloco", "noloco"])
def test_a_checkpoint_is_made_as_often_as_it_was_asked_for(run_lab: Any, terms: Any, preset: str) -> None:
    """In gossip it was made after every step."""

    async def script(lab: Lab) -> None:
        member = lab.add(kind=Saving)
        lab.add(kind=Saving)
        await lab.all_members()
        member.saved_at.clear()
        begun = member.schedule.num_merged
        await lab.until(lambda: member.schedule.num_merged >= begun + 21)
        assert 4 <= len(member.saved_at) <= 5
        assert all(after - before == 5 for before, after in pairwise(member.saved_at))

    run_lab(terms(preset), script, make_model=tiny_model)


def test_a_peer_that_starts_over_drops_its_debt_and_keeps_what_it_owes_as_an_owner(run_lab, terms):
    async def script(lab):
        member = lab.add()
        await lab.rounds(1)
        member.idle = True
        node = member.node
        await lab.until(lambda: node.driver.state.pending is None)
        owed_N = torch.ones(lab.schema.fragments[0].numel)
        node.replica.feedback[0] = {"debt": owed_N * 2, OWED: owed_N}
        assert await anchors_without_debt(node, bytes(32), [0]) is None, "the chain is elsewhere"
        assert "debt" in node.replica.feedback[0]
        standing = await anchors_without_debt(node, node.driver.head.hash, [0])
        assert standing is not None
        assert list(node.replica.feedback[0]) == [OWED]

    run_lab(terms("sparseloco"), script)


def test_only_moments_that_are_not_finite_are_forgotten():
    whole, poisoned = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    optimizer = torch.optim.AdamW([whole, poisoned])
    (whole.sum() + poisoned.sum()).backward()
    optimizer.step()
    optimizer.state[poisoned]["exp_avg"][0] = float("nan")
    assert forget_non_finite(optimizer) == 1
    assert list(optimizer.state) == [whole]
    optimizer.step()
