"""A round of a gather or a reduce: what the leader has when it waits no longer, and when everybody goes on.

The rules are those of `decentral.consensus.leader` and its neighbours, told of times, not of messages.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from decentral.consensus.chain import SEATS
from decentral.consensus.round_state import FETCH_AFTER, RESEND_AFTER
from decentral.consensus.timing import SLACK, Unsent, allowance
from decentral.dissemination.spread import Line, Lines
from decentral.manifest import Manifest
from decentral.node.node import LEAST
from decentral.rounds.reduce import USUAL_GRAIN, shares
from decentral.simulate import cost
from decentral.simulate.by_rounds.air import Air, LeaderView, Proposed, Seconds, apply_times, commit_time, proposal_time
from decentral.simulate.by_rounds.machine import Deadlines, MachineModel, Offering, RoundWork
from decentral.simulate.scenario import Scenario
from decentral.training.round_cost import plan_nbytes
from decentral.transport.memory import WINDOW
from decentral.wire.frames import HEADER_NBYTES

DETECTS = 18.0  # s until a lease has run out, from its middle on, and half as long again
LEAST_PATIENCE = 2.0  # s with a leader, see RoundTerms.patience


@dataclass(slots=True)
class Memory:
    """State that one round leaves to the next."""

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
        self.allowed, self.here = self._allowance(), self._here()

    @property
    def is_lost(self) -> bool:
        """Return whether nobody ever has anything to use."""
        return not np.isfinite(self.here.usable).any()

    def decide(self) -> Decided:
        """As the machines would."""
        here = self.here
        leader, ready = self._led(here)
        self._learn(leader, here, ready)
        chosen = self.places[here.usable[leader] <= ready]
        if self.reduces:
            reducing = Reducing(self.lines, self.air, leader, self.memory.nbytes, self._patience, self.allowed.max())
            done = reducing.carry_out(chosen, ready)
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
        there = gather(self.lines, self.air, self.places, self.offered, nbytes, self.gone)
        self._count(self.places, np.full(c, (n - 1) * nbytes))
        return Here(heard, np.maximum(heard, there))

    def _vote(self, leader: int, ready: float, held: Seconds) -> tuple[float, Seconds]:
        n, kind = len(self.members), self.memory.manifest.exchange.kind
        voters = {leader, *self._in_turn()[: SEATS - 1]}
        proposals_and_commits = cost.leader(kind, n, USUAL_GRAIN.align * n)
        told = proposals_and_commits.nbytes / float(self.lines.up[leader])
        proposed = Proposed(ready + told / 2, leader, sorted(voters), held)
        at = commit_time(proposed, self.air) + told / 2
        offered = np.full(n, at)
        offered[self.places] = np.minimum(self.offered, at)
        return at, apply_times(proposed, self.air, at, offered, SEATS)

    def _in_turn(self) -> list[int]:
        """In the order of who leads."""
        found = list(range(len(self.members)))
        self.memory.order.shuffle(found)
        return found

    def _led(self, here: Here) -> tuple[int, float]:
        """Return the leader that proposes, and when: a leader that is gone before costs the next one's patience."""
        waited, leader, at = 0.0, 0, math.inf
        for leader in self._in_turn():
            machine = self.members[leader]
            at = max(waited, proposal_time(self._seen(leader, here), self.memory.deadlines.of(machine.generation)))
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
        until = max((_time_missed_until(one.goes_at, own) for one in silent), default=0.0)
        awaited = np.array([self._is_awaited(offer.machine) for offer in self.offers])
        opened, heard, usable = self.works[leader].opened, here.heard[leader], here.usable[leader]
        return LeaderView(opened, heard, usable, self.allowed, awaited, until, len(self.offers))

    def _is_awaited(self, machine: MachineModel) -> bool:
        return not machine.newcomer and self.memory.unsent.is_waited_for(machine.name, self.number)

    def _allowance(self) -> Seconds:
        least = LEAST * float(np.median(self.lines.up))
        lines = Lines([Line(max(float(rate), least), passes_on=True) for rate in self.lines.up])
        takes = lines.seconds_alone if self.reduces else lines.seconds_to_all
        nbytes = round(2 * self.memory.nbytes if self.reduces else self.memory.nbytes)
        return np.array([allowance(nbytes, 1, takes(nbytes, int(place))) for place in self.places])

    def _learn(self, leader: int, here: Here, ready: float) -> None:
        for offer, heard, usable in zip(self.offers, here.heard[leader], here.usable[leader], strict=True):
            if usable <= ready:
                self.memory.unsent.note_frame(offer.machine.name)
            elif heard <= ready:
                self.memory.unsent.note_absence(offer.machine.name, self.number)

    def _count(self, places: Sequence[int] | range | np.ndarray, nbytes: Seconds) -> None:
        for place, sent in zip(places, nbytes, strict=True):
            self.members[place].nbytes += float(sent)


