"""When a machine is away: the same draws as of the machines on which every message is simulated, see ``Troubles``."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

from decentral.simulate.profiles import Profile


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
    """Those of machine ``number`` from ``begin`` on, in order; they do not end."""
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
