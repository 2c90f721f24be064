"""Rows for other programs: a line for each cell, and one for each point of each curve."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence

from decentral.lab.report.rows import Found, Row, Run

__all__ = ["curves_csv", "results_csv"]

_CELL = ("phase", "name", "role", "point", "link", "settings", "seed", "cell", "status")


def results_csv(found: Found) -> str:
    """A line for each cell."""
    heads = [*_CELL, "reason", "loss", "loss_of_mean", "tokens", "nbytes", "peak_nbytes", "machine_seconds"]
    heads += [f"hours_{link}" for link in found.links]
    return _csv(heads, (_result(found, *told) for told in _runs(found)))


def _result(found: Found, phase: str, row: Row, seed: int, run: Run) -> list[object]:
    outcome, curve = run.outcome, run.outcome.curve
    last = curve.points[-1] if curve is not None else None
    spent: list[object] = ["", "", "", "", ""]
    if curve is not None and last is not None:
        spent = [_number(last.loss), _number(last.loss_of_mean), last.tokens, last.nbytes, curve.peak_nbytes]
    hours = [run.hours[link][-1] if link in run.hours else "" for link in found.links]
    return [*_cell(phase, row, seed, run), outcome.reason, *spent, round(outcome.seconds, 3), *hours]


def curves_csv(found: Found) -> str:
    """A line for each point of each curve."""
    heads = [*_CELL, "step", "tokens", "rounds", "nbytes", "loss", "loss_of_mean"]
    heads += [f"hours_{link}" for link in found.links]
    return _csv(heads, (line for told in _runs(found) for line in _curve(found, *told)))


def _curve(found: Found, phase: str, row: Row, seed: int, run: Run) -> Iterator[list[object]]:
    for place, point in enumerate(run.outcome.curve.points if run.outcome.curve is not None else ()):
        spent = [point.step, point.tokens, point.rounds, point.nbytes, _number(point.loss), _number(point.loss_of_mean)]
        hours = [run.hours[link][place] if link in run.hours else "" for link in found.links]
        yield [*_cell(phase, row, seed, run), *spent, *hours]


def _runs(found: Found) -> Iterator[tuple[str, Row, int, Run]]:
    for phase, rows in (("search", found.searched), ("report", found.rows)):
        for row in rows:
            for seed, run in row.runs.items():
                yield phase, row, seed, run


def _cell(phase: str, row: Row, seed: int, run: Run) -> list[object]:
    point = _pairs(row.point)
    return [phase, row.name, row.role, point, row.link or "", row.told, seed, run.cell, run.outcome.status]


def _pairs(point: Mapping[str, object]) -> str:
    return " ".join(f"{key}={value}" for key, value in point.items())


def _number(value: float | None) -> object:
    return "" if value is None else value


def _csv(heads: Sequence[str], lines: Iterable[Sequence[object]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(heads)
    writer.writerows(lines)
    return text.getvalue()
