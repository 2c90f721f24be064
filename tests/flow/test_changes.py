"""Something that changes again and again: who is woken, and by which change."""

import anyio
import anyio.lowlevel
import pytest

from decentral.flow.upload import Changes

backends = pytest.mark.parametrize("backend", ["asyncio", "trio"])


@backends
def test_a_change_wakes_everybody_that_waits_and_nobody_that_comes_later(backend: str) -> None:
    changes, woken = Changes(), []

    async def wait(name: str) -> None:
        await changes.next()
        woken.append(name)

    async def script() -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(wait, "one")
            group.start_soon(wait, "two")
            await anyio.wait_all_tasks_blocked()
            changes.tell()
            group.start_soon(wait, "late")
            await anyio.wait_all_tasks_blocked()
            assert sorted(woken) == ["one", "two"]
            changes.tell()
        assert woken[2:] == ["late"]

    anyio.run(script, backend=backend)


@backends
def test_a_change_during_a_look_is_not_missed(backend: str) -> None:
    changes = Changes()

    async def script() -> None:
        coming = changes.coming()
        changes.tell()  # while something takes its time to look
        with anyio.fail_after(1):
            await coming.wait()

    anyio.run(script, backend=backend)


def test_a_change_may_be_told_before_there_is_a_loop() -> None:
    Changes().tell()
