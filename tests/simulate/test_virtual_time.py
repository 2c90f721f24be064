"""Virtual time: the same steps at the same times in the same order, whatever a program does, and sleeping machines."""

from __future__ import annotations

import random
from importlib.metadata import version

import anyio
import anyio.lowlevel
import pytest
import trio._core._run as scheduler

from decentral.simulate.virtual_time import run_in_virtual_time, suspend


class Program:
    """Tasks that do what a seed says: they nest scopes and groups, wait, fail, cancel and hold each other up."""

    def __init__(self, seed):
        self.draws = random.Random(seed)
        self.log, self.scopes, self.names = [], [], iter(range(10_000))

    async def main(self):
        self.events = [anyio.Event() for _ in range(4)]
        self.locks = [anyio.Lock(), anyio.Lock(fast_acquire=True), anyio.Semaphore(2), anyio.CapacityLimiter(2)]
        try:
            with anyio.move_on_after(20):
                async with anyio.create_task_group() as group:
                    for _ in range(4):
                        group.start_soon(self.task, 0)
        except* ValueError as errors:
            self.say("main", "failed", self.leaves(errors))
        return self.log

    def say(self, name, what, *more):
        self.log.append((round(anyio.current_time(), 9), name, what, *more))

    def leaves(self, group):
        return sum(self.leaves(e) if isinstance(e, BaseExceptionGroup) else 1 for e in group.exceptions)

    async def task(self, depth, *, task_status=anyio.TASK_STATUS_IGNORED):
        name = next(self.names)
        self.say(name, "begins")
        if task_status is not anyio.TASK_STATUS_IGNORED:
            if self.draws.random() < 0.5:
                await anyio.sleep(self.draws.choice([0, 0.5]))
            task_status.started(name)
        try:
            for _ in range(self.draws.randint(1, 5)):
                await self.act(name, depth)
        except BaseException as error:
            self.say(name, type(error).__name__)
            raise
        finally:
            self.say(name, "ends")

    async def act(self, name, depth):
        chance = self.draws.randrange(13)
        self.say(name, "acts", chance)
        wait = self.draws.choice([0, 0.1, 0.5, 0.5, 1.0])
        match chance:
            case 0 | 1:
                await anyio.sleep(wait)
            case 2:
                await anyio.lowlevel.checkpoint()
            case 3:
                self.draws.choice(self.events).set()
            case 4:
                with anyio.move_on_after(wait) as scope:
                    self.scopes.append(scope)
                    await self.draws.choice(self.events).wait()
                self.say(name, "waited", scope.cancelled_caught)
            case 5:
                async with self.draws.choice(self.locks):
                    await anyio.sleep(wait)
            case 6 if depth < 3:
                await self.group(name, depth)
            case 7 if self.scopes:
                self.draws.choice(self.scopes).cancel()
            case 8 if self.scopes:
                self.draws.choice(self.scopes).deadline = anyio.current_time() + wait
            case 9:
                with anyio.CancelScope(shield=self.draws.random() < 0.5) as scope:
                    self.scopes.append(scope)
                    await self.act(name, depth)
            case 10 if self.draws.random() < 0.3:
                raise ValueError(name)
            case 11:
                try:
                    with anyio.fail_after(wait):
                        await anyio.sleep(0.5)
                except TimeoutError:
                    self.say(name, "late")
            case _:
                await anyio.lowlevel.cancel_shielded_checkpoint()

    async def group(self, name, depth):
        async with anyio.create_task_group() as group:
            self.scopes.append(group.cancel_scope)
            for _ in range(self.draws.randint(0, 3)):
                group.start_soon(self.task, depth + 1)
            if self.draws.random() < 0.5:
                self.say(name, "started", await group.start(self.task_that_starts, depth + 1))
            await self.act(name, depth)

    async def task_that_starts(self, depth, *, task_status):
        await self.task(depth, task_status=task_status)


def test_a_program_makes_the_same_steps_in_every_run_of_a_seed():
    for seed in range(40):
        assert outcome(seed) == outcome(seed), seed
    assert len({str(outcome(seed)) for seed in range(10)}) == 10


def outcome(seed):
    """What its tasks logged, and the kind of error that it ended with."""
    program = Program(seed)
    try:
        run_in_virtual_time(program.main, seed)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the same each time
        return program.log, type(error).__name__
    return program.log, None


def test_a_process_that_is_suspended_makes_no_step_and_then_does_what_came_due():
    steps = []

    async def process():
        for _ in range(4):
            await anyio.sleep(1)
            steps.append(anyio.current_time())

    async def life():
        roots.append(anyio.get_current_task().id)
        async with anyio.create_task_group() as group:
            group.start_soon(process)

    async def main():
        async with anyio.create_task_group() as group:
            group.start_soon(life)
            await anyio.sleep(1.5)
            with suspend(roots[0]):
                await anyio.sleep(10)
                assert steps == [1.0]
            await anyio.sleep(5)

    roots = []
    run_in_virtual_time(main, 0)
    assert steps == [1.0, 11.5, 12.5, 13.5]


def test_a_sleep_that_is_cancelled_ends_at_once_and_moves_no_clock():
    async def main():
        with anyio.move_on_after(1):
            await anyio.sleep(10)
        assert anyio.current_time() == 1.0
        await anyio.sleep(20)
        return anyio.current_time()

    assert run_in_virtual_time(main, 0) == 21.0


def test_who_sleeps_on_another_thread_meanwhile_does_so_by_its_own_clock():
    async def beside():
        began = anyio.current_time()
        await anyio.sleep(0.01)
        return anyio.current_time() - began

    async def main():
        await anyio.sleep(1000)
        return anyio.current_time(), await anyio.to_thread.run_sync(anyio.run, beside)

    now, slept = run_in_virtual_time(main, 0)
    assert now == 1000.0
    assert 0.009 < slept < 100


def test_a_run_in_which_every_task_waits_for_ever_ends_with_an_error():
    with pytest.raises(RuntimeError, match="nothing is due"):
        run_in_virtual_time(anyio.sleep_forever, 0)


def test_what_is_raised_in_a_task_ends_the_run_and_leaves_the_process_as_it_was():
    async def fails():
        async with anyio.create_task_group() as group:
            group.start_soon(anyio.sleep_forever)
            raise ValueError("of the main task")

    with pytest.raises(ExceptionGroup) as caught:
        run_in_virtual_time(fails, 0)
    assert [type(error) for error in caught.value.exceptions] == [ValueError]
    assert run_in_virtual_time(in_an_hour, 0) == 3600.0


async def in_an_hour():
    await anyio.sleep(3600)
    return anyio.current_time()


def test_a_second_simulation_inside_of_one_is_refused():
    async def nested():
        run_in_virtual_time(in_an_hour, 0)

    with pytest.raises(RuntimeError, match="inside a run"):
        run_in_virtual_time(nested, 0)


def test_the_names_of_trio_that_virtual_time_stands_on_are_there():
    assert version("trio").startswith("0.35."), (
        "look at decentral/simulate/virtual_time.py before another one is allowed"
    )
    assert scheduler._ALLOW_DETERMINISTIC_SCHEDULING in (False, True)  # Hypothesis sets it, too
    assert hasattr(scheduler._r, "random")

    async def queue():
        return scheduler.GLOBAL_RUN_CONTEXT.runner.runq

    assert list(run_in_virtual_time(queue, 0)) == []
