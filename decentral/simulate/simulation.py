"""Simulate one scenario and judge it: the front door of this package."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import anyio

from decentral.consensus.chain import contributions
from decentral.simulate.checker import check
from decentral.simulate.learning import student
from decentral.simulate.machine.virtual_time import run_in_virtual_time
from decentral.simulate.scenario import Scenario
from decentral.simulate.trace import Entry, Trace
from decentral.simulate.troubles import Afflict, Troubles
from decentral.simulate.verdict import Verdict
from decentral.simulate.world import Progress, World, in_memory_folder

__all__ = ["Outcome", "simulate"]

GARBAGE_EVERY = 100_000  # objects more than were freed; Python's own is 700


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a simulated run; ``to_dict`` is the JSON of ``decentral simulate``."""

    scenario: Scenario
    trace: Trace
    verdict: Verdict
    hangs: tuple[str, ...]
    rounds: int  # outer steps of the chain when the faults ended
    seconds: float  # of virtual time until then

    @property
    def sound(self) -> bool:
        """Whether every guarantee held and nothing hung."""
        return self.verdict.sound and not self.hangs

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON: figures of the rounds that were asked for, and problems of these and of the calm after them."""
        written = {entry.fields["hash"] for entry in self._until_the_calm("logged")}
        records = [commit.record for name, commit in self.trace.commits.items() if name in written]
        named = [len(contributions(record)) for record in records if record.frames]
        spent = [entry.fields for entry in self.trace.of("spent")]
        return {
            "rounds": self.rounds,
            "commits": len(named),
            "contributors": round(statistics.fmean(named), 2) if named else 0.0,
            **self._paired(),
            "divergence": self.verdict.divergence,
            "lost_updates": self.verdict.lost_updates,
            "duplicated_updates": self.verdict.duplicated_updates,
            "hangs": len(self.hangs),
            "trace_hash": self.trace.hash,
            "bytes_per_peer": max((fields["sent"] for fields in spent), default=0),
            "utilisation": round(statistics.fmean(_busy(fields) for fields in spent), 4) if spent else 0.0,
            "seconds": round(self.seconds, 3),
            "seconds_per_round": self.seconds_per_round,
            **self._learnt(),
            "problems": [*self.verdict.problems, *self.hangs],
        }

    @property
    def seconds_per_round(self) -> float | None:
        """Median virtual seconds from one outer step to the next, each when the first peer has made it; None of one.

        The median, since the first rounds know no uplink yet, and a swarm that newcomers catch up with is slower.
        """
        pairs = self.scenario.manifest.exchange.kind == "pair"
        made: dict[int, float] = {}
        for entry in self._until_the_calm("swapped" if pairs else "logged"):
            if pairs or self.trace.commits[entry.fields["hash"]].record.frames:
                made.setdefault(entry.fields["round"], entry.time)
        took = [after - before for before, after in pairwise(sorted(made.values()))]
        return round(statistics.median(took), 3) if took else None

    @property
    def join_seconds(self) -> float:
        """Median virtual seconds from the start of a process to its first training step; 0 when none started late."""
        began, took = {}, []
        for entry in self.trace:
            if entry.time > self.seconds:
                break
            if entry.event == "started":
                began[entry.host, entry.life] = entry.time
            elif entry.event == "resumed" and entry.host:
                took.append(entry.time - began[entry.host, entry.life])
        return round(statistics.median(took), 3) if took else 0.0

    def _learnt(self) -> dict[str, Any]:
        """The loss of the anchor over time, and of one median peer that trained alone as long, with the inner steps of
        both; {} if nobody learnt. Alone, a peer waits for nobody and is never down: it makes more steps in that time.

        Gossip has no anchor: there it is the model of the first peer that has made a step.
        """
        curve: dict[int, list[float]] = {}
        kind = self.scenario.manifest.exchange.kind
        for entry in self._until_the_calm("swapped" if kind == "pair" else "applied"):
            if entry.fields.get("loss") is not None:
                curve.setdefault(entry.fields["round"], [entry.time, round(entry.fields["loss"], 5)])
        if not curve:
            return {}
        fragments = self.scenario.manifest.outer.fragments
        points = [[0.0, round(student.alone(fragments, 0), 5)], *(curve[number] for number in sorted(curve))]
        steps, alone = self._steps_per_peer(points[-1][0]), int(points[-1][0] / self.scenario.step_seconds)
        lost = student.alone(fragments, alone, self.scenario.manifest.inner)
        lone = {"loss_alone": round(lost, 5), "steps_alone": alone}
        return {"loss": points[-1][1], "steps": steps, **lone, "loss_curve": points}

    def _paired(self) -> dict[str, int]:
        """Gossip only, which commits no round: pairs that were merged, and steps that a peer took alone."""
        if self.scenario.manifest.exchange.kind != "pair":
            return {}
        partners = [entry.fields["partner"] for entry in self._until_the_calm("swapped")]
        alone = partners.count(None)
        return {"pairs": (len(partners) - alone + 1) // 2, "unpaired": alone}  # both of a pair tell of it

    def _steps_per_peer(self, until: float) -> int:
        """Inner steps that a peer made by then, on average."""
        return round(sum(entry.time <= until for entry in self.trace.of("stepped")) / self.scenario.hosts)

    def _until_the_calm(self, event: str) -> Iterator[Entry]:
        return (entry for entry in self.trace.of(event) if entry.time <= self.seconds)


def _busy(spent: Mapping[str, float]) -> float:
    """The share of a peer's time in inner steps."""
    return spent["busy"] / spent["awake"] if spent["awake"] else 0.0


def simulate(scenario: Scenario, afflict: Afflict = Troubles, on_progress: Progress = lambda share: None) -> Outcome:
    """Run ``scenario`` under virtual time and judge it. A pure function of its first two arguments.

    ``afflict``: what befalls the machines; what the scenario's profile has in store unless told otherwise.
    ``on_progress``: is told now and then which share of the outer steps is made.
    """
    with in_memory_folder() as folder, _few_collections():
        return run_in_virtual_time(lambda: _run(scenario, Path(folder), afflict, on_progress), scenario.seed)


@contextmanager
def _few_collections() -> Iterator[None]:
    """What happened stays to the end, and every look for garbage goes through it: a third of the time, for nothing."""
    before = gc.get_threshold()
    gc.set_threshold(GARBAGE_EVERY, 50, 1000)
    try:
        yield
    finally:
        gc.set_threshold(*before)


async def _run(scenario: Scenario, folder: Path, afflict: Afflict, on_progress: Progress) -> Outcome:
    trace = Trace(anyio.current_time)
    world = World(scenario, folder, trace, afflict, on_progress)
    await world.run()
    verdict = check(trace, scenario.manifest, scenario.lesson, scenario.seats)
    calm = next(trace.of("calm")).time
    return Outcome(scenario, trace, verdict, tuple(world.hangs), world.reached, calm)
