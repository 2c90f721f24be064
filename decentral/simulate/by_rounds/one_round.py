"""One round of a gather or a reduce: what the leader has when it waits no longer, and when everybody goes on.

The rules are those of `decentral/consensus/leader.py` and its neighbours, told of times, not of messages.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from decentral.consensus.chain import SEATS
from decentral.consensus.timing import Unsent, allowance
from decentral.dissemination.broadcast import Line, Lines
from decentral.dissemination.reduce import USUAL
from decentral.manifest import Manifest
from decentral.node.node import LEAST
from decentral.simulate.by_rounds.air import Air, Seconds
from decentral.simulate.by_rounds.collecting import LeaderView, collected
from decentral.simulate.by_rounds.frames import MemberLines, gathered
from decentral.simulate.by_rounds.machine import MachineModel
from decentral.simulate.by_rounds.reducing import Reducing
from decentral.simulate.by_rounds.training import Deadlines, Offering, RoundWork
from decentral.simulate.by_rounds.voting import Proposed, applied, committed
from decentral.simulate.cost import of_rounds
from decentral.simulate.scenario import Scenario

DETECTS = 18.0  # s until a lease has run out, from its middle on, and half as long again
LEAST_PATIENCE = 2.0  # s with a leader, see RoundTerms.patience


@dataclass(slots=True)
class Memory:
    """What one round leaves to the next."""

    manifest: Manifest
    nbytes: float  # of the body of a contribution
    air: Air
    order: random.Random  # of who leads
    deadlines: Deadlines
    unsent: Unsent = field(default_factory=Unsent)

    @classmethod
    def of(cls, scenario: Scenario, nbytes: float) -> Memory:
        """Before the first round."""
        swarm, seed = scenario.manifest.swarm, scenario.seed
        air = Air(scenario.profile, np.random.default_rng([seed, 1]))
        deadlines = Deadlines(swarm.deadline_floor, swarm.deadline_ceiling)
        return cls(scenario.manifest, nbytes, air, random.Random(f"leaders {seed}"), deadlines)


@dataclass(frozen=True, slots=True)
class Decided:
    """When the round is committed, who is named, and when each of the members goes on."""

    at: float
    named: set[MachineModel]
    applied: list[float]


@dataclass(frozen=True, slots=True)
class Here:
    """When each member (rows) hears of each offer (columns), and has what it can use of it."""

    heard: Seconds
    usable: Seconds


class Round:
    """From offers to the commit. Members by their places, in the order of ``works``."""

    def __init__(self, memory: Memory, number: int, works: Sequence[RoundWork], offers: Sequence[Offering]) -> None:
        self.memory, self.number, self.works, self.offers = memory, number, works, offers
        self.members = [work.machine for work in works]
        place = {machine: place for place, machine in enumerate(self.members)}
        self.air, self.lines = memory.air, MemberLines.of(self.members, memory.air.profile.latency)
        self.places = np.array([place[offer.machine] for offer in offers])
        self.offered = np.array([offer.time for offer in offers])
        self.gone = np.array([offer.machine.goes_at for offer in offers])
        self.reduces = memory.manifest.exchange.kind == "reduce"
        self.allowed, self.here = self._allowed(), self._here()

    @property
    def is_lost(self) -> bool:
        """Whether nobody ever has anything to use."""
        return not np.isfinite(self.here.usable).any()

    def decide(self) -> Decided:
        """As the machines would."""
        here = self.here
        leader, ready = self._led(here)
        self._learn(leader, here, ready)
        chosen = self.places[here.usable[leader] <= ready]
        if self.reduces:
            reducing = Reducing(self.lines, self.air, leader, self.memory.nbytes, self._patience, self.allowed.max())
            done = reducing.carried_out(chosen, ready)
            held, ready, chosen = done.there, float(done.there[leader]), done.named
            self._count(range(len(self.members)), done.sent)
        else:
            held = here.usable[:, here.usable[leader] <= ready].max(axis=1)
        at, when = self._vote(leader, ready, held)
        return Decided(at, {self.members[place] for place in chosen}, [float(one) for one in when])

    @property
    def _patience(self) -> float:
        return max(LEAST_PATIENCE, self.memory.manifest.swarm.deadline_floor)

    def _here(self) -> Here:
        n, c = len(self.members), len(self.offers)
        heard = self.offered + self.air.messages(n, c)
        heard[self.places, np.arange(c)] = self.offered
        if self.reduces:
            return Here(heard, heard)
        nbytes = self.memory.nbytes
        there = gathered(self.lines, self.air, self.places, self.offered, nbytes, self.gone)
        self._count(self.places, np.full(c, (n - 1) * nbytes))
        return Here(heard, np.maximum(heard, there))

    def _vote(self, leader: int, ready: float, held: Seconds) -> tuple[float, Seconds]:
        n, kind = len(self.members), self.memory.manifest.exchange.kind
        voters = {leader, *self._in_turn()[: SEATS - 1]}
        told = of_rounds.leader(kind, n, USUAL.align * n).nbytes / float(self.lines.up[leader])  # proposals and commits
        proposed = Proposed(ready + told / 2, leader, sorted(voters), held)
        at = committed(proposed, self.air) + told / 2
        offered = np.full(n, at)
        offered[self.places] = np.minimum(self.offered, at)
        return at, applied(proposed, self.air, at, offered, SEATS)

    def _in_turn(self) -> list[int]:
        """In the order of who leads."""
        found = list(range(len(self.members)))
        self.memory.order.shuffle(found)
        return found

    def _led(self, here: Here) -> tuple[int, float]:
        """Who leads to the proposal, and when it makes it: one that goes before costs the next one's patience."""
        waited, leader, at = 0.0, 0, math.inf
        for leader in self._in_turn():
            machine = self.members[leader]
            at = max(waited, collected(self._seen(leader, here), self.memory.deadlines.of(machine.generation)))
            if machine.goes_at > at:
                break
            was_known = machine.goes_at <= float(self.offered.min())
            waited = at if was_known else at + self._patience
        return leader, at

    def _seen(self, leader: int, here: Here) -> LeaderView:
        machine = self.members[leader]
        own = next((offer.time for offer in self.offers if offer.machine is machine), math.inf)
        offering = {offer.machine for offer in self.offers}
        silent = [one for one in self.members if one not in offering and not one.newcomer and one is not machine]
        until = max((_missed_until(one.goes_at, own) for one in silent), default=0.0)
        awaited = np.array([self._is_awaited(offer.machine) for offer in self.offers])
        opened, heard, usable = self.works[leader].opened, here.heard[leader], here.usable[leader]
        return LeaderView(opened, heard, usable, self.allowed, awaited, until, len(self.offers))

    def _is_awaited(self, machine: MachineModel) -> bool:
        return not machine.newcomer and self.memory.unsent.is_waited_for(machine.name, self.number)

    def _allowed(self) -> Seconds:
        least = LEAST * float(np.median(self.lines.up))
        lines = Lines([Line(max(float(rate), least), passes_on=True) for rate in self.lines.up])
        takes = lines.seconds_alone if self.reduces else lines.seconds_to_all
        nbytes = round(2 * self.memory.nbytes if self.reduces else self.memory.nbytes)
        return np.array([allowance(nbytes, 1, takes(nbytes, int(place))) for place in self.places])

    def _learn(self, leader: int, here: Here, ready: float) -> None:
        for offer, heard, usable in zip(self.offers, here.heard[leader], here.usable[leader], strict=True):
            if usable <= ready:
                self.memory.unsent.came(offer.machine.name)
            elif heard <= ready:
                self.memory.unsent.passed_over(offer.machine.name, self.number)

    def _count(self, places: Sequence[int] | range | np.ndarray, nbytes: Seconds) -> None:
        for place, sent in zip(places, nbytes, strict=True):
            self.members[place].nbytes += float(sent)


def _missed_until(goes_at: float, leader_offers: float) -> float:
    """Until when a leader takes a member that goes without an offer for one that is there: a send to it fails at once,
    and its own offer is the next.
    """
    if leader_offers < goes_at:
        return goes_at + DETECTS
    return max(goes_at, min(leader_offers, goes_at + DETECTS))
