"""A machine as a forecast by rounds knows it: its line, its speed, when it is away, where its training is, and what it
offers to a round.
"""

from __future__ import annotations

import math
import random
import statistics
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from decentral.consensus.machine import TICK
from decentral.consensus.timing import Deadline
from decentral.simulate.scenario import Profile, Scenario
from decentral.simulate.training import StepPace

# ---- absences ----
#
# The same draws as of the machines on which every message is simulated, see ``Troubles``.


@dataclass(frozen=True, slots=True)
class Absence:
    """Seconds of virtual time in which a machine does nothing."""

    begin: float
    end: float
    asleep: bool = False  # the lid was closed: its process goes on afterwards
    graceful: bool = False  # it said goodbye
    forgets: bool = False  # it comes back with a new key and an empty disk


NEVER = Absence(math.inf, math.inf)


def absences(profile: Profile, seed: int, number: int, round_seconds: float, begin: float) -> Iterator[Absence]:
    """Yield the absences of machine ``number`` from ``begin`` on, in order; they do not end."""
    generator, now = random.Random(f"trouble {seed} {number}"), begin
    while profile.crashes or profile.sleeps:
        now += round_seconds * generator.uniform(0.5, 1.5)
        generator.random()  # whether its disk is copied, which takes no time
        if generator.random() < profile.sleeps:
            woke = now + generator.uniform(1.0, 30.0)
            yield Absence(now, woke, asleep=True)
            now = woke
        if generator.random() < profile.crashes:
            gone = _until_it_returns(profile, generator, number, now)
            yield gone
            now = gone.end
    yield NEVER


def _until_it_returns(profile: Profile, generator: random.Random, number: int, now: float) -> Absence:
    graceful = generator.random() < profile.graceful
    if not graceful:
        generator.random()  # whether it costs what was not synced
    away = profile.away * generator.lognormvariate(0.0, 1.0)
    if generator.random() >= profile.returns and number:
        away += 10 * profile.away
    forgets = generator.random() < profile.new_identity and number > 0
    return Absence(now, now + away, graceful=graceful, forgets=forgets)


# ---- the machine and its line ----

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
        """Return whether it has gone by then."""
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
        """Make one inner step; None where the machine crashes in it. What is in flight stays so."""
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

    def wait(self, until: float) -> None:
        """It made no inner step until then."""
        self.at = Boundary(max(self.at.time, until), self.at.since, self.at.sent)

    def merge(self, *, named: bool) -> None:
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
    """Return the machines of a scenario: lines and speeds as ``World`` draws them."""
    return [_machine_drawn(scenario, number) for number in range(scenario.hosts)]


def _machine_drawn(scenario: Scenario, number: int) -> MachineModel:
    profile = scenario.profile
    generator = random.Random(f"host {scenario.seed} {number}")
    seconds = scenario.step_seconds * generator.lognormvariate(0.0, profile.speed_spread)
    down = profile.bandwidth * generator.lognormvariate(0.0, profile.bandwidth_spread)
    straggles = profile.straggles / scenario.manifest.inner.steps
    pace = StepPace(generator, seconds, profile.jitter_spread, straggles)
    return MachineModel(number, down / profile.asymmetry, down, pace)


# ---- training and offers in a round ----
#
# All of its inner steps, or what a peer has when others wait.


@dataclass(frozen=True, slots=True)
class RoundWork:
    """A peer's training in one round, from ``start`` to a full contribution or a crash."""

    machine: MachineModel
    opened: float  # when it could contribute to the round
    start: Boundary
    made: list[Boundary]
    crashed: bool

    def until(self, time: float) -> None:
        """Take back what is made later: a commit came before."""
        past = [one for one in self.made if one.time <= time]
        self.machine.back_to(past[-1] if past else self.start, self.made[len(past) :])


@dataclass(frozen=True, slots=True)
class Offering:
    """A peer's contribution to a round."""

    work: RoundWork
    time: float
    full: bool

    @property
    def machine(self) -> MachineModel:
        """Whose it is."""
        return self.work.machine


