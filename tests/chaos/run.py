"""Real peers, real daemons, real signals, for so many minutes: does the swarm go on, agree, and stay small?

    python -m tests.chaos.run --minutes 10 --seed 1 --json chaos.json

Who is hit by what and when follows from the seed alone; how the processes interleave does not, so the same seed
replays the schedule and not the run. Ends with 1 when anything is wrong, one line for each.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from decentral.errors import DiskError
from tests.chaos import faults
from tests.chaos.arena import Arena
from tests.chaos.checker import Judgement, Observed, judge
from tests.chaos.disks import mounted_below, small_disk
from tests.chaos.evidence import Evidence
from tests.chaos.nursery import Nursery
from tests.chaos.report import table
from tests.chaos.schedule import Plan, draw
from tests.chaos.subject import SMALL_DISK
from tests.chaos.terms import terms
from tests.kit.processes import daemon_of

READ_EVERY = 20.0  # s between two readings of the journals, which are cut to their last 1,024 records or more
ALL_UP = 180.0  # s for all peers to be there at the beginning


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--peers", type=int, default=7, choices=range(3, 9))
    parser.add_argument("--elders", type=int, default=2, help="peers that die only when everybody does")
    parser.add_argument("--every", type=float, default=1.2, help="seconds between two faults")
    parser.add_argument(
        "--everybody-every", type=float, default=1800.0, help="seconds between two deaths of everybody; 0: never"
    )
    parser.add_argument("--preset", default="sparseloco", help="algorithm: sparseloco, diloco, streaming")
    parser.add_argument("--pause", type=float, default=0.1, help="seconds between two inner steps")
    parser.add_argument("--small-disks", type=int, default=2, help="peers that can run out of space; 0 without root")
    parser.add_argument("--out", type=Path, default=None, help="kept, also when all is well; else a temporary folder")
    parser.add_argument("--json", type=Path, default=None, help="where to write the figures")
    return parser.parse_args()


def plan_of(given: argparse.Namespace) -> Plan:
    return Plan(
        seed=given.seed,
        seconds=60 * given.minutes,
        num_peers=given.peers,
        num_elders=given.elders,
        small_disks=tuple(range(given.peers))[given.peers - given.small_disks :],
        every=given.every,
        everybody_every=given.everybody_every,
    )


def torment(given: argparse.Namespace, out: Path) -> Judgement:
    """Run the schedule and judge what is left."""
    plan, evidence = plan_of(given), Evidence()
    with ExitStack() as stack:
        for number in plan.small_disks:
            folder = out / f"peer{number}"
            folder.mkdir(exist_ok=True)
            stack.enter_context(small_disk(folder, SMALL_DISK))
        nursery = stack.enter_context(Nursery(out))
        arena = Arena(out, nursery, terms(given.preset, given.seed), given.pause)
        arena.settle_in(plan.num_peers, plan.small_disks)
        began = _all_up(arena)
        for fault in draw(plan):
            arena.at(began + fault.at, lambda fault=fault: faults.apply(arena, fault))  # type: ignore[misc]
        arena.sample_forever()
        _read_forever(arena, evidence)
        arena.go_on(lambda: False, began + plan.seconds)
        ended = time.monotonic()
        daemons = [daemon_of(subject.pid) for subject in arena.running() if subject.pid is not None]
        arena.end()
        strays = _strays(nursery)
        _read(arena, evidence)
        arena.keep()
    observed = Observed(evidence, arena.log, began, ended, arena.samples, arena.surprises, strays, mounted_below(out))
    judgement = judge(observed)
    judgement.figures |= {"seconds": round(ended - began, 1), "daemons_at_the_end": len(daemons)}
    return judgement


def _all_up(arena: Arena) -> float:
    """Start the founder, then the others; the torment begins when all have committed together."""
    for subject in arena.subjects:
        arena.after(2.0 * subject.number, lambda one=subject: arena.start(one))  # type: ignore[misc]
    evidence = Evidence()

    def everybody_commits() -> bool:
        for subject in arena.subjects:
            evidence.read_events(subject.name, subject.folder)
        return all(any(row["event"] == "commit" for row in rows) for rows in evidence.events.values())

    if not arena.go_on(everybody_commits, time.monotonic() + ALL_UP):
        arena.surprises.append(f"not all peers committed within {ALL_UP:g} s of the start")
    return time.monotonic()


def _read(arena: Arena, evidence: Evidence) -> None:
    for subject in arena.subjects:
        evidence.read_journal(subject.name, subject.folder / "journal")
        evidence.read_events(subject.name, subject.folder)


def _read_forever(arena: Arena, evidence: Evidence) -> None:
    for subject in arena.subjects:
        evidence.read_journal(subject.name, subject.folder / "journal")
    arena.after(READ_EVERY, lambda: _read_forever(arena, evidence))


def _strays(nursery: Nursery) -> list[str]:
    """What outlives the peers by more than 5 s."""
    end = time.monotonic() + 5.0
    while (strays := nursery.others(set())) and time.monotonic() < end:
        nursery.ended(0.2)
    return strays


def replay(given: argparse.Namespace) -> str:
    """The command for this schedule."""
    words = [
        f"--{name.replace('_', '-')} {value}" for name, value in vars(given).items() if name not in ("out", "json")
    ]
    return f"python -m tests.chaos.run {' '.join(words)}"


def main() -> int:
    """See above."""
    given = options()
    out = given.out or Path(tempfile.mkdtemp(prefix="decentral-chaos-"))
    out = out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    try:
        judgement = torment(given, out)
    except DiskError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    document = {"command": replay(given), "violations": judgement.violations, **judgement.figures}
    if given.json is not None:
        given.json.write_text(json.dumps(document, indent=1) + "\n")
    print(table(judgement))
    for violation in judgement.violations:
        print(f"VIOLATION: {violation}")
    if judgement.violations:
        print(f"The same schedule, though not the same timing: {document['command']}\nEvidence: {out}")
        return 1
    if given.out is None:
        shutil.rmtree(out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
