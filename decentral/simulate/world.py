"""A swarm of simulated machines, what befalls them, and the calm after which everything must be in order again."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import anyio
import anyio.abc

from decentral.consensus.chain import Voting
from decentral.dissemination import broadcast
from decentral.rounds.driver import Driver
from decentral.rounds.snapshots import CHAIN, INDEX, OLDEST, PACKED, STATE
from decentral.simulate.process import FINE, Host, Site
from decentral.simulate.scenario import Scenario
from decentral.simulate.trace import Trace
from decentral.simulate.training import StepPace
from decentral.simulate.troubles import Afflict, Troubles
from decentral.simulate.weather import Weather
from decentral.swarm.directory import ways_in
from decentral.transport.memory import MemoryNetwork
from decentral.wire.keys import peer_name

LOOK_EVERY = 0.5  # s of virtual time
LONG = (broadcast.FETCH, CHAIN, OLDEST, INDEX, STATE, PACKED)  # what is asked for there comes in many pieces
CALM_ROUNDS = 3  # outer steps that the calm swarm must still make
Progress = Callable[[float], None]  # is told which share is done, from 0 to 1, of the outer steps that are to be made


class World:
    """Hosts on one network. ``run`` it once, under virtual time."""

    def __init__(
        self,
        scenario: Scenario,
        folder: Path,
        trace: Trace,
        afflict: Afflict = Troubles,
        on_progress: Progress = lambda share: None,
    ) -> None:
        self.scenario, self.folder, self.trace, self.afflict = scenario, folder, trace, afflict
        self._on_progress = on_progress
        profile, seed = scenario.profile, scenario.seed
        self.generator = random.Random(f"world {seed}")
        self.network = MemoryNetwork(
            latency=profile.latency,
            jitter=0.002,
            generator=random.Random(f"network {seed}"),
            weights=None if scenario.stand_in is None else scenario.stand_in.protocols,
            letters=True,
            long=LONG,
        )
        self.weather = Weather(random.Random(f"weather {seed}"))
        grain = FINE if scenario.stand_in is None else scenario.stand_in.grain
        self.site = Site(
            scenario.manifest,
            self.network,
            self.weather,
            trace,
            seed,
            scenario.lesson,
            scenario.claims,
            grain,
            Voting(scenario.seats),
        )
        self.hosts = [self._host(number) for number in range(scenario.hosts)]
        self.reached = 0  # outer steps of the chain when the faults ended
        self.hangs: list[str] = []
        self._group: anyio.abc.TaskGroup | None = None

    def _host(self, number: int) -> Host:
        profile = self.scenario.profile
        generator = random.Random(f"host {self.scenario.seed} {number}")
        seconds = self.scenario.step_seconds * generator.lognormvariate(0.0, profile.speed_spread)
        pace = StepPace(
            generator, seconds, profile.jitter_spread, profile.straggles / self.scenario.manifest.inner.steps
        )
        host = Host(self.site, number, self.folder / f"host{number}", pace, founder=number == 0)
        if number >= self.scenario.hosts - self.scenario.parts:
            fragment = number % self.scenario.manifest.outer.fragments
            host.part = range(fragment, fragment + 1)
        if number >= self.scenario.hosts - self.scenario.groups * self.scenario.stages - self.scenario.spares:
            host.shares_with = self.scenario.stages
        self._connect(host, profile.bandwidth * generator.lognormvariate(0.0, profile.bandwidth_spread))
        return host

    def _connect(self, host: Host, downlink: float) -> None:
        uplink = downlink / self.scenario.profile.asymmetry
        self.network.set_downlink(host.peer, downlink)
        self.network.set_uplink(host.peer, uplink)
        if self.scenario.stand_in is not None:
            host.claim = uplink / self.scenario.stand_in.offer  # as a meter would tell it of the small model's bytes

    async def run(self) -> None:
        """Come together, suffer, come to rest."""
        async with anyio.create_task_group() as group:
            self._group = group
            for host in self.hosts:
                self.start(host)
                if self.scenario.arrivals:
                    await anyio.sleep(self.scenario.arrivals / len(self.hosts))
            if self.scenario.calm_start:
                await self._until("come together", lambda: all(self._outer_steps(host) > 0 for host in self.hosts))
                await self._until("form groups", self._are_formed)
            self.weather.break_out(self.scenario.profile)
            await self._until("begin", lambda: any(self._outer_steps(host) > 0 for host in self.hosts))
            async with anyio.create_task_group() as troubles:
                troubles.start_soon(self.afflict(self).run)
                await self._suffer()
                troubles.cancel_scope.cancel()
            await self._come_to_rest()
            group.cancel_scope.cancel()

    def _are_formed(self) -> bool:
        sharing = [host.process for host in self.hosts if host.shares_with is not None]
        formed = sum(
            process is not None and process.side is not None and process.side.inbox is not None for process in sharing
        )
        return formed >= self.scenario.formed * len(sharing)

    def start(self, host: Host) -> None:
        """Start a process on a machine that has none, with an invite of one that has joined.

        Two that had lost their disks invited each other, and never learnt of the third.
        """
        assert self._group is not None
        living = [other for other in self.hosts if other is not host and other.up]
        invited_by = self.hosts[0] if not living else self.generator.choice(living)
        if invited_by.process is None or invited_by.process.trainer is None:
            invited_by = self.hosts[0]
        self._group.start_soon(host.live, () if host is invited_by else self._invite(invited_by))

    def _invite(self, host: Host) -> tuple[str, ...]:
        """Return the addresses by which it lets others join; it may be away now."""
        known = () if host.process is None else ways_in(host.process.node.directory)
        return known or self.network.transport(host.signer).addresses()

    @property
    def furthest(self) -> int:
        """Outer steps of whoever is furthest."""
        return max(self._outer_steps(host) for host in self.hosts)

    # ---- suffering ----

    async def _suffer(self) -> None:
        """Until so many outer steps are made, or it has taken too long."""
        goal = self.scenario.rounds + (self.furthest if self.scenario.calm_start else 0)
        every = min(LOOK_EVERY, self.scenario.round_seconds / 2)  # no round goes by unseen
        with anyio.move_on_after(self.scenario.patience * self.scenario.rounds):
            while self.furthest < goal:
                await anyio.sleep(every)
                self._on_progress(self.furthest / (goal + CALM_ROUNDS))
        self.reached = min(self.furthest, goal)
        for host in self.hosts:
            host.note("spent", None, **asdict(host.spent))

    def cut(self, pairs: list[tuple[Host, Host]]) -> None:
        """Break the links of these pairs."""
        self.trace.note(-1, 0, "cut", pairs=[(a.number, b.number) for a, b in pairs])
        for a, b in pairs:
            self.network.cut(a.peer, b.peer)

    def heal(self, pairs: list[tuple[Host, Host]]) -> None:
        """Undo ``cut``."""
        self.trace.note(-1, 0, "healed", pairs=[(a.number, b.number) for a, b in pairs])
        for a, b in pairs:
            self.network.heal(a.peer, b.peer)

    def isolate(self, host: Host) -> None:
        """Take a machine off the network."""
        self.cut([(host, other) for other in self.hosts if other is not host])

    def rejoin(self, host: Host) -> None:
        """Undo ``isolate``."""
        self.heal([(host, other) for other in self.hosts if other is not host])

    # ---- coming to rest ----

    async def _come_to_rest(self) -> None:
        self.trace.note(-1, 0, "calm")
        self.weather.clear_up()
        for host in self.hosts:
            self.rejoin(host)
            if host.up and host.process is not None and (host.process.leaving or host.process.dead):
                await host.ended.wait()  # what is shielded from a crash takes its time
            if host.process is not None and host.process.trainer is not None:
                host.process.trainer.asleep = False
            if self._holds_a_dead_invite(host):  # as a person does whose ``join`` ends with that
                host.crash()
                await host.ended.wait()
            if not host.up:
                self.start(host)
        goal = self.furthest + CALM_ROUNDS
        await self._until("go on", lambda: self._all_reached(goal))
        for host in self.hosts:
            if host.process is not None and host.process.trainer is not None:
                host.process.trainer.rest()
        await self._until("come to rest", self._at_rest)
        for host in self.hosts:
            self._last_words(host)

    def _all_reached(self, goal: int) -> bool:
        last = min(self._outer_steps(host) for host in self.hosts)
        self._on_progress(min(1.0, max(0, last) / goal))
        return last >= goal

    def _holds_a_dead_invite(self, host: Host) -> bool:
        """Return whether it waits to be let in by peers that are all gone for good: its inviter lost disk and key."""
        waits = host.up and host.process is not None and host.process.trainer is None
        there = [f"/p2p/{peer_name(other.peer)}" for other in self.hosts if other is not host]
        invite = host.process.bootstrap if waits and host.process is not None else ()
        return bool(invite) and not any(address.endswith(tuple(there)) for address in invite)

    def _last_words(self, host: Host) -> None:
        process = host.process
        if not host.up or process is None or process.trainer is None:
            return
        driver = process.node.driver
        host.note(
            "rested",
            process.trainer.uncommitted() | process.node.replica.shared_tensors(),
            round=driver.head.round,
            hash=driver.head.hash,
            digest=process.node.replica.digest,
            left_over=_left_over(process.node.driver),
        )

    def _at_rest(self) -> bool:
        """Everybody stands at one head with nothing under way."""
        processes = [host.process for host in self.hosts]
        heads = {process.node.driver.head.hash for process in processes if process is not None}
        drivers = [process.node.driver for process in processes if process is not None and process.trainer is not None]
        quiet = all(d.state.pending is None and d.head.anchor is not None for d in drivers)
        quiet = quiet and all(d.machine.state.decided is None for d in drivers)
        quiet = quiet and not any(p.node.gossip.is_swapping for p in processes if p is not None and p.node.gossip)
        merged = all(p.trainer.loop.is_up_to_date for p in processes if p is not None and p.trainer is not None)
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


def _left_over(driver: Driver) -> int:
    """Count what is still held for rounds that are over, and bytes of frames beyond what the store may take."""
    past = driver.head.round
    frames = sum(1 for header in driver.machine.state.held.values() if header.round <= past)
    plans = sum(1 for round_, _ in driver.frames.inbox.plans if round_ <= past)
    return frames + plans + max(0, driver.state.store.nbytes - driver.state.store.capacity)


def in_memory_folder() -> tempfile.TemporaryDirectory[str]:
    """Disks of simulated machines: in memory where there is such a place, since nothing here has to survive."""
    shared = Path("/dev/shm")
    return tempfile.TemporaryDirectory(prefix="decentral-sim-", dir=shared if shared.is_dir() else None)
