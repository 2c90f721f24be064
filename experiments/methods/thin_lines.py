"""The same runs on other lines: how two methods of a finished study compare at equal hours, by what they sent.

``python -m experiments.methods.thin_lines full --a sparse-muon --b muloco --mbit 1 5 10 20 50 100``

Nothing is trained again: where everybody waits for every round, hours follow from bytes and steps. So methods whose
course depends on the line (streaming, those that take what came) are not to be named here.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from decentral.lab.comparing import Found, Pair, Row, pairs
from decentral.lab.laboratory import Store
from decentral.lab.plan import Plan
from decentral.lab.results import collect
from decentral.lab.terms import Study, load_study

HERE = Path(__file__).parent


def on_lines(study: Study, mbits: list[float], a: str, b: str) -> Study:
    """The study with lines of these rates each way, else as its first one, and with this one pair."""
    like = study.link[0]
    links = [like.model_copy(update={"name": f"{mbit:g}", "rate_mbit": mbit}) for mbit in mbits]
    named = [method for method in study.method if method.name in (a, b, study.study.base)]
    compare = [one.model_copy(update={"a": a, "b": b}) for one in study.compare[:1]]
    return study.model_copy(update={"link": links, "method": named, "compare": compare})


def found_on(folder: Path, mbits: list[float], a: str, b: str) -> Found:
    """What the study in ``folder`` found, as of other lines."""
    declared = load_study(folder / "study.toml")
    return collect(Plan(on_lines(declared, mbits, a, b)), Store(folder).known())


def line_of(link: str, pair: Pair) -> str:
    """One row of the table."""
    at = pair.at_hours[link]
    share = at.compared.share
    cells = [link, *(f"{_hours(row, link):.3g}" for row in (pair.a, pair.b)), f"{at.hours:.3g}"]
    told = f"{100 * share.mean:+.2f} [{100 * share.low:+.2f}, {100 * share.high:+.2f}]"
    return f"| {' | '.join(cells)} | {told} | {at.compared.word} |"


def _hours(row: Row, link: str) -> float:
    ends = [run.hours[link][-1] for run in row.curves]
    return sum(ends) / len(ends)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("study", help="a folder beside this file, or a path")
    parser.add_argument("--a", required=True)
    parser.add_argument("--b", required=True)
    parser.add_argument("--mbit", type=float, nargs="+", default=[1.0, 5.0, 10.0, 20.0, 100.0])
    given = parser.parse_args()
    folder = HERE / given.study if (HERE / given.study).is_dir() else Path(given.study)
    found = pairs(found_on(folder, given.mbit, given.a, given.b))
    if len(found) != 1 or set(found[0].at_hours) != {f"{mbit:g}" for mbit in given.mbit}:
        parser.error(f"{given.a} and {given.b} are not two methods of {folder} whose course is the same on every line")
    (pair,) = found
    print(f"| Mbit/s | hours of {given.a} | of {given.b} | compared at | {given.a} against {given.b}, % | verdict |")
    print("|---|---|---|---|---|---|")
    for link in pair.at_hours:
        print(line_of(link, pair))


if __name__ == "__main__":
    main()
