"""Machines that sleep, wake and meet again in any order: no night's work is lost where all meet soon enough."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from functools import partial

import anyio
import pytest

from decentral.simulate.virtual_time import suspend
from tests.kit.nodes import scene, small_terms, tiny_model

NIGHT = 100.0  # s, of a run that gives up who is silent for 6
STEP = 4.0  # s of a round


@contextmanager
def asleep(lab, *sleepers):
    """Their processes stand still, and nobody reaches them."""
    others = [member for member in lab.members if member not in sleepers]
    lab.cut(sleepers, others)
    try:
        with ExitStack() as stack:
            for member in sleepers:
                stack.enter_context(suspend(member.task))
            yield
    finally:
        lab.heal(sleepers, others)


async def together_again(lab, limit: float = 60.0) -> None:
    await lab.until(lambda: all(len(m.node.driver.head.members) == len(lab.members) for m in lab.members), limit)
    await lab.rounds(2)


of_slow_rounds = partial(scene, make_model=tiny_model, step=STEP)


@pytest.mark.parametrize("n", [2, 3, *(pytest.param(n, marks=pytest.mark.long) for n in (4, 5))])
@of_slow_rounds()
async def test_the_night_of_the_one_that_went_on_alone_counts_when_all_wake_beside_it(lab, n):
    await lab.start(n, rounds=2)
    loner, *sleepers = lab.members
    before = loner.rounds
    with asleep(lab, *sleepers):
        await anyio.sleep(NIGHT)
    made = loner.rounds
    assert made > before + NIGHT / (2 * STEP)
    await together_again(lab)
    lab.check_equal()
    assert not loner.happened("healed")
    assert all(member.happened("awake") for member in sleepers)


@of_slow_rounds(peers=3, rounds=2)
async def test_two_of_three_that_wake_without_the_third_go_on_and_it_is_told_what_it_gave_up(lab):
    loner, *sleepers = lab.members
    with asleep(lab, *sleepers):
        await anyio.sleep(NIGHT)
        alone = loner.rounds
    lab.cut([loner], sleepers)
    await lab.until(lambda: all(member.rounds > 4 for member in sleepers), 60.0)
    lab.heal([loner], sleepers)
    await together_again(lab)
    (healed,) = loner.happened("healed")
    assert healed["given_up"] >= alone / 2
    assert not any(member.happened("healed") for member in sleepers)


@pytest.mark.parametrize("order", [(0, 1), pytest.param((1, 0), marks=pytest.mark.long)])
@of_slow_rounds(peers=3, rounds=2)
async def test_who_wake_one_after_the_other_find_the_run(lab, order):
    loner, *sleepers = lab.members
    first, second = (sleepers[number] for number in order)
    with asleep(lab, second):
        with asleep(lab, first):
            await anyio.sleep(NIGHT)
        lab.cut([first], [second])
        await lab.until(lambda: first.rounds >= loner.rounds - 1, 60.0)
    lab.heal([first], [second])
    await together_again(lab)
    lab.check_equal()
    assert not loner.happened("healed")


@of_slow_rounds(peers=3, rounds=2)
async def test_all_that_sleep_at_once_go_on_where_they_were(lab):
    with asleep(lab, *lab.members):
        await anyio.sleep(NIGHT)
    await together_again(lab)
    lab.check_equal()
    assert not any(member.happened("shrunk") or member.happened("healed") for member in lab.members)


@of_slow_rounds(lambda: small_terms("sparseloco").changed(run={"rounds": 100_000, "minutes": 2.0}), peers=2, rounds=2)
async def test_a_run_by_the_clock_ends_with_one_that_slept_in_it(lab):
    with asleep(lab, lab.members[1]):
        await anyio.sleep(40.0)
    await lab.until(lambda: all(member.node.driver.head.final for member in lab.members), 120.0)
    lab.check_equal()


@of_slow_rounds(peers=2, rounds=2)
async def test_a_clock_that_goes_on_in_a_suspend_tells_of_a_night_that_the_loop_knows_nothing_of(lab):
    """CLOCK_MONOTONIC of Linux stands still while the machine is suspended: as if no time had passed."""
    member, ahead = lab.members[0], 0.0
    member.node.driver.watch.clock = lambda: anyio.current_time() + ahead
    await anyio.sleep(2.0)
    assert not member.happened("awake")
    ahead = NIGHT
    await anyio.sleep(2.0)
    (awake,) = member.happened("awake")
    assert NIGHT <= awake["away"] <= NIGHT + 2
    await lab.rounds(2)