def work_of(machine: MachineModel, opened: float, interval: int, overlap: int, *, named: bool) -> RoundWork:
    """Let it train until it has a full contribution to the round that is open for it since ``opened``.

    ``named``: whether the commit that opened it names what the machine had in flight.
    """
    if machine.at.sent is not None and not overlap:  # it waits for that commit
        machine.wait(opened)
        machine.merge(named=named)
    machine.skip(opened)
    start, made = machine.at, list[Boundary]()
    while not made or not (made[-1].open and made[-1].since >= interval):
        if machine.step() is None:
            return RoundWork(machine, opened, start, made, crashed=True)
        if machine.at.time >= opened:
            if machine.at.sent is not None and machine.at.since - machine.at.sent >= overlap:
                machine.merge(named=named)
            is_open = machine.at.sent is None and machine.at.since > 0
            machine.at = replace(machine.at, open=is_open)
        made.append(machine.at)
    return RoundWork(machine, opened, start, made, crashed=False)


class Hurry:
    """When peers that are slower offer what they have: known better with every full contribution that comes.

    Those that came in one round have seen the same, and are of one mind.
    """

    def __init__(self, deadlines: Deadlines, works: Sequence[RoundWork]) -> None:
        self._deadlines, self._opened = deadlines, min((work.opened for work in works), default=0.0)
        self._generations = {work.machine.generation for work in works}
        self._first: float | None = None
        self._told = defaultdict[int, list[tuple[float, float]]](list)  # since when it is known by when to offer

    def note(self, offer: float, there: float, opened: float) -> None:
        """A full contribution was offered, and was there; to a peer for which the round was ``opened`` then."""
        self._first, is_first = (offer, True) if self._first is None else (self._first, False)
        for generation in self._generations:
            deadline, told = self._deadlines.of(generation), self._told[generation]
            if is_first:
                told.append((offer, deadline.early_at(self._opened, self._first)))
            deadline.observe(there - opened)
            told.append((there, deadline.early_at(self._opened, self._first)))

    def by(self, generation: int, time: float) -> float:
        """By when one should offer, as is known at ``time``; never, while nobody has offered all steps."""
        return next((early for since, early in reversed(self._told[generation]) if since <= time), math.inf)


class Deadlines:
    """Waiting times that peers have learnt from how late others came in their rounds."""

    def __init__(self, floor: float, ceiling: float) -> None:
        self._limits = floor, ceiling
        self._of = dict[int, Deadline]()

    def of(self, generation: int) -> Deadline:
        """Theirs."""
        return self._of.setdefault(generation, Deadline(*self._limits))


def offers_of(
    works: Sequence[RoundWork], deadlines: Deadlines, interval: int, heard_after: float, copies: float
) -> list[Offering]:
    """Return their offers; a peer that is slower than the others by more than they wait offers what it has in time.

    ``heard_after``: seconds until an offer is heard of; ``copies``: bytes that each sends to have its frame everywhere.
    """
    hurry, offers = Hurry(deadlines, works), list[Offering]()
    for work in sorted(works, key=lambda work: work.made[-1].time if work.made else math.inf):
        offer = _offer(work, hurry, interval)
        if offer is not None:
            offers.append(offer)
            if offer.full:
                heard = offer.time + heard_after
                hurry.note(heard, heard + copies / offer.machine.up, work.opened)
    return offers


def _offer(work: RoundWork, hurry: Hurry, interval: int) -> Offering | None:
    for place, one in enumerate(work.made):
        full = one.since >= interval
        if one.open and (full or hurry.by(work.machine.generation, one.time) - one.time <= one.seconds + TICK / 2):
            work.machine.back_to(replace(one, sent=one.since), work.made[place + 1 :])
            del work.made[place + 1 :]
            return Offering(work, one.time, full)
    return None


# ---- times of all steps ----


@dataclass(slots=True)
class StepTimes:
    """Times of a forecast: of each outer step, or of the gossip steps of the first peer."""

    times: list[float] = field(default_factory=list)  # s
    reached: int = 0  # outer steps; in gossip peers leave some out
    named: list[int] = field(default_factory=list)  # contributors of each round; of gossip 2 for each pair, else 1

    @property
    def seconds_per_round(self) -> float | None:
        """Median seconds from one to the next; None of one."""
        took = [after - before for before, after in pairwise(self.times)]
        return round(statistics.median(took), 3) if took else None
