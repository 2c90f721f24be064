"""tests/lab/test_by_rounds.py"""

from pathlib import Path

import pytest

from decentral.lab.laboratory import Store
from decentral.lab.plan import Plan
from decentral.lab.results import collect
from decentral.lab.terms import load_study
from experiments.methods.by_rounds import HERE, cell, losses_after

STUDY = HERE / "outer_rate"


def test_the_committed_course_says_how_large_a_step_suits_how_short_a_run():
    rows = [row for row in collect(Plan(load_study(STUDY / "study.toml")), Store(STUDY).known()).rows if row.point]
    assert [row.point["outer.learning_rate"] for row in rows] == [1.0, 1.6, 2.5, 4.0]
    assert set(losses_after(rows[0], 50)) == {1, 2, 3}
    told = f"| {' | '.join(cell(row, rows[0], 100) for row in rows)} |"
    page = (Path(__file__).parents[2] / "docs/methods/sparse.md").read_text()
    assert f"| 100 {told}" in page, "the page has what the cells say"


def test_a_point_that_no_curve_has_is_said_so():
    rows = [row for row in collect(Plan(load_study(STUDY / "study.toml")), Store(STUDY).known()).rows if row.point]
    with pytest.raises(SystemExit, match="no curve has a point after 60 rounds"):
        cell(rows[1], rows[0], 60)
