"""Pausing and resuming, at whatever moment: who takes part again votes again."""

from __future__ import annotations

import anyio

from decentral.node.upload import PAUSED
from tests.lab.nodes import tiny_model


def test_who_resumes_while_its_farewell_waits_for_a_step_votes_again(run_lab, terms):
    """The farewell came after the return, and the peer was let in again and again, and never voted."""

    async def script(lab):
        member = lab.add()
        lab.add()
        await lab.all_members()
        await lab.rounds(2)
        driver, resting = member.node.driver, member.node.resting
        async with anyio.create_task_group() as group, driver.steps.lock:  # as while a commit is written and applied
            group.start_soon(resting.begin, PAUSED)
            await anyio.sleep(0.2)
            group.start_soon(resting.end, PAUSED)
            await anyio.sleep(0.2)
        assert not resting
        assert not driver.machine.state.has_left
        await lab.all_members()
        epoch = driver.head.epoch
        await lab.rounds(5)
        assert driver.head.epoch == epoch

    run_lab(terms("sparseloco"), script, make_model=tiny_model)


def test_a_pause_before_the_rounds_run_is_told_when_it_is_asked_for_again(run_lab, terms):
    """Nobody was told: the others waited for a peer that held its contributions back."""

    async def script(lab):
        lab.add()
        await lab.rounds(2)
        newcomer = lab.add()
        resting = newcomer.node.resting
        await resting.begin(PAUSED)
        assert resting
        assert not newcomer.node.driver.stopping
        await lab.all_members()
        await resting.begin(PAUSED)  # as startup does
        assert newcomer.node.driver.machine.state.has_left
        await lab.until(lambda: len(lab.members[0].node.driver.head.members) == 1)

    run_lab(terms("sparseloco"), script, make_model=tiny_model)