def _time_missed_until(goes_at: float, leader_offers: float) -> float:
    """Until when a leader takes a member that goes without an offer for one that is there: a send to it fails at once,
    and its own offer is the next.
    """
    if leader_offers < goes_at:
        return goes_at + DETECTS
    return max(goes_at, min(leader_offers, goes_at + DETECTS))


# ---- frames on their lines ----
#
# When they are where they must be: lines are shared by all copies that leave a peer at a time.


@dataclass(frozen=True, slots=True)
class MemberLines:
    """Lines of the members of a round, by their places."""

    up: Seconds  # bytes/s
    down: Seconds
    latency: float

    @classmethod
    def of(cls, machines: Sequence[MachineModel], latency: float) -> MemberLines:
        """Theirs."""
        return cls(np.array([one.up for one in machines]), np.array([one.down for one in machines]), latency)

    def rates(self, streams: int) -> Seconds:
        """Bytes/s that a peer sends on so many streams at once: each has a window."""
        return np.minimum(self.up, max(1, streams) * WINDOW / (2 * self.latency) if self.latency else math.inf)


def gather(lines: MemberLines, air: Air, places: np.ndarray, offered: Seconds, nbytes: float, gone: Seconds) -> Seconds:
    """When each peer (rows) has the frame of each contributor (columns); never, where its owner goes before.

    ``places``: of the contributors; ``gone``: when each of them is away.
    """
    n, c = len(lines.up), len(places)
    copies = (n - 1) * (HEADER_NBYTES + nbytes)
    sent = offered + copies / lines.rates(n - 1)[places]
    there = sent + air.delays(n, c)
    there = _through(lines.down, there, float(offered.min()), nbytes)
    lost = air.losses(n, c)
    asked = offered + air.delays(n, c) + air.fetches(n, c) + nbytes / lines.up[places]
    there = np.where(lost, np.maximum(asked, there), there)
    there[places, np.arange(c)] = offered
    there[:, sent > gone] = math.inf  # at its owner, too: a commit that names it could not be applied
    return there


def _through(down: Seconds, there: Seconds, began: float, nbytes: float) -> Seconds:
    """Through the receivers' lines: in turn, and not sooner than the line has carried all that came before."""
    order = np.argsort(there, axis=1)
    carried = began + np.arange(1, there.shape[1] + 1) * nbytes / down[:, None]
    found = np.empty_like(there)
    np.put_along_axis(found, order, np.maximum(np.take_along_axis(there, order, axis=1), carried), axis=1)
    return found


# ---- a reduce that is carried out ----
#
# Once, or again without those who let it down, as the leader and ``Reducer`` do.

ATTEMPTS = 64  # plans of one round at most


@dataclass(frozen=True, slots=True)
class Reduced:
    """When each peer has all results, what each sent, and whose slices are in them. By places of members."""

    there: Seconds
    sent: Seconds  # bytes
    named: NDArray[np.int64]


