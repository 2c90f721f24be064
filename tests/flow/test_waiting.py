"""Waiting in tasks: changes, and what is said again more and more rarely."""

from __future__ import annotations

import anyio
import anyio.lowlevel
import pytest

from decentral.flow.waiting import Changes, Repeats

backends = pytest.mark.parametrize("backend", ["asyncio", "trio"])


@backends
async def test_a_change_wakes_everybody_that_waits_and_nobody_that_comes_later(backend: str) -> None:
    changes, woken = Changes(), []

    async def wait(name: str) -> None:
        await changes.next()
        woken.append(name)

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


@backends
async def test_a_change_during_a_look_is_not_missed(backend: str) -> None:
    changes = Changes()
    coming = changes.coming()
    changes.tell()  # while something takes its time to look
    with anyio.fail_after(1):
        await coming.wait()


def test_a_change_may_be_told_before_there_is_a_loop() -> None:
    Changes().tell()


A, B = b"a" * 32, b"b" * 32


def times_told(repeats: Repeats, seconds: int, said: object = "let me in") -> list[int]:
    return [second for second in range(seconds) if repeats.due(said, [A], float(second))]


def test_each_wait_is_twice_as_long_as_the_one_before_up_to_the_longest() -> None:
    assert times_told(Repeats(1.0, 8.0), 40) == [0, 1, 3, 7, 15, 23, 31, 39]


def test_who_comes_later_is_told_at_once_and_nobody_else_is() -> None:
    repeats = Repeats(1.0, 8.0)
    assert repeats.due("let me in", [A], 0.0) == [A]
    assert repeats.due("let me in", [A, B], 0.5) == [B]
    assert repeats.due("let me in", [A, B], 1.0) == [A]


def test_something_new_is_said_to_all_at_once() -> None:
    repeats = Repeats(1.0, 8.0)
    assert times_told(repeats, 6) == [0, 1, 3]
    assert repeats.due("let me in, I have caught up", [A], 6.0) == [A]
    assert repeats.due("let me in, I have caught up", [A], 7.0) == [A], "it waits as short as at first"
