"""One step of the machine at a time, and whom to catch up with."""

from __future__ import annotations

import anyio
import pytest
import trio
import trio.testing

from decentral.errors import DiskError
from decentral.rounds.catchup.requests import CatchUpRequests
from decentral.rounds.steps import Steps, Tasks

NEAR, FAR = bytes(32), bytes([1] * 32)


def play(script):
    trio.run(script, clock=trio.testing.MockClock(autojump_threshold=0))


def test_what_a_step_asks_for_is_done_before_the_next_is_taken():
    order = []

    async def carry_out(effects):
        for effect in effects:
            await trio.sleep(1.0)
            order.append(effect)

    async def script():
        steps = Steps(carry_out)
        async with trio.open_nursery() as nursery:
            for name in "ab":
                nursery.start_soon(steps.take, lambda now, name=name: [f"{name}1", f"{name}2"])

    play(script)
    assert order in (["a1", "a2", "b1", "b2"], ["b1", "b2", "a1", "a2"])


def test_a_caller_that_goes_away_leaves_no_step_half_done():
    done = []

    async def carry_out(effects):
        await trio.sleep(1.0)
        done.extend(effects)

    async def script():
        with trio.move_on_after(0.5):
            await Steps(carry_out).take(lambda now: ["all of it"])

    play(script)
    assert done == ["all of it"]


def test_a_step_that_failed_is_raised_to_its_caller_and_to_whoever_checks_later():
    async def carry_out(effects):
        raise DiskError("no space left")

    async def script():
        steps = Steps(carry_out)
        steps.check()
        with pytest.raises(DiskError, match="no space left"):
            await steps.take(lambda now: ["write"])
        with pytest.raises(DiskError, match="no space left"):
            steps.check()

    play(script)


def test_of_two_peers_to_catch_up_with_the_last_asked_is_taken_and_the_other_forgotten():
    async def script():
        requests = CatchUpRequests()
        requests.ask(NEAR)
        requests.ask(FAR)
        assert await requests.next() == FAR
        with trio.move_on_after(1.0) as wait:
            await requests.next()
        assert wait.cancelled_caught

    play(script)


def test_what_was_asked_meanwhile_is_dropped_when_there_is_nothing_left_to_catch_up_with():
    async def script():
        requests = CatchUpRequests()
        requests.ask(NEAR)
        requests.drop()
        assert await requests.next() is None

    play(script)


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_nothing_is_begun_beside_rounds_that_end(backend):
    """A task that asyncio is given late is never cancelled (anyio 4.16), and whoever ends the rounds waits for it."""

    async def work():
        await anyio.sleep_forever()

    async def script():
        tasks = Tasks(lambda event, fields: None)
        assert not tasks.spawn(work)  # they have not begun
        with anyio.fail_after(30):
            async with anyio.create_task_group() as group:
                tasks.begin(group)
                assert tasks.spawn(work)
                group.cancel_scope.cancel()
                assert not tasks.spawn(work)
        tasks.end()
        assert not tasks.spawn(work)

    anyio.run(script, backend=backend)
