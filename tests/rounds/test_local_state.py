"""One step of the machine at a time, whom to catch up with, and what goes on beside rounds."""

from __future__ import annotations

from types import SimpleNamespace

import anyio
import pytest
import trio

from decentral.errors import DiskError
from decentral.rounds.catch_up import CatchUp
from decentral.rounds.local_state import CatchUpRequests, Steps, Tasks
from decentral.swarm.contacts import Contacts

NEAR, FAR = bytes(32), bytes([1] * 32)
pytestmark = pytest.mark.usefixtures("virtual_time")


async def test_what_a_step_asks_for_is_done_before_the_next_is_taken():
    order = []

    async def carry_out(effects):
        for effect in effects:
            await trio.sleep(1.0)
            order.append(effect)

    steps = Steps(carry_out)
    async with trio.open_nursery() as nursery:
        for name in "ab":
            nursery.start_soon(steps.take, lambda now, name=name: [f"{name}1", f"{name}2"])
    assert order in (["a1", "a2", "b1", "b2"], ["b1", "b2", "a1", "a2"])


async def test_a_caller_that_goes_away_leaves_no_step_half_done():
    done = []

    async def carry_out(effects):
        await trio.sleep(1.0)
        done.extend(effects)

    with trio.move_on_after(0.5):
        await Steps(carry_out).take(lambda now: ["all of it"])
    assert done == ["all of it"]


@pytest.mark.parametrize("error", [DiskError("no space left"), IndexError("no space left")])
async def test_a_step_that_failed_is_raised_to_its_caller_and_to_whoever_checks_later(error):
    async def carry_out(effects):
        raise error

    steps = Steps(carry_out)
    steps.check()
    with pytest.raises(type(error), match="no space left"):
        await steps.take(lambda now: ["write"])
    with pytest.raises(type(error), match="no space left"):
        steps.check()


async def fails():
    raise IndexError("tuple index out of range")


async def test_a_mistake_in_what_goes_on_beside_is_told_and_ends_nothing_else():
    """A peer's bytes led to one, and ended the process."""
    told = []
    tasks = Tasks(lambda event, fields: told.append((event, fields)))

    async def beside(*, task_status):
        async with anyio.create_task_group() as group:
            tasks.begin(group)
            task_status.started()
            await trio.sleep_forever()

    async with trio.open_nursery() as nursery:
        await nursery.start(beside)
        assert tasks.spawn(fails)
        await trio.sleep(1.0)
        assert told == [("unexpected", {"what": "fails", "why": "IndexError: tuple index out of range"})]
        nursery.cancel_scope.cancel()


async def test_a_mistake_in_catching_up_with_one_leaves_the_next():
    told, asked = [], []

    async def catch_up_with(peer):
        asked.append(peer)
        await fails()

    catch_up = CatchUp.__new__(CatchUp)
    requests = CatchUpRequests(20.0)
    catch_up.state = SimpleNamespace(catch_up=requests, on_event=lambda event, fields: told.append(event))
    catch_up._catch_up = catch_up_with
    async with trio.open_nursery() as nursery:
        nursery.start_soon(catch_up.run)
        for peer in (NEAR, FAR):
            requests.ask(peer)
            await trio.sleep(1.0)
        nursery.cancel_scope.cancel()
    assert (asked, told) == ([NEAR, FAR], ["unexpected"] * 2)


async def test_a_contact_that_meets_a_mistake_is_over_and_the_next_is_made():
    made = []

    async def contact(peer):
        made.append(peer)
        await fails()

    contacts = Contacts()
    for peer in (NEAR, FAR):
        await contacts.make(peer, contact)
    assert made == [NEAR, FAR]


async def test_of_two_peers_to_catch_up_with_the_last_asked_is_taken_and_the_other_forgotten():
    requests = CatchUpRequests(20.0)
    requests.ask(NEAR)
    requests.ask(FAR)
    assert await requests.next() == FAR
    with trio.move_on_after(1.0) as wait:
        await requests.next()
    assert wait.cancelled_caught


async def test_what_was_asked_meanwhile_is_dropped_when_there_is_nothing_left_to_catch_up_with():
    requests = CatchUpRequests(20.0)
    requests.ask(NEAR)
    requests.drop()
    assert await requests.next() is None


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


async def test_who_led_nowhere_is_passed_over_each_time_for_twice_as_long_until_it_leads_on():
    async def asked_again_after(requests: CatchUpRequests) -> float:
        began = trio.current_time()
        while True:
            requests.ask(NEAR)
            with trio.move_on_after(0.25):
                await requests.next()
                return trio.current_time() - began

    requests = CatchUpRequests(5.0)
    waits = []
    for _ in range(5):
        requests.led_nowhere(NEAR)
        requests.ask(FAR)
        assert await requests.next() == FAR
        waits.append(await asked_again_after(requests))
    assert waits == [1.0, 2.0, 4.0, 5.0, 5.0]
    requests.led_on(NEAR)
    assert await asked_again_after(requests) == 0.0
