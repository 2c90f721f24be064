"""A forecast of a run, reckoned round by round: seconds for hundreds of peers, where messages take minutes for 64.

Nothing of the protocol is run, and so nothing checked. docs/simulation.md has how far both forecasts differ.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from decentral.errors import ConfigError
from decentral.manifest import Manifest
from decentral.simulate import cost
from decentral.simulate.by_rounds.gossip import Gossiping
from decentral.simulate.by_rounds.machine import (
    BEGINS,
    RETURNS,
    Absence,
    MachineModel,
    RoundWork,
    StepTimes,
    absences,
    machines_of,
    offers_of,
    work_of,
)
from decentral.simulate.by_rounds.one_round import Memory, Round
from decentral.simulate.scenario import Scenario
from decentral.simulate.world import Progress
from decentral.training import round_cost
from decentral.training.round_time import body_of
from decentral.wire.keys import Signer
from decentral.wire.messages import Lease, seal_lease

__all__ = ["check_by_rounds", "forecast_by_rounds", "is_by_rounds"]

PROFILES_OF = {  # where it was held against the other forecast; elsewhere what comes of lost messages decides
    "gather": ("lab", "home", "spot", "cliff", "even"),
    "reduce": ("lab", "spot", "even"),
    "pair": ("lab", "even"),
}


def is_by_rounds(manifest: Manifest, profile: str) -> bool:
    """Return whether there is such a forecast for these terms and machines."""
    has_pace = manifest.inner.pace not in (None, "equal")
    return profile in PROFILES_OF[manifest.exchange.kind] and not has_pace


def check_by_rounds(manifest: Manifest, profile: str, *, learn: bool) -> None:
    """Raise ConfigError where there is none, and of what is learnt."""
    if learn:
        raise ConfigError("--by rounds trains no model; --learn wants --by messages")
    if not is_by_rounds(manifest, profile):
        kind, known = manifest.exchange.kind, ", ".join(PROFILES_OF[manifest.exchange.kind])
        raise ConfigError(
            f"--by rounds: a {kind} is reckoned so on {known}, and with equal steps of all; use --by messages"
        )


def forecast_by_rounds(scenario: Scenario, num_parameters: int, on_progress: Progress) -> dict[str, Any]:
    """Plain JSON, as ``decentral simulate --by rounds`` prints it."""
    manifest = scenario.manifest
    nbytes = body_of(manifest, num_parameters, scenario.hosts)
    gossips = manifest.exchange.kind == "pair"
    swarm = (Gossiping if gossips else Rounds)(scenario, nbytes)
    told = swarm.run(on_progress)
    seconds, machines = max(told.times, default=0.0), swarm.machines
    more = besides(scenario, told, num_parameters, nbytes, machines)
    pairs = {"pairs": told.named.count(2), "unpaired": told.named.count(1)} if gossips else {}
    return {
        "rounds": told.reached,
        "commits": 0 if gossips else len(told.times),
        "contributors": 0.0 if gossips else round(statistics.fmean(told.named or [0]), 2),
        **pairs,
        "bytes_per_peer": round(max(machine.nbytes for machine in machines) + more),
        "utilisation": round(statistics.fmean(machine.utilisation(seconds) for machine in machines), 4),
        "seconds": round(seconds, 3),
        "seconds_per_round": told.seconds_per_round,
        "parameters": num_parameters,
    }


# ---- rounds of a gather or a reduce ----
#
# Who is there, from where each trains on, who is named.

TRIES = 100  # rounds that are begun, for each that is made: on machines that are away more often than a round lasts
ENTERS = 1.5  # s until a peer that asks to be let in is a member
EXPIRES = 20.0  # s until the lease of one that went has run out, and half as long again, of which a part was over


class Rounds:
    """The rounds of one scenario. ``run`` them once."""

    def __init__(self, scenario: Scenario, nbytes: float) -> None:
        """``nbytes``: of the body of a contribution."""
        self.scenario, self.machines = scenario, machines_of(scenario)
        self.told, self._memory = StepTimes(), Memory.of(scenario, nbytes)
        self._nbytes = 0.0 if scenario.manifest.exchange.kind == "reduce" else nbytes  # that an offer waits for
        self._interval = scenario.manifest.inner.steps // scenario.manifest.outer.fragments
        self._opened = dict.fromkeys(self.machines, BEGINS)
        self._named: set[MachineModel] = set()
        self._last = BEGINS  # when the round before was committed

    def run(self, on_progress: Callable[[float], None]) -> StepTimes:
        """All of them, or those that are made before it has taken too long."""
        rounds, longest = self.scenario.rounds, self.scenario.patience * self.scenario.rounds
        for _ in range(TRIES * rounds):
            if self.told.reached == rounds or self._last > longest:
                break
            self._try_a_round()
            on_progress(self.told.reached / rounds)
        return self.told

    def _try_a_round(self) -> None:
        works = self._works()
        heard_after, copies = float(self._memory.air.delays(1)[0]), self._nbytes * (len(works) - 1)
        offers = offers_of(works, self._memory.deadlines, self._interval, heard_after, copies)
        if not offers:
            return self._all_go(works)
        made = Round(self._memory, self.told.reached + 1, works, offers)
        if made.is_lost:
            return self._lose(made)
        self._settle(made)
        if self.told.reached == 1:
            self._begin_troubles()

    def _begin_troubles(self) -> None:
        profile, seed, seconds = self.scenario.profile, self.scenario.seed, self.scenario.round_seconds
        for machine in self.machines:
            machine.begin_troubles(absences(profile, seed, machine.number, seconds, self._last))

    def _all_go(self, works: list[RoundWork]) -> None:
        """Everybody goes before there is an offer: the next round is of those who return first."""
        for work in works:
            self._goes(work.machine)
        self._last = min(machine.enters for machine in self.machines) + ENTERS

    def _works(self) -> list[RoundWork]:
        """Return the work of peers that are members, or will be before the first of them offers."""
        works = [self._work(machine) for machine in self.machines if machine.enters <= self._last]
        first = min((work.made[-1].time for work in works if not work.crashed), default=self._last)
        late = [machine for machine in self.machines if self._last < machine.enters <= first - ENTERS]
        return works + [self._work(machine) for machine in late]

    def _work(self, machine: MachineModel) -> RoundWork:
        if machine not in self._opened:
            self._returns(machine)
        overlap, named = self.scenario.manifest.outer.overlap, machine in self._named
        return work_of(machine, self._opened[machine], self._interval, overlap, named=named)

    def _returns(self, machine: MachineModel) -> None:
        """Nobody waits for it in its first round, if a record went without it: else it was a member all the time."""
        machine.generation = len(self.told.times)
        away = machine.been_away[-1]
        missed_from = away.begin + (0.0 if away.graceful else EXPIRES)
        machine.newcomer = away.forgets or any(missed_from <= at <= machine.enters for at in self.told.times)
        self._opened[machine] = machine.enters + (ENTERS if machine.newcomer else 0.0)

    def _settle(self, made: Round) -> None:
        """The round is committed: everybody goes on from where its training is when it hears of that."""
        decided = made.decide()
        self._last, self._named = decided.at, decided.named
        self.told.times.append(decided.at)
        self.told.reached += 1
        self.told.named.append(len(decided.named))
        for work, when in zip(made.works, decided.applied, strict=True):
            machine = work.machine
            self._opened[machine], machine.newcomer = when, False
            is_late = machine.at.sent is None or machine.at.time > when
            if is_late and not work.crashed:
                work.until(when)
            if machine.is_gone_by(when):
                self._goes(machine)
            else:
                self._opened[machine] = max(when, machine.wakes_by(when))

    def _lose(self, made: Round) -> None:
        """Everybody who offered went before its frame was there: the others train on."""
        self._last = max(offer.machine.goes_at for offer in made.offers)
        self._named = set()
        for work in made.works:
            if work.crashed or work.machine.is_gone_by(self._last) or work.machine.goes_at <= self._last:
                self._goes(work.machine)
            else:
                work.until(self._last)

    def _goes(self, machine: MachineModel) -> None:
        self._opened.pop(machine, None)
        machine.crash(RETURNS)


# ---- bytes besides frames ----
#
# What a peer says about rounds and who is here, and sends of what others missed.

_SIGNER = Signer(bytes(32))
LEASE = seal_lease(
    Lease(bytes(32), _SIGNER.peer, 1, 15, ("/memory/" + "0" * 52,), 1, 1, bytes(32), 0, 1, "0.1.0"), _SIGNER
)
RENEWALS = 3  # in the life of a lease
SNAPSHOT = 3.34  # bytes per parameter, packed; see docs/cost.md


def besides(scenario: Scenario, told: StepTimes, numel: int, nbytes: float, spent: Sequence[MachineModel]) -> float:
    """Bytes of one of ``spent`` until the last outer step; ``nbytes``: of a frame, ``numel``: of the model."""
    n, kind, seconds = scenario.hosts, scenario.manifest.exchange.kind, max(told.times, default=0.0)
    directory = cost.renewal(n, LEASE).nbytes * RENEWALS * seconds / scenario.manifest.swarm.lease
    votes = 0.0 if kind == "pair" else round_cost.control(kind, n, numel).nbytes * len(told.times)
    absences = [away for machine in spent for away in machine.been_away if away.end < seconds]
    return directory + votes + sum(_missed_nbytes(away, told, numel, nbytes) for away in absences) / n


def _missed_nbytes(away: Absence, told: StepTimes, numel: int, nbytes: float) -> float:
    """Return the bytes that the others send a machine that was away: the frames of the rounds since, or all of the
    model where that is less, or where it has forgotten all.
    """
    passed = sum(named for at, named in zip(told.times, told.named, strict=False) if away.begin < at < away.end)
    return SNAPSHOT * numel if away.forgets else min(SNAPSHOT * numel, passed * nbytes)
