"""A crash at every await point of a round: python -m tests.simulate.await_points

Three peers train in good weather. In every run one of them goes down just before some step that one of its tasks makes
in a round: the first step in the first run, the next in the next, until the round has no more of them, for each of the
three. Everything before the crash is the same in every run, so no point is missed and none is tried twice. By turns it
loses power or is killed, and comes back at once or only after its lease has ended.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import anyio
from trio.abc import Instrument
from trio.lowlevel import Task, add_instrument, remove_instrument

from decentral.simulate.scenario import PROFILES, Scenario
from decentral.simulate.simulation import simulate
from decentral.simulate.troubles import Afflicted
from tests.simulate.draws import LIMITS, toy_manifest

PEERS = 3
EXHAUSTED = ("gather", "reduce", "streaming")
_AWAY = (0.5, 6.0)  # s of virtual time; leases last 3


@dataclass(frozen=True, slots=True)
class Point:
    """Before which step of which peer; ``step`` 0: nowhere, for counting."""

    kind: str
    host: int
    step: int

    def __str__(self) -> str:
        return f"{self.kind}/{self.host}/{self.step}"

    @property
    def power(self) -> bool:
        """Whether power is cut, or only the process killed."""
        return self.step % 2 == 0

    @property
    def away(self) -> float:
        """Seconds until it is started again."""
        return _AWAY[self.step // 2 % 2]


@dataclass(eq=False)
class CrashAt(Instrument):
    """What befalls the swarm: one crash, at one point, in the second round after it has begun."""

    world: Afflicted
    point: Point
    steps: int = 0  # of that peer's tasks in that round
    struck: bool = False
    owners: dict[Task, bool] = field(default_factory=dict)

    async def run(self) -> None:
        """See Trouble."""
        self.first = self.world.furthest + 1
        self.host = self.world.hosts[self.point.host]
        add_instrument(self)
        try:
            while not self.struck:
                await anyio.sleep(0.1)
            await self.host.ended.wait()
            await anyio.sleep(self.point.away)
            self.world.start(self.host)
        finally:
            remove_instrument(self)

    def before_task_step(self, task: Task) -> None:
        """Called before every step of any task."""
        if self.struck or self.world.furthest != self.first or not self._is_its_own(task):
            return
        self.steps += 1
        if self.steps == self.point.step:
            self.struck = True
            self.host.crash(random.Random(self.steps) if self.point.power else None)

    def _is_its_own(self, task: Task) -> bool:
        if task not in self.owners:
            parent = None if task.parent_nursery is None else task.parent_nursery.parent_task
            self.owners[task] = id(task) == self.host.task or (parent is not None and self._is_its_own(parent))
        return self.owners[task]


def scenario(kind: str) -> Scenario:
    """Three peers that would train in peace."""
    calm = replace(PROFILES["lab"], crashes=0.0)
    manifest = toy_manifest(kind, 1, {**LIMITS, "lease": 3.0, "shrink_after": 30.0})
    return Scenario(manifest, calm, seed=1, hosts=PEERS, rounds=4, lesson="noise" if kind == "streaming" else "marks")


def tried(point: Point) -> tuple[Point, int, list[str]]:
    """The point, the steps that its peer made in the round, and what was wrong."""
    crashes: list[CrashAt] = []

    def afflict(world: Afflicted) -> CrashAt:
        crashes.append(CrashAt(world, point))
        return crashes[0]

    outcome = simulate(scenario(point.kind), afflict)
    problems = outcome.to_dict()["problems"]
    if crashes[0].struck != (point.step > 0):
        problems.append("the crash never came")
    return point, crashes[0].steps, problems


def points(kind: str, every: int = 1) -> Iterator[Point]:
    """All of them, or every so many."""
    for host in range(PEERS):
        _, steps, problems = tried(Point(kind, host, 0))
        assert not problems, f"{kind} fails without a crash: {problems}"
        for step in range(1, steps + 1, every):
            yield Point(kind, host, step)


def main(arguments: list[str] | None = None) -> int:
    """1 when a crash at some point broke something."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", type=int, default=1, help="try one of so many points")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--only", choices=EXHAUSTED, help="one kind of exchange")
    parser.add_argument("--point", metavar="KIND/HOST/STEP", help="one point, once more")
    options = parser.parse_args(arguments)
    began = time.monotonic()
    if options.point:
        kind, host, step = options.point.split("/")
        todo = [Point(kind, int(host), int(step))]
    else:
        kinds = (options.only,) if options.only else EXHAUSTED
        todo = [point for kind in kinds for point in points(kind, options.every)]
    failed = 0
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        for point, _, problems in pool.imap_unordered(tried, todo, chunksize=8):
            if problems:
                failed += 1
                print(f"{point}: {problems}", file=sys.stderr, flush=True)
    print(json.dumps({"points": len(todo), "failed": failed, "seconds": round(time.monotonic() - began, 1)}))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
