"""One machine as a forecast by rounds knows it: its line, its speed, when it is away, and where its training is."""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from decentral.simulate.by_rounds.absences import NEVER, Absence
from decentral.simulate.learning.training import StepPace
from decentral.simulate.scenario import Scenario

BEGINS = 1.5  # s from a swarm's start until its first members train
MANY = 10_000  # inner steps
RETURNS = 1.5  # s from the start of a process until it trains


@dataclass(frozen=True, slots=True)
class Boundary:
    """Where training stands after an inner step, or before the first one."""

    time: float
    since: int  # inner steps since the last contribution that a commit named
    sent: int | None = None  # of them, those behind the contribution in flight
    seconds: float = 0.0  # of the step
    open: bool = False  # whether the peer may contribute here


@dataclass(slots=True, eq=False)
class MachineModel:
    """Its training goes from one boundary to the next."""

    number: int
    up: float  # bytes/s
    down: float
    pace: StepPace
    absences: Iterator[Absence] = field(default_factory=lambda: iter(()))
    away: Absence = NEVER  # the next one, or that in which it is
    at: Boundary = Boundary(0.0, 0)
    enters: float = 0.0  # when it is a member, or asks to be one
    newcomer: bool = False  # nobody waits for it in its first round
    busy: float = 0.0  # s in inner steps
    awake: float = 0.0  # s of its lives before this one
    woke: float = 0.0
    generation: int = 0  # the round in which it came: what it has seen of the others is as old
    nbytes: float = 0.0  # of frames, that it sent
    been_away: list[Absence] = field(default_factory=list)
    _drawn: deque[float] = field(default_factory=deque)

    @property
    def name(self) -> bytes:
        """As others keep book of it."""
        return self.number.to_bytes(4, "big")

    @property
    def goes_at(self) -> float:
        """When it is away next; never, as long as it only sleeps."""
        return math.inf if self.away.asleep else self.away.begin

    def is_gone_by(self, time: float) -> bool:
        """Whether it has gone by then."""
        self.wakes_by(time)
        return self.away.begin < time

    def wakes_by(self, time: float) -> float:
        """When it has woken from what it sleeps by then."""
        woke = 0.0
        while self.away.asleep and self.away.begin < time:
            woke, self.away = self.away.end, next(self.absences)
        return woke

    def begin_troubles(self, absences: Iterator[Absence]) -> None:
        """From now on it is away now and then."""
        self.absences = absences
        self.away = next(absences)

    def step(self) -> Boundary | None:
        """One inner step; None where the machine crashes in it. What is in flight stays so."""
        seconds = self._drawn.popleft() if self._drawn else self.pace.next()
        now = self.at.time + seconds
        while self.away.begin < now:
            if not self.away.asleep:
                return None
            now = max(now, self.away.end)
            self.away = next(self.absences)
        self.busy += seconds
        self.at = Boundary(now, self.at.since + 1, self.at.sent, seconds)
        return self.at

    def skip(self, until: float) -> None:
        """Make most of the inner steps up to then at once, where they are many and nothing else happens."""
        steps = int((min(until, self.away.begin) - self.at.time) / self.pace.seconds) - MANY
        if steps > MANY and not self._drawn:
            seconds = steps * self.pace.seconds
            self.busy += seconds
            self.at = Boundary(self.at.time + seconds, self.at.since + steps, self.at.sent)

    def waited(self, until: float) -> None:
        """It made no inner step until then."""
        self.at = Boundary(max(self.at.time, until), self.at.since, self.at.sent)

    def merged(self, *, named: bool) -> None:
        """The commit that its contribution waited for is in the live model."""
        since = self.at.since - (self.at.sent or 0) if named else self.at.since
        self.at = Boundary(self.at.time, since, None, self.at.seconds, self.at.open)

    def back_to(self, place: Boundary, undone: Sequence[Boundary]) -> None:
        """The inner steps ``undone`` after ``place`` were not made yet; they will take as long."""
        self._drawn.extendleft(one.seconds for one in reversed(undone))
        self.busy -= sum(one.seconds for one in undone)
        self.at = place

    def crash(self, returns_after: float) -> None:
        """It goes, and is back ``returns_after`` seconds after the end of its absence, with no progress."""
        self.awake += max(0.0, self.away.begin - self.woke)
        self.enters = self.woke = self.away.end + returns_after
        self.at = Boundary(self.enters, 0)
        self.been_away.append(self.away)
        self.away = next(self.absences)

    def utilisation(self, now: float) -> float:
        """The share of its time until ``now`` in inner steps; those it makes afterwards do not count."""
        awake = self.awake + max(0.0, now - self.woke)
        ahead = max(0.0, self.at.time - now) if self.at.since else 0.0
        return max(0.0, self.busy - ahead) / awake if awake else 0.0


def machines_of(scenario: Scenario) -> list[MachineModel]:
    """Those of a scenario: lines and speeds as ``World`` draws them."""
    return [_drawn(scenario, number) for number in range(scenario.hosts)]


def _drawn(scenario: Scenario, number: int) -> MachineModel:
    profile = scenario.profile
    generator = random.Random(f"host {scenario.seed} {number}")
    seconds = scenario.step_seconds * generator.lognormvariate(0.0, profile.speed_spread)
    down = profile.bandwidth * generator.lognormvariate(0.0, profile.bandwidth_spread)
    straggles = profile.straggles / scenario.manifest.inner.steps
    pace = StepPace(generator, seconds, profile.jitter_spread, straggles)
    return MachineModel(number, down / profile.asymmetry, down, pace)
