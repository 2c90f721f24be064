"""Simulate one scenario and judge it: the front door of this package."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio

from decentral.simulate.checker import Verdict, check
from decentral.simulate.scenario import Scenario
from decentral.simulate.trace import Trace
from decentral.simulate.virtual_time import run_in_virtual_time
from decentral.simulate.world import World, in_memory_folder

__all__ = ["Outcome", "simulate"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a simulated run; ``to_dict`` is the JSON of ``decentral simulate``."""

    scenario: Scenario
    trace: Trace
    verdict: Verdict
    hangs: tuple[str, ...]
    rounds: int  # outer steps of the chain in the end
    seconds: float  # of virtual time

    @property
    def sound(self) -> bool:
        """Whether every guarantee held and nothing hung."""
        return self.verdict.sound and not self.hangs

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        rested = list(self.trace.of("rested"))
        commits = sum(1 for commit in self.trace.commits.values() if commit.record.frames)
        return {
            "rounds": self.rounds,
            "commits": commits,
            "divergence": self.verdict.divergence,
            "lost_updates": self.verdict.lost_updates,
            "duplicated_updates": self.verdict.duplicated_updates,
            "hangs": len(self.hangs),
            "trace_hash": self.trace.hash,
            "bytes_per_peer": max((entry.fields["sent"] for entry in rested), default=0),
            "utilisation": self._utilisation(),
            "seconds": round(self.seconds, 3),
            "problems": [*self.verdict.problems, *self.hangs],
        }

    @property
    def join_seconds(self) -> float:
        """Median virtual seconds from the start of a process to its first training step; 0 when none started late."""
        began, took = {}, []
        for entry in self.trace:
            if entry.event == "started":
                began[entry.host, entry.life] = entry.time
            elif entry.event == "resumed" and entry.host:
                took.append(entry.time - began[entry.host, entry.life])
        return round(statistics.median(took), 3) if took else 0.0

    def _utilisation(self) -> float:
        rested = list(self.trace.of("rested"))
        started = {entry.host: entry.time for entry in self.trace.of("resumed")}  # the last life of each host
        shares = [e.fields["busy"] / max(e.time - started[e.host], 1e-9) for e in rested]
        return round(sum(shares) / len(shares), 4) if shares else 0.0


def simulate(scenario: Scenario) -> Outcome:
    """Run ``scenario`` under virtual time and judge it. A pure function of the scenario."""
    with in_memory_folder() as folder:
        return run_in_virtual_time(lambda: _run(scenario, Path(folder)), scenario.seed)


async def _run(scenario: Scenario, folder: Path) -> Outcome:
    trace = Trace(anyio.current_time)
    world = World(scenario, folder, trace)
    await world.run()
    verdict = check(trace, scenario.manifest, exact=scenario.exact)
    return Outcome(scenario, trace, verdict, tuple(world.hangs), world.reached, anyio.current_time())
