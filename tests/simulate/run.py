"""Many simulated swarms, one per seed: python -m tests.simulate.run --seeds 1-2000 --rounds 50

Every seed draws an algorithm, a size and a weather, runs the real code under virtual time and is judged by the checker.
Ends with 1 when a guarantee was broken or anything hung, with the one command that replays the seed:

    python -m tests.simulate.run --seeds 17 --rounds 50 --trace
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import signal
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from decentral.simulate.simulation import Outcome, simulate
from tests.simulate.draws import scenario

LONGEST = 900  # s of real time for one seed: most take 3, and a slow machine ten times as long


@dataclass(slots=True)
class Total:
    """Sums over all seeds."""

    seeds: int = 0
    rounds: int = 0
    commits: int = 0
    divergence: int = 0
    lost_updates: int = 0
    duplicated_updates: int = 0
    hangs: int = 0
    virtual_seconds: float = 0.0
    seconds: float = 0.0
    failed: dict[int, list[str]] = field(default_factory=dict)  # seed -> what was wrong

    def add(self, seed: int, outcome: dict[str, Any]) -> None:
        """One more seed."""
        self.seeds += 1
        self.virtual_seconds += outcome["seconds"]
        for name in ("rounds", "commits", "divergence", "lost_updates", "duplicated_updates", "hangs"):
            setattr(self, name, getattr(self, name) + outcome[name])
        if outcome["problems"]:
            self.failed[seed] = outcome["problems"]


def one(task: tuple[int, int, str]) -> tuple[int, dict[str, Any]]:
    """A seed's outcome as plain data. An exception is a problem like any other, and so is time that stands still."""
    seed, rounds, kind = task
    signal.signal(signal.SIGALRM, _give_up)
    signal.alarm(LONGEST)
    try:
        return seed, simulate(scenario(seed, rounds, kind=kind)).to_dict()
    except Exception as error:  # noqa: BLE001 - whatever it is, the other seeds go on and this one is replayed
        nothing = dict.fromkeys(("rounds", "commits", "divergence", "lost_updates", "duplicated_updates", "hangs"), 0)
        return seed, {**nothing, "seconds": 0.0, "problems": [_innermost(error)]}
    finally:
        signal.alarm(0)


def _innermost(error: BaseException) -> str:
    """What went wrong, of a group of groups of errors the first."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"


def _give_up(number: int, frame: object) -> None:
    raise TimeoutError(f"not done after {LONGEST} s: peers may be busy without end at one moment")


def run(seeds: range, rounds: int, processes: int, *, most_failures: int = 10, kind: str = "") -> Total:
    """Simulate all seeds, on so many processes."""
    total, began = Total(), time.monotonic()
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        for seed, outcome in pool.imap_unordered(one, [(seed, rounds, kind) for seed in seeds]):
            total.add(seed, outcome)
            total.seconds = round(time.monotonic() - began, 1)
            if outcome["problems"]:
                again = replay(seed, rounds, kind)
                print(f"seed {seed}: {outcome['problems'][0]}; replay: {again}", file=sys.stderr)
            if len(total.failed) >= most_failures:
                break
            if total.seeds % 100 == 0:
                print(json.dumps(asdict(total)), file=sys.stderr)
    return total


def replay(seed: int, rounds: int, kind: str = "") -> str:
    """The one command that shows this seed again."""
    return f"python -m tests.simulate.run --seeds {seed} --rounds {rounds}{f' --{kind}' if kind else ''} --trace"


def show(outcome: Outcome) -> None:
    """Everything that happened, a line each."""
    for entry in outcome.trace:
        fields = {name: value.hex()[:6] if isinstance(value, bytes) else value for name, value in entry.fields.items()}
        if entry.event != "stepped":
            print(f"{entry.time:10.3f} host {entry.host} life {entry.life} {entry.event} {fields}")
    print(json.dumps(outcome.to_dict(), indent=1))


def main(arguments: list[str] | None = None) -> int:
    """1 when a seed failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="1-2000", help="first-last, or one")
    parser.add_argument("--rounds", type=int, default=50, help="outer steps under faults, per seed")
    special = parser.add_mutually_exclusive_group()
    kinds = {
        "committees": "more hosts, of which three or five vote",
        "parts": "hosts that train a part",
        "groups": "hosts that share a replica",
        "many-groups": "64 replicas of four hosts each",
    }
    for kind, told in kinds.items():
        special.add_argument(f"--{kind}", dest="kind", action="store_const", const=kind, default="", help=told)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--trace", action="store_true", help="tell everything that happened")
    parser.add_argument("--failures", type=int, default=10, help="seeds that may fail before the rest is left out")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    first, _, last = options.seeds.partition("-")
    if options.trace:
        outcome = simulate(scenario(int(first), options.rounds, kind=options.kind))
        show(outcome)
        return 0 if outcome.sound else 1
    total = run(
        range(int(first), int(last or first) + 1),
        options.rounds,
        options.processes,
        most_failures=options.failures,
        kind=options.kind,
    )
    text = json.dumps(asdict(total))
    print(text)
    if options.json is not None:
        options.json.write_text(text + "\n", encoding="utf-8")
    return 1 if total.failed else 0


if __name__ == "__main__":
    sys.exit(main())
