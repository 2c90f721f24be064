"""What befalls friends who lie to nobody, many seeds of each: python -m tests.simulate.friends --seeds 1-200

Machines die, restart, leave, sleep for a night and meet again in any order, on good lines. Whoever is struck, how many
of how many, when, and by which terms is drawn from the seed; the checker judges. Ends with 1 when a guarantee was
broken or anything hung.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import anyio

from decentral.simulate.process import Host
from decentral.simulate.scenario import PROFILES, Scenario
from decentral.simulate.simulation import simulate
from decentral.simulate.troubles import Afflicted
from decentral.simulate.virtual_time import suspend
from tests.simulate.draws import KINDS, LIMITS, toy_manifest

LEASE, SHRINK_AFTER = 2.0, 8.0
NIGHT = (8 * SHRINK_AFTER, 12 * SHRINK_AFTER)  # s
MANY = 10_000  # outer steps: a story ends by time


# ---- stories ----
#
# Each is told of a world and a generator, and ends with all machines as the calm wants them, or not yet started again.


def struck(world: Afflicted, generator: random.Random) -> list[Host]:
    """One, two or three of the machines, in any order; all of them, where there are no more."""
    return generator.sample(world.hosts, min(len(world.hosts), generator.choice([1, 1, 2, 2, 3])))


async def each(generator: random.Random, hosts: list[Host], befall: Callable[[Host], Awaitable[None]]) -> None:
    """All at once, or one a little after the other."""
    apart = generator.choice([0.0, 0.1, 2.0])
    async with anyio.create_task_group() as group:
        for host in hosts:
            group.start_soon(befall, host)
            await anyio.sleep(apart * generator.random())


async def restart(world: Afflicted, generator: random.Random, away: tuple[float, float], host: Host) -> None:
    """It is killed, or loses its power, and is started again."""
    host.crash(generator if generator.random() < 0.5 else None)
    await host.ended.wait()
    await anyio.sleep(generator.uniform(*away))
    world.start(host)


async def leave(world: Afflicted, generator: random.Random, away: tuple[float, float], host: Host) -> None:
    """It says goodbye, and comes back."""
    await host.leave()
    await host.ended.wait()
    await anyio.sleep(generator.uniform(*away))
    world.start(host)


async def sleep(world: Afflicted, generator: random.Random, away: tuple[float, float], host: Host) -> None:
    """It stands still, or its network does."""
    with standing_still(world, host) if generator.random() < 0.7 else off_the_network(world, host):
        await anyio.sleep(generator.uniform(*away))


@contextmanager
def standing_still(world: Afflicted, host: Host) -> Iterator[None]:
    """Of a suspended machine nobody hears, and its process knows nothing of the time."""
    assert host.process is not None
    with off_the_network(world, host), suspend(host.task):
        yield


@contextmanager
def off_the_network(world: Afflicted, host: Host) -> Iterator[None]:
    """It goes on alone, for all that it knows."""
    world.isolate(host)
    try:
        yield
    finally:
        world.rejoin(host)


Befall = Callable[[Afflicted, random.Random, tuple[float, float], Host], Awaitable[None]]


def some(befall: Befall, away: tuple[float, float]) -> Story:
    """Some machines are struck by the same, each for its own time."""

    async def story(world: Afflicted, generator: random.Random) -> None:
        await each(generator, struck(world, generator), partial(befall, world, generator, away))

    return story


async def any_order(world: Afflicted, generator: random.Random) -> None:
    """Whatever befalls each of them; they meet in any order."""

    async def befall(host: Host) -> None:
        one = generator.choice([restart, leave, sleep])
        away = generator.choice([(0.0, 2.0), (0.0, SHRINK_AFTER), (SHRINK_AFTER, 3 * SHRINK_AFTER)])
        await one(world, generator, away, host)

    await each(generator, generator.sample(world.hosts, len(world.hosts)), befall)


async def deaths(world: Afflicted, generator: random.Random) -> None:
    """One after the other dies, until one is left."""
    for host in generator.sample(world.hosts, len(world.hosts) - 1):
        await anyio.sleep(generator.uniform(0.0, 2 * SHRINK_AFTER))
        host.crash()
        await host.ended.wait()


async def one_link(world: Afflicted, generator: random.Random) -> None:
    """Two of them do not reach each other."""
    a, b = generator.sample(world.hosts, 2)
    world.cut([(a, b)])
    try:
        await anyio.sleep(4 * SHRINK_AFTER)
    finally:
        world.heal([(a, b)])


async def joiner_vanishes(world: Afflicted, generator: random.Random) -> None:
    """A newcomer is gone while it is being let in, and another comes."""
    host = generator.choice(world.hosts[1:])
    for _ in range(3):
        host.crash()
        await host.ended.wait()
        await anyio.sleep(generator.uniform(LEASE, 2 * SHRINK_AFTER))
        host.forget()
        world.start(host)
        await anyio.sleep(generator.uniform(0.0, 2.0))


async def founder_dies(world: Afflicted, generator: random.Random) -> None:
    """The founder is gone as soon as it has begun, again and again, and comes back."""
    founder = world.hosts[0]
    for _ in range(3):
        await restart(world, generator, (0.0, 2.0), founder)
        await anyio.sleep(generator.uniform(0.0, 1.0))


Story = Callable[[Afflicted, random.Random], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Told:
    """A story, the seconds that it may take, and whether it begins before all train together."""

    story: Story
    seconds: float
    hosts: tuple[int, ...] = (2, 3, 3, 4, 5, 6)
    calm_start: bool = True


STORIES = {
    "restarts": Told(some(restart, (0.0, 3.0)), 20.0),
    "deaths": Told(some(restart, (SHRINK_AFTER, 3 * SHRINK_AFTER)), 30.0),
    "leaves": Told(some(leave, (0.0, 2 * SHRINK_AFTER)), 34.0),
    "suspends": Told(some(sleep, (0.1, 2 * SHRINK_AFTER)), 26.0),
    "nights": Told(some(sleep, NIGHT), 105.0),
    "nights that are over by a restart": Told(some(restart, NIGHT), 105.0),
    "any order": Told(any_order, 44.0),
    "one death after the other": Told(deaths, 70.0, hosts=(5,)),
    "one link": Told(one_link, 36.0, hosts=(3, 4, 5)),
    "a joiner that vanishes": Told(joiner_vanishes, 64.0, hosts=(3, 4, 5)),
    "a founder that dies at first": Told(founder_dies, 15.0, calm_start=False),
}


# ---- telling them ----


@dataclass
class Teller:
    """One story in one world."""

    world: Afflicted
    story: Story
    generator: random.Random
    over: bool = False

    async def run(self) -> None:
        """See Trouble."""
        await anyio.sleep(self.generator.uniform(0.0, 2.0))
        await self.story(self.world, self.generator)
        self.over = True


def scenario(name: str, seed: int) -> Scenario:
    """Friends on good lines; pairs in every fifth."""
    told, generator = STORIES[name], random.Random(f"friends {name} {seed}")
    calm = replace(PROFILES["lab"], crashes=0.0, latency=generator.choice([0.0005, 0.04]))
    kind = KINDS[seed % len(KINDS)]
    manifest = toy_manifest(kind, seed, {**LIMITS, "lease": LEASE, "shrink_after": SHRINK_AFTER})
    return Scenario(
        manifest,
        calm,
        seed,
        generator.choice(told.hosts),
        MANY,
        step_seconds=1.0,
        calm_start=told.calm_start,
        lesson="marks" if kind in ("gather", "reduce") else "noise",
        patience=told.seconds / MANY,
    )


def problems_of(task: tuple[str, int]) -> tuple[str, int, list[str]]:
    """What was wrong with a story of a seed."""
    name, seed = task
    tellers: list[Teller] = []

    def afflict(world: Afflicted) -> Teller:
        tellers.append(Teller(world, STORIES[name].story, random.Random(f"{name} {seed}")))
        return tellers[0]

    problems = list(simulate(scenario(name, seed), afflict).to_dict()["problems"])
    return name, seed, problems + ["the story was cut short"] * (not tellers[0].over)


def main(arguments: list[str] | None = None) -> int:
    """1 when something was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="1-200", help="one, or FIRST-LAST")
    parser.add_argument("--only", choices=tuple(STORIES), help="one story")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args(arguments)
    first, _, last = options.seeds.partition("-")
    seeds = range(int(first), int(last or first) + 1)
    wrong = 0
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        for name in [options.only] if options.only else STORIES:
            found = [one for one in pool.imap_unordered(problems_of, [(name, seed) for seed in seeds]) if one[2]]
            wrong += len(found)
            print(f"{name}: {len(seeds) - len(found)} of {len(seeds)}", flush=True)
            for _, seed, problems in sorted(found):
                print(f"  seed {seed}: {problems[0]}", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
