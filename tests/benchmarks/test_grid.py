"""The grid of lines: what each cell is held against, by cases that can be done in the head, and its table."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from decentral.benchmarks.exchange import ExchangeResult, Step
from experiments.exchange import grid
from experiments.exchange.bars import BASE, SWARMS, Cell, Row, in_order, replaced, table

STEP = Step(
    seconds=2.0,
    each=(1.5, 1.6, 2.0),
    processor=0.4,
    held=0.0,
    nbytes=250_000.0,  # 0.1 s at 20 Mbit/s
    sent=1_250_000.0,
    equal=True,
    contributors=6,
    ballot=0,
)


def row(name: str, cell: Cell, *steps: Step, **given: object) -> Row:
    swarm = SWARMS[name]
    ours = ExchangeResult(swarm.case(cell), steps or (STEP,))
    known: dict[str, object] = {"rivals": {}, "untroubled": None, "deadline": 2.0, "cores": 2}
    return Row(swarm=swarm, cell=cell, ours=ours, **(known | given))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "label"),
    [
        ("20x0.025", "20 Mbit/s, 25 ms"),
        ("10/50x0.04", "10 up, 50 down, 40 ms"),
        ("20x0.025+loss", "20 Mbit/s, 25 ms, one loses 1 % of its packets"),
    ],
)
def test_a_cell_is_written_as_it_is_read(text: str, label: str) -> None:
    assert str(Cell.parse(text)) == text
    assert Cell.parse(text).label == label


@pytest.mark.parametrize("text", ["20", "x0.1", "20x", "20x0.025+flood", "20x0.025+after"])
def test_what_is_no_cell_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no cell"):
        Cell.parse(text)


def test_a_trouble_is_the_last_lines_and_a_jitter_everybodys() -> None:
    slow = Cell.parse("20x0.025+slow").lines(3)
    assert [line.up for line in slow] == [line.down for line in slow] == [20.0, 20.0, 2.0]
    assert [line.loss for line in Cell.parse("20x0.025+loss").lines(3)] == [0.0, 0.0, 0.01]
    assert [line.jitter for line in Cell.parse("20x0.025+jitter").lines(3)] == [0.03] * 3


def test_thin_lines_come_before_fast_ones_and_a_line_is_thin_before_it_drops_only_if_it_is() -> None:
    cells = [Cell.parse(text) for text in ("50x0.012", "20x0.025+drop", "20x0.025", "10/50x0.025", "20x0.025+slow")]
    assert [str(cell) for cell in in_order(cells)] == [
        *("20x0.025+slow", "10/50x0.025", "20x0.025", "20x0.025+drop", "50x0.012"),
    ]


def test_two_in_one_house_have_half_of_its_line_each() -> None:
    case = SWARMS["gather-6-home"].case(BASE)
    assert case.ups == case.downs == (2.5e6,) * 4 + (1.25e6,) * 2
    assert SWARMS["gather-6-home"].wires == 5


def test_the_bar_of_a_gather_is_links_and_trips_and_half_of_the_processor_and_a_little() -> None:
    found = row("gather-6", BASE)
    assert found.links == pytest.approx(0.5)
    assert found.trips == pytest.approx(0.3)
    assert found.bar == pytest.approx(0.5 + 0.3 + 0.5 * 6 * 0.4 / 2 + 0.1)
    assert found.alone == pytest.approx(2.0 - 0.5 * 5 * 0.4 / 2)


def test_a_jitter_makes_trips_longer_by_its_mean() -> None:
    assert row("gather-6", replace(BASE, trouble="jitter")).trips == pytest.approx(12 * 0.04)


@pytest.mark.parametrize(("delay", "share"), [(0.012, 1.10), (0.025, 1.10), (0.0525, 1.175), (0.08, 1.25), (0.2, 1.25)])
def test_the_bar_of_a_reduce_is_a_share_of_the_bound_of_float32_or_gloo(delay: float, share: float) -> None:
    cell = Cell(20.0, 20.0, delay)
    links = 2 * 5 / 6 * 6 * 2**20 / 2.5e6
    assert row("reduce-6", cell).bar == pytest.approx(share * links)
    assert row("reduce-6", cell, rivals={"gloo": 4.0, "hivemind": 3.0}).bar == 4.0


def test_the_bar_of_a_pair_is_a_share_of_the_bound_of_what_is_sent() -> None:
    assert row("pair-4", BASE).bar == pytest.approx(1.15 * 0.1)


def test_beside_a_peer_in_trouble_the_others_are_judged_by_one_deadline_more_than_without_it() -> None:
    late = replace(STEP, seconds=9.0, each=(1.5, 4.0, 9.0))
    found = row("gather-6", replace(BASE, trouble="slow"), late, untroubled=1.5)
    assert (found.seconds, found.bar) == (4.0, 3.5)
    assert found.cells()[9] == "**1.14**"
    assert row("gather-6", replace(BASE, trouble="slow"), late).bar is None


@pytest.mark.parametrize(
    ("step", "whole"),
    [
        (STEP, "all"),
        (replace(STEP, contributors=5), "**1 of 2**"),
        (replace(STEP, equal=False), "**1 of 2**"),
        (replace(STEP, ballot=1), "**1 of 2**"),
    ],
)
def test_a_round_is_whole_with_everybody_the_first_leader_and_equal_replicas(step: Step, whole: str) -> None:
    assert row("gather-6", BASE, STEP, step).cells()[12] == whole


def test_what_misses_a_bar_is_bold() -> None:
    greedy = replace(STEP, sent=1.2 * STEP.sent, processor=0.12, seconds=0.9)
    assert row("gather-6", BASE, greedy).cells()[7:12] == ["0.12", "1.08", "0.83", "0.75", "**1.20**"]
    busy = replace(STEP, seconds=3.0)
    assert row("gather-6", BASE, busy).cells()[7:12] == ["**0.40**", "1.50", "**2.00**", "2.50", "1.00"]


def test_the_table_replaces_the_one_before_it_in_a_page() -> None:
    made = table([row("gather-6", BASE)])
    assert len({line.count("|") for line in made.splitlines()}) == 1, "as many columns in each line"
    page = "before\n<!-- grid -->\n<!-- /grid -->\nafter\n"
    once = replaced(page, made)
    assert once == f"before\n<!-- grid -->\n\n{made}<!-- /grid -->\nafter\n"
    assert replaced(once, made) == once
    with pytest.raises(ValueError, match="no place"):
        replaced("a page", made)


def test_raw_figures_are_read_as_they_were_written(tmp_path: Path) -> None:
    measured = {"gather-6": {BASE: {"decentral": [STEP, STEP]}, replace(BASE, trouble="after"): {"decentral": [STEP]}}}
    grid.write_figures(measured, tmp_path / "grid.json")
    assert grid.read_figures(tmp_path / "grid.json") == measured
    assert grid.read_figures(tmp_path / "another.json") == grid.read_figures(None) == {}
