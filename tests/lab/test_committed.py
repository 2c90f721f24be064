"""What is read off the cells of committed studies: the length of a run, and lines that none was declared for."""

from __future__ import annotations

from pathlib import Path

import pytest

from decentral.lab.comparing import Row, pairs
from decentral.lab.laboratory import Store
from decentral.lab.plan import Plan
from decentral.lab.results import collect
from decentral.lab.terms import load_study
from experiments.methods.by_rounds import HERE, cell, losses_after
from experiments.methods.thin_lines import found_on, line_of

BY_ROUNDS = HERE / "outer_rate"
FULL = Path(__file__).parents[2] / "experiments/methods/full"


def rows_by_rounds() -> list[Row]:
    found = collect(Plan(load_study(BY_ROUNDS / "study.toml")), Store(BY_ROUNDS).known())
    return [row for row in found.rows if row.point]


def test_the_committed_course_says_how_large_a_step_suits_how_short_a_run():
    rows = rows_by_rounds()
    assert [row.point["outer.learning_rate"] for row in rows] == [1.0, 1.6, 2.5, 4.0]
    assert set(losses_after(rows[0], 50)) == {1, 2, 3}
    told = f"| {' | '.join(cell(row, rows[0], 100) for row in rows)} |"
    page = (Path(__file__).parents[2] / "docs/methods/sparse.md").read_text()
    assert f"| 100 {told}" in page, "the page has what the cells say"


def test_a_point_that_no_curve_has_is_said_so():
    rows = rows_by_rounds()
    with pytest.raises(SystemExit, match="no curve has a point after 60 rounds"):
        cell(rows[1], rows[0], 60)


def test_hours_follow_from_bytes_and_steps_and_the_pair_is_compared_where_the_faster_one_ends() -> None:
    (pair,) = pairs(found_on(FULL, [1.0, 1000.0], "sparse-muon", "muloco"))
    for link, rate in (("1", 1e6), ("1000", 1e9)):
        for row in (pair.a, pair.b):
            (run, *_) = row.curves
            last = run.outcome.curve.points[-1]  # type: ignore[union-attr]  # it came to its end
            scale = 1e8 / run.outcome.curve.numel  # type: ignore[union-attr]
            sending = last.nbytes * scale * 8 / rate
            assert run.hours[link][-1] * 3600 == pytest.approx(last.step + sending, rel=0.01)
        ends = [min(one.runs[seed].hours[link][-1] for one in (pair.a, pair.b)) for seed in (1, 2, 3, 4, 5)]
        assert pair.at_hours[link].hours == pytest.approx(sum(ends) / 5)
    assert pair.at_tokens is not None
    assert pair.at_hours["1"].compared.share.mean < pair.at_hours["1000"].compared.share.mean
    assert line_of("1", pair).startswith("| 1 | 3.5")


def test_no_cell_of_the_committed_study_is_missing() -> None:
    found = found_on(FULL, [20.0], "sparse-muon", "sparseloco")
    assert [row.troubles for row in found.rows if row.role != "control"] == [""] * sum(
        row.role != "control" for row in found.rows
    )


def test_the_smoke_study_is_whole_beside_its_file() -> None:
    folder = Path(__file__).parents[2] / "experiments/methods/smoke"
    assert Plan(load_study(folder / "study.toml")).due_cells(Store(folder).known()) == []
