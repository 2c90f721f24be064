"""What is on its way is not asked for again, and what stands still is."""

from __future__ import annotations

import anyio
import pytest
import trio
import trio.testing

from decentral.dissemination.reassembly import PAUSE, Arrivals

ALICE, BOB = b"a" * 32, b"b" * 32


def run(script):
    async def timed():
        began = anyio.current_time()
        await script()
        return anyio.current_time() - began

    return trio.run(timed, clock=trio.testing.MockClock(autojump_threshold=0))


def push(arrivals, pieces, pause):
    """``pieces`` pieces of a push of alice, ``pause`` seconds apart."""

    async def pushing(*, task_status):
        with arrivals.push(ALICE) as on_bytes:
            task_status.started()
            for _ in range(pieces):
                await anyio.sleep(pause)
                on_bytes(1000)

    return pushing


@pytest.mark.parametrize(
    ("pieces", "pause", "seconds"),
    [
        pytest.param(5, 1.0, 5.0, id="it is waited for while it moves"),
        pytest.param(5, PAUSE + 1, PAUSE, id="it is given up when it stands still"),
        pytest.param(0, 0.0, 0.0, id="there is none any more"),
    ],
)
def test_a_push_is_waited_for_as_long_as_it_moves(pieces, pause, seconds):
    arrivals = Arrivals()

    async def script():
        async with anyio.create_task_group() as group:
            await group.start(push(arrivals, pieces, pause))
            await arrivals.pushed(ALICE)
            group.cancel_scope.cancel()

    assert run(script) == seconds


def test_a_push_is_given_up_at_a_time_that_comes_however_it_is_rounded():
    """At this one ``now - moved`` was less than the pause for ever, and nothing else ever ran (seed 29)."""
    arrivals, moved = Arrivals(), 6.586034147462194
    assert moved + PAUSE - moved < PAUSE

    async def script():
        await anyio.sleep_until(moved)
        with arrivals.push(ALICE), trio.fail_after(60):
            await arrivals.pushed(ALICE)

    assert run(script) == moved + PAUSE


def test_what_others_push_is_not_waited_for():
    arrivals = Arrivals()

    async def script():
        async with anyio.create_task_group() as group:
            await group.start(push(arrivals, 5, 1.0))
            await arrivals.pushed(BOB)
            group.cancel_scope.cancel()

    assert run(script) == 0.0


def test_a_frame_is_fetched_once_at_a_time():
    arrivals = Arrivals()
    with arrivals.fetch(b"frame") as first, arrivals.fetch(b"frame") as second, arrivals.fetch(b"other") as other:
        assert (first, second, other) == (True, False, True)
    with arrivals.fetch(b"frame") as again:
        assert again
