"""Tables: differences are paired, what went wrong comes first, and nothing is made up where a number is missing."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from decentral.cli import main
from decentral.lab.call import StudyLine
from decentral.lab.cells import Curve, Point
from decentral.lab.comparing import Found, Row, Run, compare, interval, pairs, problems
from decentral.lab.laboratory import Progress, Store, run_study
from decentral.lab.results import frontier, mean_curve
from decentral.lab.running import Outcome
from decentral.lab.tables import pairs_json, tables_md
from decentral.lab.terms import parse_study
from tests.lab.declared import TEXT, Here, ended, plan


def row(name: str, *losses: float | None, role: str = "method", of: str = "") -> Row:
    runs = {seed: Run(f"{name}{seed}", ended(loss), {}) for seed, loss in enumerate(losses)}
    return Row(name, role, {}, None, {"learning rate": "0.1"}, False, runs, len(losses), of)  # type: ignore[arg-type]


BASE = row("base", 2.0, 3.0, 4.0)


def found(*rows: Row) -> Found:
    return Found("mine", "a task.", "nats", "base", 0.005, (), (BASE, *rows))


def test_differences_are_of_one_seed_in_shares_of_the_bases_loss() -> None:
    """Seeds are far apart, and the method a little better on each of them: unpaired, that would be lost."""
    against = compare(row("mine", 1.95, 2.94, 3.93), BASE, 0.005)
    assert against is not None
    by_hand = interval([-0.05 / 3, -0.06 / 3, -0.07 / 3])
    assert (against.share.low, against.share.high) == pytest.approx((by_hand.low, by_hand.high))
    assert against.word == "better"


def test_a_method_that_lost_a_seed_is_not_judged_by_the_others() -> None:
    against = compare(row("mine", 1.0, None, 1.0), BASE, 0.005)
    assert against is not None
    assert (against.seeds, against.word) == (2, "diverged")
    assert compare(row("mine", None, None, None), BASE, 0.005) is None


@pytest.mark.parametrize(
    ("losses", "told"),
    [
        ((1.9, 2.9, 3.9), "control wrong is better, and it must be worse than base"),
        ((2.1, 2.9, 4.1), "control wrong is undecided, and it must be worse than base"),
        ((2.1, 3.1, 4.1), None),
        ((None, None, None), None),
    ],
)
def test_a_control_that_is_not_worse_is_told_before_everything(losses: tuple[float, ...], told: str | None) -> None:
    all_of_it = found(row("wrong", *losses, role="control", of="base"))
    if told is None:
        assert problems(all_of_it) == []
        assert "Every control came out worse" in tables_md(all_of_it)
    else:
        assert [line.partition(":")[0] for line in problems(all_of_it)] == [told]
        assert tables_md(all_of_it).index(told) < tables_md(all_of_it).index("| base |")


def test_a_method_without_settings_has_a_line_that_says_so() -> None:
    nothing = replace(row("mine"), settings={}, wanted=3)
    assert "no setting gave a number" in tables_md(found(nothing))
    assert problems(found(nothing)) == ["mine: no setting gave a number on every seed of the search"]


def test_the_frontier_is_of_those_that_nobody_beats_in_both() -> None:
    assert frontier([(3, 1.0), (1, 3.0), (2, 3.5), (4, 1.0), (2, 2.0)]) == [(1, 3.0), (2, 2.0), (3, 1.0)]


def test_a_mean_curve_is_of_runs_at_the_same_tokens() -> None:
    def run(*points: tuple[float, float]) -> Run:
        curve = Curve(tuple(Point(t, t, 1, 10 * t, t, loss) for t, loss in points), 1.0, 10)
        return Run("", Outcome("done", "", curve), {})

    runs = [run((0, 8), (10, 4), (20, 2)), run((0, 8), (20, 4))]
    places, losses = mean_curve(runs, lambda one: [point.nbytes for point in one.outcome.curve.points])  # type: ignore[union-attr]
    assert (list(places), list(losses)) == ([0, 100, 200], [8, 5, 3])


def test_the_command_writes_tables_and_figures_from_cells_alone(tmp_path: Path) -> None:
    """All cells are there, so that no process is started."""
    (tmp_path / "study.toml").write_text(TEXT)
    folder = tmp_path / "found"
    known = run_study(plan(), Store(folder), Here())
    typed = ["lab", str(tmp_path / "study.toml"), "--out", str(folder)]
    told = CliRunner().invoke(main, [*typed, "--json"])
    assert told.exit_code == 0, told.output
    summary = json.loads(told.stdout)
    assert (summary["ran"], summary["problems"]) == (0, [])
    assert [one["name"] for one in summary["rows"]] == ["diloco", "data-parallel", "flipped"]
    assert summary["rows"][2]["verdict"] == "worse"
    lines = list(csv.DictReader(io.StringIO((folder / "results.csv").read_text())))
    assert {line["cell"] for line in lines} == known.keys()
    assert all(float(line["hours_home"]) > 0 for line in lines)
    assert len((folder / "curves.csv").read_text().splitlines()) == 1 + 3 * len(lines)
    assert (folder / "tables.md").read_text() in CliRunner().invoke(main, typed).stdout
    names = ["frontier", "loss-over-bytes", "loss-over-hours-home", "loss-over-tokens"]
    assert sorted(path.stem for path in (folder / "figures").iterdir()) == names


def timed(row: Row, hours: float) -> Row:
    """Its runs, which fell from 8 to their losses in a straight line within so many hours."""
    runs = {}
    for seed, run in row.runs.items():
        loss = run.outcome.loss
        curve = Curve((Point(0, 0, 0, 0, 0, 8.0), Point(1, 1, 1, 1, 1, loss)), 1.0, 10)
        runs[seed] = Run(run.cell, Outcome("done", "", curve), {"home": [0.0, hours]})
    return replace(row, runs=runs)


def test_pairs_are_compared_at_equal_tokens_and_when_the_faster_one_ends() -> None:
    quick = timed(row("quick", 3.0, 3.2, 3.4), 1.0)
    slow = timed(row("slow", 2.0, 2.0, 2.0), 4.0)
    both = replace(found(quick, slow), links=("home",), compare=(("slow", "quick"),))
    (pair,) = pairs(both)
    assert pair.at_tokens is not None
    assert pair.at_tokens.word == "better"
    assert pair.at_tokens.share.mean == pytest.approx((2.0 - 3.2) / 3.2)
    at = pair.at_hours["home"]
    assert (at.hours, at.compared.word) == (1.0, "worse")
    assert at.compared.share.mean == pytest.approx((8 - 6 / 4 - 3.2) / 3.2)
    line = next(line for line in tables_md(both).splitlines() if line.startswith("| slow against quick |"))
    assert "-37.50 [" in line
    assert "worse at 1 h" in line
    assert pairs_json(both)[0]["hours"]["home"]["verdict"] == "worse"  # type: ignore[index]


def test_the_example_that_is_printed_is_a_study() -> None:
    text = CliRunner().invoke(main, ["lab", "--example"]).stdout
    assert parse_study(text).base == "diloco"


def test_the_line_tells_what_is_done_and_the_time_that_is_left() -> None:
    at = iter([0.0, 30.0, 600.0])
    stream = io.StringIO()
    line = StudyLine(stream, 5, clock=lambda: next(at))
    line.tell(Progress(6, 8, "a"))
    line.tell(Progress(10, 18, "b"))
    line.end()
    assert stream.getvalue() == "6 of 8 cells, about 60 s left; a\n10 of 18 cells, about 16 min left; b\n"
