"""The table of attacks from records: experiments/attacks, which is not part of a source distribution."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

pytest.importorskip("scipy")
records = pytest.importorskip("experiments.attacks.records")
grids = pytest.importorskip("experiments.attacks.grid")
report = pytest.importorskip("experiments.attacks.report")

ACCURACY = {  # rule, attack: of seeds 0 and 1
    ("mean", "none"): (0.80, 0.90),
    ("mean", "ipm"): (0.10, 0.20),
    ("mean", "noise"): (0.70, 0.60),
    ("rfa", "none"): (0.80, 0.81),
    ("rfa", "ipm"): (0.50, 0.90),
    ("rfa", "noise"): (0.60, 0.60),
}


def result(rule: str, attack: str, seed: int, accuracy: float, loss: float | None = 1.0, rounds: int = 20):
    return records.Result(records.Cell(rule, attack, 1.0, seed, rounds), accuracy, loss)


def measured():
    return [result(*key, seed, one) for key, both in ACCURACY.items() for seed, one in enumerate(both)]


@pytest.fixture
def grid():
    return grids.Grid.of(measured(), 1.0, 20)


def test_the_worst_case_is_the_least_of_the_means_over_seeds(grid):
    # ipm has the lowest single seed of rfa, noise the lower mean
    assert grid.worst("rfa") == grids.Worst("noise", pytest.approx(0.6), 0.5)
    assert grid.worst("mean") == grids.Worst("ipm", pytest.approx(0.15), 0.1)
    assert grid.ranked() == ["rfa", "mean"]


def test_a_seed_that_is_not_whole_counts_for_the_tax_alone():
    grid = grids.Grid.of([*measured(), result("mean", "none", 2, 0.5), result("mean", "ipm", 2, 0.0)], 1.0, 20)
    assert grid.seeds == [0, 1]
    assert grid.accuracies("mean", "ipm") == [0.1, 0.2]
    assert (grid.accuracies("mean", "none"), grid.tax("mean").seeds) == ([0.8, 0.9], 3)


def test_cells_of_another_setting_do_not_count():
    grid = grids.Grid.of([*measured(), result("rfa", "ipm", 0, 0.0, rounds=60)], 1.0, 20)
    assert grid.worst("rfa").lowest == 0.5


def test_the_tax_is_paired_by_seeds_in_percent_of_the_mean(grid):
    tax = grid.tax("rfa")
    assert (tax.mean, tax.seeds) == (pytest.approx(5.0), 2)
    # differences 0 and 10: deviation 7.07, t(0.95, 1) = 6.314
    assert tax.half == pytest.approx(6.3138 * math.sqrt(50) / math.sqrt(2), rel=1e-4)
    assert grid.tax("mean").mean == 0


def test_a_loss_that_is_not_finite_has_no_part_in_the_tax():
    results = [result("mean", "none", 0, 0.5, 2.0), result("rfa", "none", 0, 0.5, 2.1)]
    grid = grids.Grid.of([*results, result("mean", "none", 1, 0.5, 2.0), result("rfa", "none", 1, 0.1, None)], 1.0, 20)
    assert (grid.loss_tax("rfa").mean, grid.loss_tax("rfa").seeds) == (pytest.approx(5.0), 1)


@pytest.mark.parametrize(
    ("mean", "half", "expected"), [(0.1, 0.2, True), (1.0, 0.2, False), (0.4, 0.3, None), (0.1, math.nan, None)]
)
def test_a_bound_holds_or_breaks_only_where_all_of_the_interval_agrees(mean: float, half: float, expected: bool | None):
    assert grids.Tax(mean, half, 5).within(0.5) is expected


def test_the_markdown_names_the_worst_attack_in_bold(grid):
    assert report.attacked(grid).splitlines() == [
        "Accuracy in percent, the mean of 2 seeds; bold: the worst attack of the rule.",
        "",
        "| rule | worst case | lowest seed | none | IPM | noise |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
        "| `rfa` | 60.0 | 50.0 | 80.5 | 70.0 | **60.0** |",
        "| `mean` | 15.0 | 10.0 | 85.0 | **15.0** | 65.0 |",
    ]


def test_a_setting_without_a_whole_seed_tells_its_taxes_alone():
    more = [result("mean", "none", 0, 0.8, rounds=60), result("rfa", "none", 0, 0.7, rounds=60)]
    first, second = grids.Grid.all_of([*measured(), *more])
    assert "bold" in report.markdown(first)
    assert report.markdown(second).splitlines() == [
        "## Shares from Dirichlet(1), 60 rounds",
        "",
        "Tax without an attack, paired with `mean`, 90 % t interval.",
        "",
        "| rule | accuracy lost, % | at most 0.5 % | loss above the mean's, % | seeds |",
        "| --- | ---: | --- | ---: | ---: |",
        "| `mean` | 0.00 | open | 0.00 | 1 |",
        "| `rfa` | 12.50 | open | 0.00 | 1 |",
    ]


def test_the_csv_has_a_line_for_each_rule_and_attack(grid):
    lines = report.as_csv([grid]).splitlines()
    assert lines[:3] == [
        "alpha,rounds,rule,attack,seeds,accuracy,lowest,highest",
        "1,20,mean,none,2,0.8500,0.8000,0.9000",
        "1,20,mean,ipm,2,0.1500,0.1000,0.2000",
    ]
    assert len(lines) == 7


def test_what_was_torn_by_a_crash_is_run_again_and_the_rest_is_kept(tmp_path: Path):
    path = tmp_path / "cells.jsonl"
    first, second = result("mean", "none", 0, 0.5, None), result("rfa", "none", 0, 0.6)
    records.append(path, first.cell, {"accuracy": 0.5, "loss": None})
    with path.open("a") as file:
        file.write('{"cell": {"rule": "rf')
    assert records.finished(path) == [first]
    records.append(path, second.cell, {"accuracy": 0.6, "loss": 1.0})
    assert records.finished(path) == [first, second]
    assert len([json.loads(line) for line in path.read_text().splitlines()]) == 2


def test_no_file_is_no_cell(tmp_path: Path):
    assert records.finished(tmp_path / "none.jsonl") == []
