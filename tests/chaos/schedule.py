"""What happens to whom and when: a list made from a seed alone, before anything runs.

The plan keeps a majority up: a victim counts as away from its fault until it has had time to come back, and no fault
is planned while as many as a minority are away. The exception is planned, too: now and then everybody dies at once.
The first ``num_elders`` peers are never killed but then, so that there are processes that live long enough to leak.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

EVERYBODY = "everybody"
SETTLE = 3.0  # s that a peer takes to be back after it was started: measured 1 to 3 on two shared cores
WARM_UP = 15.0  # s before the first fault
QUIET = 8.0  # s without faults before everybody dies, so that all are there to be killed
RECOVERY = 25.0  # s without faults after it


@dataclass(frozen=True, slots=True)
class Fault:
    """One planned fault. ``seconds`` is how long it lasts: down, stopped, full; or by how much the clock jumps."""

    at: float  # s since the swarm is up
    kind: str
    victim: int  # -1: everybody
    seconds: float


@dataclass(frozen=True, slots=True)
class Kind:
    """How often a fault is drawn and how long it lasts."""

    name: str
    weight: float
    shortest: float  # s
    longest: float  # s
    settle: float = SETTLE  # s after its end before the peer counts as back
    spares_elders: bool = True
    needs_small_disk: bool = False


KINDS = (
    Kind("kill", 44, 0.1, 2.0),
    Kind("kill_daemon", 44, 0.0, 0.0, settle=2.0, spares_elders=False),
    Kind("stop", 5, 0.5, 12.0, spares_elders=False),
    Kind("stop_daemon", 4, 0.5, 8.0, spares_elders=False),
    Kind("sleep", 0.5, 70.0, 80.0, settle=10.0),
    Kind("disk_full", 2, 4.0, 8.0, settle=6.0, needs_small_disk=True),
    Kind("clock", 3, -7200.0, 7200.0, settle=0.0, spares_elders=False),
    Kind("corrupt_checkpoint", 3, 0.1, 1.0, settle=6.0),
    Kind("cut_journal", 3, 0.1, 1.0, settle=6.0),
    Kind("leave", 2, 0.1, 2.0),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What the schedule is drawn from."""

    seed: int
    seconds: float
    num_peers: int = 7
    num_elders: int = 2
    small_disks: tuple[int, ...] = ()  # peers that can run out of space
    every: float = 1.2  # s between two faults, on average
    everybody_every: float = 600.0  # s between two deaths of everybody; 0: never


class Calendar:
    """Who is away until when, in the plan."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.away_until = [0.0] * plan.num_peers
        self.most_away = (plan.num_peers - 1) // 2

    def free_at(self, now: float) -> float:
        """When at the earliest one more may be away."""
        later = sorted((end for end in self.away_until if end > now), reverse=True)
        return now if len(later) < self.most_away else later[self.most_away - 1]

    def victims(self, kind: Kind, now: float) -> list[int]:
        """Who may be hit by ``kind`` now."""
        plan = self.plan
        peers = range(plan.num_elders if kind.spares_elders else 0, plan.num_peers)
        here = [peer for peer in peers if self.away_until[peer] <= now]
        return [peer for peer in here if peer in plan.small_disks] if kind.needs_small_disk else here


def draw(plan: Plan) -> list[Fault]:
    """The schedule of ``plan``, in order of time. The same plan gives the same schedule."""
    chance = random.Random(plan.seed)
    faults: list[Fault] = []
    calendar, now = Calendar(plan), WARM_UP
    everybody = deaths_of_everybody(plan, chance)
    while now < plan.seconds:
        if everybody and now >= everybody[0] - QUIET:
            at = max(everybody.pop(0), *calendar.away_until)
            faults.append(Fault(round(at, 3), EVERYBODY, -1, round(chance.uniform(0.2, 3.0), 3)))
            now = at + RECOVERY
            continue
        fault = _one(calendar, chance, now)
        if fault is not None:
            faults.append(fault)
        now = calendar.free_at(now + max(0.2, chance.expovariate(1 / plan.every)))
    return [fault for fault in faults if fault.at < plan.seconds]


def deaths_of_everybody(plan: Plan, chance: random.Random) -> list[float]:
    """At least one in a run of two minutes or more, the last with time to recover."""
    never = not plan.everybody_every or plan.seconds < 120
    number = 0 if never else max(1, round(plan.seconds / plan.everybody_every))
    span = plan.seconds / (number + 1) if number else 0.0
    return [span * (n + 1) + chance.uniform(-0.2, 0.2) * min(span, 60.0) for n in range(number)]


def _one(calendar: Calendar, chance: random.Random, now: float) -> Fault | None:
    kind = chance.choices(KINDS, [kind.weight for kind in KINDS])[0]
    victims = calendar.victims(kind, now)
    if not victims:
        return None
    victim = chance.choice(victims)
    seconds = chance.uniform(kind.shortest, kind.longest)
    calendar.away_until[victim] = now + max(0.0, seconds if kind.name != "clock" else 0.0) + kind.settle
    return Fault(round(now, 3), kind.name, victim, round(seconds, 3))


def kinds_of(faults: Sequence[Fault]) -> dict[str, int]:
    """How many of each kind."""
    return {name: sum(fault.kind == name for fault in faults) for name in dict.fromkeys(f.kind for f in faults)}
