"""A swarm of simulated machines, what befalls them, and the calm after which everything must be in order again."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable
from pathlib import Path

import anyio
import anyio.abc

from decentral.simulate.host import Host, Site
from decentral.simulate.scenario import Scenario
from decentral.simulate.trace import Trace
from decentral.simulate.training import Pace
from decentral.simulate.weather import Weather
from decentral.transport.memory import MemoryNetwork

LOOK_EVERY = 0.5  # s of virtual time
PATIENCE = 15.0  # s of virtual time per outer step: a storm may keep a swarm from making any
CALM_ROUNDS = 3  # outer steps that the calm swarm must still make


class World:
    """Hosts on one network. ``run`` it once, under virtual time."""

    def __init__(self, scenario: Scenario, folder: Path, trace: Trace) -> None:
        self.scenario, self.folder, self.trace = scenario, folder, trace
        profile, seed = scenario.profile, scenario.seed
        self.generator = random.Random(f"world {seed}")
        self.network = MemoryNetwork(
            latency=profile.latency,
            jitter=0.002,
            generator=random.Random(f"network {seed}"),
            weights=scenario.weights,
        )
        self.weather = Weather(
            random.Random(f"weather {seed}"), profile.loss, profile.duplication, profile.corruption, profile.delay
        )
        self.site = Site(scenario.manifest, self.network, self.weather, trace, seed, scenario.exact)
        self.hosts = [self._host(number) for number in range(scenario.hosts)]
        self.reached = 0  # outer steps of the chain in the end
        self.hangs: list[str] = []
        self._group: anyio.abc.TaskGroup | None = None

    def _host(self, number: int) -> Host:
        profile = self.scenario.profile
        generator = random.Random(f"host {self.scenario.seed} {number}")
        seconds = self.scenario.step_seconds * generator.lognormvariate(0.0, profile.speed_spread)
        pace = Pace(generator, seconds, profile.jitter_spread, profile.straggles / self.scenario.manifest.inner.steps)
        host = Host(self.site, number, self.folder / f"host{number}", pace, founder=number == 0)
        self._connect(host, profile.bandwidth * generator.lognormvariate(0.0, 1.0))
        return host

    def _connect(self, host: Host, downlink: float) -> None:
        self.network.set_downlink(host.peer, downlink)
        self.network.set_uplink(host.peer, downlink / self.scenario.profile.asymmetry)

    async def run(self) -> None:
        """Grow, suffer, come to rest."""
        async with anyio.create_task_group() as group:
            self._group = group
            for host in self.hosts:
                self.start(host)
            await self._until("begin", lambda: any(self._outer_steps(host) > 0 for host in self.hosts))
            async with anyio.create_task_group() as troubles:
                for host in self.hosts:
                    troubles.start_soon(self._trouble, host)
                troubles.start_soon(self._divide)
                await self._suffer()
                troubles.cancel_scope.cancel()
            await self._come_to_rest()
            group.cancel_scope.cancel()

    def start(self, host: Host) -> None:
        """Start a process on a machine that has none."""
        assert self._group is not None
        living = [other for other in self.hosts if other is not host and other.up]
        invited_by = self.hosts[0] if not living else self.generator.choice(living)
        others = () if host is invited_by else self.network.transport(invited_by.signer).addresses()
        self._group.start_soon(host.live, others)

    @property
    def furthest(self) -> int:
        """Outer steps of whoever is furthest."""
        return max(self._outer_steps(host) for host in self.hosts)

    # ---- suffering ----

    async def _suffer(self) -> None:
        """Until so many outer steps are made, or it has taken too long."""
        goal = self.furthest + self.scenario.rounds
        with anyio.move_on_after(PATIENCE * self.scenario.rounds):
            while self.furthest < goal:
                await anyio.sleep(LOOK_EVERY)

    async def _trouble(self, host: Host) -> None:
        """One machine's share of what the profile has in store, once per round's time."""
        profile, generator = self.scenario.profile, random.Random(f"trouble {self.scenario.seed} {host.number}")
        round_seconds = self.scenario.step_seconds * self.scenario.manifest.inner.steps
        while True:
            await anyio.sleep(round_seconds * generator.uniform(0.5, 1.5))
            if not host.up or host.process is None or host.process.dead:
                continue
            if generator.random() < 0.1:
                host.keep_copy()
            if generator.random() < profile.sleeps:
                await self._sleep(host, generator)
            if generator.random() < profile.crashes:
                await self._go_and_return(host, generator)

    async def _go_and_return(self, host: Host, generator: random.Random) -> None:
        profile = self.scenario.profile
        if generator.random() < profile.graceful:
            await host.leave()
        else:
            host.crash()
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
        self.start(host)

    def _is_dispensable(self, host: Host) -> bool:
        """Whether the swarm outlives the loss of this machine's key: one whose members are all lost has ended.

        Of two, the one that is lost may just have voted for going on alone.
        """
        records = [commit.record for commit in self.trace.commits.values()]
        inner = {record.previous for record in records}
        tips = [record for record in records if record.hash not in inner]
        safe = [self.hosts[0].peer in tip.next_members and len(tip.next_members) > 2 for tip in tips]
        return bool(host.number) and all(safe)

    async def _sleep(self, host: Host, generator: random.Random) -> None:
        """The lid is closed: no training, no network; open connections break."""
        process = host.process
        host.note("slept")
        self._isolate(host)
        if process is not None and process.trainer is not None:
            process.trainer.asleep = True
        await anyio.sleep(generator.uniform(1.0, 30.0))
        self._rejoin(host)
        if process is not None and process.trainer is not None:
            process.trainer.asleep = False

    async def _divide(self) -> None:
        """Splits of the network: two sides, or one link, or a bridge that both sides still reach."""
        profile, generator = self.scenario.profile, random.Random(f"split {self.scenario.seed}")
        round_seconds = self.scenario.step_seconds * self.scenario.manifest.inner.steps
        while True:
            await anyio.sleep(round_seconds)
            if generator.random() >= profile.partitions * len(self.hosts):
                continue
            sides = [host for host in self.hosts if generator.random() < 0.5]
            bridge = generator.choice(self.hosts) if generator.random() < 0.3 else None
            pairs = [(a, b) for a in sides for b in self.hosts if b not in sides and bridge not in (a, b)]
            for _ in range(generator.choice([1, 1, 4])):  # flapping
                self._cut(pairs)
                await anyio.sleep(profile.partition_for * generator.lognormvariate(0.0, 0.5))
                self._heal(pairs)
                await anyio.sleep(generator.uniform(0.1, 2.0))

    def _cut(self, pairs: list[tuple[Host, Host]]) -> None:
        self.trace.note(-1, 0, "cut", pairs=[(a.number, b.number) for a, b in pairs])
        for a, b in pairs:
            self.network.cut(a.peer, b.peer)

    def _heal(self, pairs: list[tuple[Host, Host]]) -> None:
        self.trace.note(-1, 0, "healed", pairs=[(a.number, b.number) for a, b in pairs])
        for a, b in pairs:
            self.network.heal(a.peer, b.peer)

    def _isolate(self, host: Host) -> None:
        self._cut([(host, other) for other in self.hosts if other is not host])

    def _rejoin(self, host: Host) -> None:
        self._heal([(host, other) for other in self.hosts if other is not host])

    # ---- coming to rest ----

    async def _come_to_rest(self) -> None:
        self.trace.note(-1, 0, "calm")
        self.weather.clear_up()
        for host in self.hosts:
            self._rejoin(host)
            if host.up and host.process is not None and host.process.leaving:
                await host.ended.wait()
            if host.process is not None and host.process.trainer is not None:
                host.process.trainer.asleep = False
            if not host.up:
                self.start(host)
        goal = self.furthest + CALM_ROUNDS
        await self._until("go on", lambda: all(self._outer_steps(host) >= goal for host in self.hosts))
        for host in self.hosts:
            if host.process is not None and host.process.trainer is not None:
                host.process.trainer.idle = True
        await self._until("come to rest", self._at_rest)
        self.reached = self.furthest
        for host in self.hosts:
            self._last_words(host)

    def _last_words(self, host: Host) -> None:
        process = host.process
        if not host.up or process is None or process.trainer is None:
            return
        driver = process.node.driver
        host.note(
            "rested",
            process.trainer.carried() | {f"anchor/{f}": a for f, a in enumerate(process.node.replica.anchors)},
            round=driver.head.round,
            hash=driver.head.hash,
            digest=process.node.replica.digest,
            sent=process.transport.traffic.total.sent,
            received=process.transport.traffic.total.received,
            busy=round(process.trainer.busy_seconds, 3),
        )

    def _at_rest(self) -> bool:
        """Everybody stands at one head with nothing under way."""
        processes = [host.process for host in self.hosts]
        heads = {process.node.driver.head.hash for process in processes if process is not None}
        drivers = [process.node.driver for process in processes if process is not None and process.trainer is not None]
        quiet = all(d.pending is None and d.head.anchor is not None and d.machine.decided is None for d in drivers)
        merged = all(not p.trainer.rhythm.waiting for p in processes if p is not None and p.trainer is not None)
        return len(drivers) == len(self.hosts) and len(heads) == 1 and quiet and merged

    async def _until(self, what: str, holds: Callable[[], bool]) -> None:
        with anyio.move_on_after(self.scenario.settle):
            while not holds():
                await anyio.sleep(LOOK_EVERY)
            return
        stand = {h.number: self._outer_steps(h) for h in self.hosts}
        self.hangs.append(f"did not {what} within {self.scenario.settle:g} s of virtual time; outer steps: {stand}")

    @staticmethod
    def _outer_steps(host: Host) -> int:
        process = host.process
        if not host.up or process is None or process.trainer is None:
            return 0
        gossip = process.node.gossip
        return process.node.driver.head.outer_step if gossip is None else gossip.step


def in_memory_folder() -> tempfile.TemporaryDirectory[str]:
    """Disks of simulated machines: in memory where there is such a place, since nothing here has to survive."""
    shared = Path("/dev/shm")
    return tempfile.TemporaryDirectory(prefix="decentral-sim-", dir=shared if shared.is_dir() else None)
