"""Troubles of simulated machines: crashes, goodbyes, lids that close, networks that split. Drawn from the seed."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Protocol

import anyio

from decentral.simulate.process import Host
from decentral.simulate.scenario import Scenario
from decentral.simulate.trace import Trace
from decentral.simulate.virtual_time import suspend

SUSPENDED = 0.5  # of the machines that sleep; the processes of the others only lose the network
EVERY = 0.5  # s of virtual time between looks at how far the swarm is


class Afflicted(Protocol):
    """The swarm that has to live with it."""

    scenario: Scenario
    hosts: list[Host]
    trace: Trace

    @property
    def furthest(self) -> int:
        """Outer steps of whoever is furthest."""
        ...

    def start(self, host: Host) -> None:
        """Start a process on a machine that has none."""
        ...

    def cut(self, pairs: list[tuple[Host, Host]]) -> None:
        """Break the links of these pairs."""
        ...

    def heal(self, pairs: list[tuple[Host, Host]]) -> None:
        """Undo ``cut``."""
        ...

    def isolate(self, host: Host) -> None:
        """Take a machine off the network."""
        ...

    def rejoin(self, host: Host) -> None:
        """Undo ``isolate``."""
        ...


class Trouble(Protocol):
    """Troubles that befall a swarm."""

    async def run(self) -> None:
        """Befall it, until cancelled."""
        ...


Afflict = Callable[[Afflicted], Trouble]


class Troubles:
    """``run`` it beside the swarm; cancelled, it leaves things as they are."""

    def __init__(self, world: Afflicted) -> None:
        self.world, self.profile, self.seed = world, world.scenario.profile, world.scenario.seed
        self.round_seconds = world.scenario.round_seconds

    async def run(self) -> None:
        """Everything that the profile has in store."""
        async with anyio.create_task_group() as group:
            for host in self.world.hosts:
                group.start_soon(self._trouble, host)
            group.start_soon(self._divide)
            if self.profile.cliff_every:
                group.start_soon(self._fall_together)

    async def _trouble(self, host: Host) -> None:
        """Give one machine its share of what the profile has in store, once per round's time."""
        profile, generator = self.profile, random.Random(f"trouble {self.seed} {host.number}")
        while True:
            await anyio.sleep(self.round_seconds * generator.uniform(0.5, 1.5))
            if not host.up or host.process is None or host.process.dead:
                continue
            if generator.random() < 0.05:
                host.keep_copy()
            if generator.random() < profile.sleeps:
                await self._sleep(host, generator)
            if generator.random() < profile.crashes:
                await self._go_and_return(host, generator)

    async def _go_and_return(self, host: Host, generator: random.Random) -> None:
        profile = self.profile
        if generator.random() < profile.graceful:
            await host.leave()
        else:
            host.crash(generator if generator.random() < profile.power_cuts else None)
        await host.ended.wait()
        await anyio.sleep(profile.away * generator.lognormvariate(0.0, 1.0))
        if generator.random() >= profile.returns and host.number:
            await anyio.sleep(10 * profile.away)
        chance = generator.random()
        if chance < profile.new_identity and self._is_dispensable(host):
            host.forget()
        elif chance < profile.new_identity + profile.corrupt_disk:
            host.damage(generator)
        elif chance < profile.new_identity + profile.corrupt_disk + profile.stale_disk:
            host.go_back()
        self.world.start(host)

    async def _fall_together(self) -> None:
        """Every so many outer steps half of the machines or more are gone at once, as a provider takes them back."""
        generator, last = random.Random(f"cliff {self.seed}"), self.world.furthest
        while True:
            await anyio.sleep(EVERY)
            if self.world.furthest < last + self.profile.cliff_every:
                continue
            last = self.world.furthest
            up = [host for host in self.world.hosts if host.up and host.process is not None and not host.process.dead]
            struck = generator.sample(up, generator.randint((len(up) + 1) // 2, len(up)))
            self.world.trace.note(-1, 0, "cliff", hosts=[host.number for host in struck])
            async with anyio.create_task_group() as group:
                for host in struck:
                    group.start_soon(self._go_and_return, host, generator)

    def _is_dispensable(self, host: Host) -> bool:
        """Return whether the swarm outlives the loss of this machine's key and disk: without any member it has ended.

        Of two, the one that is lost may just have voted for going on alone. And a member that has not heard of the
        commit which let it in could not go on.
        """
        keeper = self.world.hosts[0]
        head = None if keeper.process is None else keeper.process.node.driver.head.hash
        records = [commit.record for commit in self.world.trace.commits.values()]
        inner = {record.previous for record in records}
        tips = [record for record in records if record.hash not in inner]
        safe = [tip.hash == head and keeper.peer in tip.next_members and len(tip.next_members) > 2 for tip in tips]
        return host is not keeper and all(safe)

    async def _sleep(self, host: Host, generator: random.Random) -> None:
        """The lid is closed: no training, no network; open connections break. Or all of the process stands still."""
        if random.Random(f"suspend {self.seed} {host.number} {anyio.current_time()}").random() < SUSPENDED:
            await self._suspend(host, generator)
            return
        process = host.process
        host.note("slept")
        self.world.isolate(host)
        if process is not None and process.trainer is not None:
            process.trainer.asleep = True
        await anyio.sleep(generator.uniform(1.0, 30.0))
        self.world.rejoin(host)
        if process is not None and process.trainer is not None:
            process.trainer.asleep = False

    async def _suspend(self, host: Host, generator: random.Random) -> None:
        """The machine sleeps, up to four times as long as its run gives up who is silent."""
        process, seconds = host.process, generator.uniform(1.0, 30.0)
        seconds *= generator.choice([1.0, 1.0, 4.0])
        assert process is not None
        host.note("suspended", seconds=round(seconds, 1))
        self.world.isolate(host)
        assert host.task is not None
        try:
            with suspend(host.task):
                await anyio.sleep(seconds)
        finally:
            self.world.rejoin(host)

    async def _divide(self) -> None:
        """Splits of the network: two sides, or one link, or a bridge that both sides still reach."""
        profile, generator = self.profile, random.Random(f"split {self.seed}")
        while True:
            await anyio.sleep(self.round_seconds)
            if generator.random() >= profile.partitions * len(self.world.hosts):
                continue
            sides = [host for host in self.world.hosts if generator.random() < 0.5]
            bridge = generator.choice(self.world.hosts) if generator.random() < 0.3 else None
            pairs = [(a, b) for a in sides for b in self.world.hosts if b not in sides and bridge not in (a, b)]
            for _ in range(generator.choice([1, 1, 4])):  # flapping
                self.world.cut(pairs)
                await anyio.sleep(profile.partition_for * generator.lognormvariate(0.0, 0.5))
                self.world.heal(pairs)
                await anyio.sleep(generator.uniform(0.1, 2.0))
