"""Gossip step after gossip step: who meets whom, who waits how long, and who goes on alone, as `Swapping` has it."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from decentral.consensus.timing import allowance
from decentral.rounds.gossip import LOOK_EVERY
from decentral.rounds.partners import Punctuality
from decentral.simulate.by_rounds.air import Air
from decentral.simulate.by_rounds.machine import (
    BEGINS,
    RETURNS,
    Boundary,
    MachineModel,
    StepTimes,
    absences,
    machines_of,
)
from decentral.simulate.scenario import Scenario
from decentral.training.round_time import WAYS
from decentral.wire.frames import HEADER_NBYTES

ANSWERS = 5  # one-way delays of asking the other whether it steps, and of its answer


@dataclass(slots=True, eq=False)
class Gossiper:
    """A peer with its view of the others."""

    machine: MachineModel
    punctuality: Punctuality
    step: int = 0
    seen: dict[int, int] = field(default_factory=dict)  # the latest step heard of from each
    life: int = 0

    def falls_in(self) -> None:
        """Goes to the step that the upper half of those heard of has reached."""
        known = sorted([self.step, *self.seen.values()])
        self.step = max(self.step, known[len(known) // 2])


@dataclass(frozen=True, slots=True)
class Waiting:
    """A peer that is at a step before its partner."""

    one: Gossiper
    began: float
    until: float


class Gossiping:
    """The gossip of one scenario. ``run`` it once."""

    def __init__(self, scenario: Scenario, nbytes: float) -> None:
        """``nbytes``: of the body that a peer sends its partner."""
        self.scenario, self.nbytes = scenario, HEADER_NBYTES + nbytes
        swarm = scenario.manifest.swarm
        self.machines = machines_of(scenario)
        self._patience = swarm.deadline_floor, swarm.deadline_ceiling
        self.peers = [Gossiper(one, Punctuality(*self._patience)) for one in self.machines]
        self.air = Air(scenario.profile, np.random.default_rng([scenario.seed, 2]))
        self.told = StepTimes()
        self._queue: list[tuple[float, int, Gossiper, int, int]] = []  # time, order, who, its life, step if it waits
        self._waiting: dict[int, Waiting] = {}  # by number
        self._matchings: dict[int, dict[int, int]] = {}
        self._count = 0
        self._troubled = False

    def run(self, on_progress: Callable[[float], None]) -> StepTimes:
        """Until somebody has made all steps, or it takes too long."""
        for one in self.peers:
            one.machine.at = Boundary(BEGINS, 0)
            self._train(one)
        while self._queue and self.told.reached < self.scenario.rounds:
            now, _, one, life, step = heapq.heappop(self._queue)
            if now > self.scenario.patience * self.scenario.rounds:
                break
            if life == one.life:
                self._arrives(one, now) if step < 0 else self._times_out(one, step, now)
            on_progress(min(1.0, self.told.reached / self.scenario.rounds))
        return self.told

    def _push(self, time: float, one: Gossiper, step: int = -1) -> None:
        self._count += 1
        heapq.heappush(self._queue, (time, self._count, one, one.life, step))

    def _train(self, one: Gossiper) -> None:
        """All inner steps up to the next boundary at which it swaps; a crash in them costs what it learnt."""
        machine = one.machine
        for _ in range(self.scenario.manifest.inner.steps // self.scenario.manifest.outer.fragments):
            while machine.step() is None:
                machine.crash(RETURNS)
                one.life, one.punctuality, one.seen = one.life + 1, Punctuality(*self._patience), {}
        self._push(machine.at.time, one)

    def _partner(self, one: Gossiper) -> Gossiper | None:
        if one.step not in self._matchings:
            order = list(range(len(self.peers)))
            random.Random(f"pairs {self.scenario.seed} {one.step}").shuffle(order)
            pairs = [order[at : at + 2] for at in range(0, len(order) - 1, 2)]
            self._matchings[one.step] = {a: b for pair in pairs for a, b in (pair, pair[::-1])}
        number = self._matchings[one.step].get(one.machine.number)
        return None if number is None else self.peers[number]

    def _arrives(self, one: Gossiper, now: float) -> None:
        """It is at its step, and pushes its frame."""
        partner = self._partner(one)
        if partner is None or self._is_away(partner, now):
            return self._alone(one, now + LOOK_EVERY)
        one.punctuality.began(one.step, partner.machine.name, now)
        sent = now + self._seconds(one, partner)
        one.machine.nbytes += self.nbytes
        there = self._waiting.get(partner.machine.number)
        if there is not None and partner.step == one.step:
            return self._meet(there, one, now)
        if partner.step > one.step:
            one.seen[partner.machine.number] = partner.step
            return self._alone(one, sent)
        until = sent + one.punctuality.patience() + self._allowance(partner)
        self._waiting[one.machine.number] = Waiting(one, now, until)
        self._push(until, one, one.step)

    def _meet(self, there: Waiting, one: Gossiper, now: float) -> None:
        """Both are at the step: each gets the other's frame, if it comes in time."""
        other, latency = there.one, WAYS * self.scenario.profile.latency
        first = there.began + self._seconds(other, one) + latency
        second = now + self._seconds(one, other) + latency
        lost = self.air.losses(2)
        self._receive(one, other, first)
        self._receive(other, one, second)
        until = now + self._seconds(one, other) + one.punctuality.patience() + self._allowance(other)
        met = max(first, second) + ANSWERS * self.scenario.profile.latency
        if lost.any() or met > min(there.until, until):
            self._waiting.pop(other.machine.number)
            self._alone(other, max(now, there.until))
            return self._alone(one, max(now, until))
        self._waiting.pop(other.machine.number)
        self.told.named.append(2)
        self._ends(other, met)
        self._ends(one, met)

    def _receive(self, at: Gossiper, sender: Gossiper, when: float) -> None:
        at.seen[sender.machine.number] = sender.step
        at.punctuality.came(sender.step, sender.machine.name, when, is_over=at.step > sender.step)

    def _times_out(self, one: Gossiper, step: int, now: float) -> None:
        waiting = self._waiting.get(one.machine.number)
        if waiting is not None and one.step == step:
            self._waiting.pop(one.machine.number)
            self._alone(one, now)

    def _alone(self, one: Gossiper, now: float) -> None:
        self.told.named.append(1)
        self._ends(one, now)

    def _ends(self, one: Gossiper, now: float) -> None:
        """The step is made."""
        if one.step + 1 > self.told.reached:
            self.told.reached = one.step + 1
            self.told.times.append(now)
        if not self._troubled:
            self._begin_troubles(now)
        one.step += 1
        one.falls_in()
        one.machine.wait(now)
        self._train(one)

    def _begin_troubles(self, now: float) -> None:
        self._troubled = True
        scenario = self.scenario
        for machine in self.machines:
            found = absences(scenario.profile, scenario.seed, machine.number, scenario.round_seconds, now)
            machine.begin_troubles(found)

    @staticmethod
    def _is_away(one: Gossiper, now: float) -> bool:
        return one.machine.away.begin <= now < one.machine.away.end or one.machine.enters > now

    def _seconds(self, sender: Gossiper, receiver: Gossiper) -> float:
        return self.nbytes / min(sender.machine.up, receiver.machine.down)

    def _allowance(self, peer: Gossiper) -> float:
        return allowance(round(self.nbytes), 1, self.nbytes / peer.machine.up)
