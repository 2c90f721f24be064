"""Play matches, one after the other, and keep what came out: a line of JSON for each.

    python -m experiments.contestants.run --kind search
    python -m experiments.contestants.run --kind match --mbit 20 --minutes 20
    python -m experiments.contestants.run --kind churn --mbit 20 --minutes 20 --torchft-python /tmp/torchft/bin/python

As root on Linux; see docs/natlab.md for what it needs. ``search`` plays every value of every contestant's knob; the
others play each with the value that its search found best. A match that the file holds is not played again.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

import torch

from experiments.contestants.match import MatchError, play
from experiments.contestants.outcome import outcome
from experiments.contestants.results import RESULTS, Result, best_knob, keep, read
from experiments.contestants.terms import KNOBS, Match
from tests.natlab.namespaces import why_impossible

SEARCH_SECONDS = 60.0
SEARCH_MBIT = 20.0


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=["search", "match", "churn"], required=True)
    parser.add_argument("--only", choices=sorted(KNOBS), action="append", default=[])
    parser.add_argument("--mbit", type=float, default=20.0, help="each way, of every line; a search has 20")
    parser.add_argument("--minutes", type=float, default=20.0, help="of a match; a search has one")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--torchft-python", default=None, help="of an environment that has torchft; else it is left out"
    )
    parser.add_argument("--results", type=Path, default=RESULTS)
    return parser.parse_args()


def main() -> int:
    """See above."""
    given = options()
    if why := why_impossible():
        print(f"error: {why}", file=sys.stderr)
        return 1
    torch.set_num_threads(1)
    for match in planned(given, read(given.results)):
        if match in [result.match for result in read(given.results)]:
            continue
        with tempfile.TemporaryDirectory(prefix=f"{match.name}-") as folder:
            _play(match, Path(folder), given)
    return 0


def planned(given: argparse.Namespace, known: list[Result]) -> list[Match]:
    """The matches that were asked for."""
    names = given.only or [name for name in KNOBS if name != "torchft" or given.torchft_python]
    if given.kind == "search":
        pairs = [(name, knob) for name in names for knob in KNOBS[name]]
        return [
            Match(contestant=name, knob=knob, mbit=SEARCH_MBIT, seconds=SEARCH_SECONDS, seed=given.seed)
            for name, knob in pairs
        ]
    return [
        Match(
            contestant=name,
            knob=best_knob(known, name, SEARCH_SECONDS),
            mbit=given.mbit,
            seconds=60 * given.minutes,
            churn=given.kind == "churn",
            seed=given.seed,
        )
        for name in names
    ]


def _play(match: Match, folder: Path, given: argparse.Namespace) -> None:
    try:
        play(match, folder, given.torchft_python)
    except MatchError as error:
        print(f"error: {error}", file=sys.stderr)
        for log in sorted(folder.glob("log-*")):
            print("\n".join(log.read_text().splitlines()[-15:]), file=sys.stderr)
        return
    result = Result(match, outcome(match, folder, curves=given.kind != "search"), os.getloadavg()[0])
    keep(given.results, result)
    print(f"{match.name}: {result.bits:.3f} bits per byte, {100 * result.computing:.0f} % computing", flush=True)


if __name__ == "__main__":
    sys.exit(main())
