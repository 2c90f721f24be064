"""Every scenario of the table, with real peers and real daemons: what works, by which path, how fast.

    python -m tests.natlab.run --only port-preserving-pair --json natlab.json

Ends with 1 when a scenario that is not marked as missing something does not commit all its rounds, or one that is
marked does: the mark must go then.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from decentral.errors import DecentralError
from tests.chaos.nursery import Nursery
from tests.natlab.lab import Lab
from tests.natlab.namespaces import why_impossible
from tests.natlab.outcome import Outcome
from tests.natlab.play import Play
from tests.natlab.scenarios import TABLE, Scenario

_HEAD = ("scenario", "path", "first frame", "Mbit/s", "share (mean)", "rounds", "with all", "")


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=[one.name for one in TABLE], help="may be repeated")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--limit", type=float, default=90.0, help="seconds a scenario may take")
    parser.add_argument("--out", type=Path, default=None, help="kept; else a temporary folder")
    parser.add_argument("--json", type=Path, default=None, help="where to write the figures")
    return parser.parse_args()


def play_all(scenarios: Iterable[Scenario], given: argparse.Namespace, out: Path) -> list[Outcome]:
    """One after the other; each says its line when it is done."""
    outcomes = []
    print(line(_HEAD), flush=True)
    with Nursery(out) as nursery:
        for scenario in scenarios:
            with Lab() as lab:
                play = Play(lab, scenario, nursery, out / scenario.name, given.rounds)
                outcomes.append(play.run(given.limit))
            print(line(row(outcomes[-1])), flush=True)
    return outcomes


def row(outcome: Outcome) -> tuple[str, ...]:
    """What the table shows of one scenario."""
    first = "never" if outcome.first_frame is None else f"{outcome.first_frame:.1f} s"
    rounds = f"{outcome.committed}/{outcome.asked}"
    speed = (f"{outcome.mbit:.1f}", f"{outcome.share:.0%} ({outcome.mean_share:.0%})")
    return (outcome.scenario, path_of(outcome), first, *speed, rounds, str(outcome.with_all), remark(outcome))


def path_of(outcome: Outcome) -> str:
    """The different paths of the pairs, worst first."""
    order = ("none", "relayed", "through", "punched", "direct", "at", "some")
    return ", ".join(sorted(set(outcome.paths.values()), key=lambda path: order.index(path.split()[0])))


def remark(outcome: Outcome) -> str:
    """What is wrong, or missing, or better than marked."""
    said = [] if outcome.equal else ["UNEQUAL"]
    said += [f"{name}: {words}" for name, words in outcome.ends.items()]
    if outcome.missing:
        said.append("works now: take its mark away" if outcome.works else f"missing: {outcome.missing}")
    elif not outcome.works:
        said.append("DOES NOT WORK")
    return "; ".join(said)


def line(words: Sequence[str]) -> str:
    """One line of the table."""
    widths = (22, 24, 12, 7, 13, 7, 9, 0)
    return " ".join(f"{word:<{width}}" for word, width in zip(words, widths, strict=True)).rstrip()


def main() -> int:
    """See above."""
    given = options()
    if why := why_impossible():
        print(f"error: {why}", file=sys.stderr)
        return 1
    out = (given.out or Path(tempfile.mkdtemp(prefix="decentral-natlab-"))).resolve()
    out.mkdir(parents=True, exist_ok=True)
    scenarios = [one for one in TABLE if not given.only or one.name in given.only]
    try:
        outcomes = play_all(scenarios, given, out)
    except DecentralError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    if given.json is not None:
        given.json.write_text(json.dumps([outcome.to_json() for outcome in outcomes], indent=1) + "\n")
    surprises = [outcome for outcome in outcomes if outcome.works == bool(outcome.missing)]
    if surprises:
        print(f"Evidence: {out}")
        return 1
    if given.out is None:
        shutil.rmtree(out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