@dataclass(slots=True)
class Reducing:
    """The plans of one round. ``patience``: s, of a leader; half of what exceeds it is an owner's for slices."""

    lines: MemberLines
    air: Air
    leader: int
    nbytes: float
    patience: float
    allowed: float

    def carry_out(self, places: NDArray[np.int64], ready: float) -> Reduced:
        """Plan after plan from ``ready`` on, with the slices of ``places`` at first."""
        sent = np.zeros(len(self.lines.up))
        for attempt in range(ATTEMPTS):
            plan = _Plan(self, places, ready)
            sent += plan.sent
            missing = self.air.losses(len(places), len(places)) & ~np.eye(len(places), dtype=np.bool_)
            owners = np.flatnonzero(missing.any(axis=0))
            unheard = self.air.losses(len(places)) & (places != self.leader)
            if len(places) > 1 and len(owners):
                owner = owners[self.air.generator.integers(len(owners))]
                ready = float(plan.heard[places[owner]]) + self.patience + self.allowed / 2
                ready += float(self.air.messages(1)[0])
                places = places[~missing[:, owner]]
            elif len(places) > 1 and unheard.any():
                ready += (self.patience + self.allowed) * 2.0 ** min(attempt, 6)
                places = places[~unheard]
            else:
                break
        return Reduced(plan.there(), sent, places)


class _Plan:
    def __init__(self, of: Reducing, places: NDArray[np.int64], ready: float) -> None:
        n, self.of = len(of.lines.up), of
        self.heard = ready + of.air.messages(n)
        self.heard[of.leader] = ready
        self.share = np.zeros(n)
        self.share[places] = shares([float(rate) for rate in of.lines.up[places]])
        self.slices = np.zeros(n)
        self.slices[places] = (1.0 - self.share[places]) * of.nbytes
        self.results = (n - 1) * self.share * of.nbytes
        parts = float((self.share > 0).sum()) * HEADER_NBYTES
        self.sent = self.slices + self.results + parts * ((self.slices > 0) + (self.share > 0) * 1.0)

    def there(self) -> Seconds:
        """When each peer has all results."""
        lines, air, n = self.of.lines, self.of.air, len(self.heard)
        count = int((self.slices > 0).sum())
        left = self.heard + self.slices / lines.rates(count - 1)
        came = float(left[self.slices > 0].max()) + air.delays(n) if count > 1 else self.heard
        summed = np.maximum(came, self.heard + (count - 1) * self.share * self.of.nbytes / lines.down)
        done = np.maximum(summed, left) + self.results / lines.rates(n - 1)
        done[self.of.leader] += self._repeat_seconds()
        last = float(done[self.share > 0].max())
        mine = (count - 1) * self.share + (1.0 - self.share)  # slices of what it owns, and results of the rest
        carried = float(self.heard.min()) + mine * self.of.nbytes / lines.down
        return np.maximum(self._fetch_times(last), np.maximum(last + air.delays(n), carried))

    def _repeat_seconds(self) -> float:
        """Seconds that the leader's line takes for the plan, told to all, and again while results are missing."""
        n, up = len(self.heard), float(self.of.lines.up[self.of.leader])
        plan = (n - 1) * plan_nbytes(int((self.slices > 0).sum()), int((self.share > 0).sum()))
        lasts = float((self.slices + self.results).max()) / up
        return plan * (1 + lasts // RESEND_AFTER) / up

    def _fetch_times(self, last: float) -> Seconds:
        """When who lacks a result of some owner has asked for it, from the proposal on, and got it."""
        lines, air, n = self.of.lines, self.of.air, len(self.heard)
        owners = np.flatnonzero(self.share)
        takes = 2.0 * self.of.nbytes / lines.up[owners]
        turn = FETCH_AFTER + SLACK * takes / 2 + self.share[owners] * self.of.nbytes / lines.up[owners]
        lost = air.losses(n, len(owners)) & (np.arange(n)[:, None] != owners[None, :])
        lost[self.of.leader] = False
        asked = last + air.delays(n, len(owners)) + turn[None, :] + air.messages(n, len(owners))
        latest: Seconds = np.where(lost, asked, 0.0).max(axis=1, initial=0.0)
        return latest
