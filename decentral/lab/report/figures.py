"""Rows as figures: the loss over what was spent, and over bytes the frontier of all that was tried."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from decentral.lab.report.rows import Found, Row, Run

__all__ = ["FIGURES", "draw"]

FIGURES = "figures"

_COLOURS = 10  # that are easy to tell apart; of more rows some have shades of them
_WIDE = 20  # times as far as the first, where a logarithmic axis shows more

Spent = Callable[[Run], Sequence[float]]


def draw(found: Found, folder: Path) -> list[Path]:
    """Write all of them as PNG; those that have no curve yet are left out."""
    folder.mkdir(parents=True, exist_ok=True)
    made = []
    for place, point in enumerate(found.points):
        rows = [row for row in found.at(point) if row.curves]
        suffix = f"-{place + 1}" if len(found.points) > 1 else ""
        title = ", ".join(f"{key} = {value}" for key, value in point.items()) or found.name
        for name, axis, spent in _axes(found):
            if any(max(spent(run), default=0) > 0 for row in rows for run in row.curves):
                path = folder / f"loss-over-{name}{suffix}.png"
                _save(path, title, axis, found.unit, partial(_curves, rows=rows, spent=spent))
                made.append(path)
    if any(row.curves for row in found.rows):
        path = folder / "frontier.png"
        _save(path, found.name, "bytes that one peer sent", found.unit, partial(_frontier, found=found))
        made.append(path)
    return made


def _axes(found: Found) -> list[tuple[str, str, Spent]]:
    """Name in the file, title of the axis, where each point of a curve is on it."""
    return [
        ("tokens", "tokens of each peer", lambda run: [p.tokens for p in _points(run)]),
        ("bytes", "bytes that one peer sent", lambda run: [p.nbytes for p in _points(run)]),
        *((f"hours-{link}", f"hours on {link}", _hours(link)) for link in found.links),
    ]


def _hours(link: str) -> Spent:
    return lambda run: run.hours.get(link, ())


def _points(run: Run) -> Sequence[Any]:  # Any: Point
    return run.outcome.curve.points if run.outcome.curve is not None else ()


def _curves(axes: Any, rows: Sequence[Row], spent: Spent) -> None:  # Any: matplotlib is untyped
    """The mean over seeds of each row."""
    from matplotlib import colormaps

    shades: Any = colormaps["tab20" if len(rows) > _COLOURS else "tab10"]  # Any: typed as maps of any kind
    axes.set_prop_cycle(color=shades.colors)
    for row in rows:
        runs = [run for run in row.curves if spent(run)]
        if not runs:
            continue
        places, losses = mean_curve(runs, spent)
        style = {"method": "-", "reference": "--", "control": ":"}[row.role]
        axes.plot(places, losses, style, label=row.label, linewidth=1.5)
    _show_what_learns(axes)


def mean_curve(runs: Sequence[Run], spent: Spent) -> tuple[Any, Any]:  # Any: arrays, one number for each point
    """Where the mean over runs is and what it has reached, at the tokens of the first one's points.

    Where time decides, runs may have been looked at after different steps: between looks they go straight.
    """
    tokens = [[point.tokens for point in _points(run)] for run in runs]
    losses = [[point.loss for point in _points(run)] for run in runs]

    def mean(of: Sequence[Sequence[float]]) -> Any:  # Any: as above
        return np.mean([np.interp(tokens[0], mine, one) for mine, one in zip(tokens, of, strict=True)], axis=0)

    return mean([spent(run) for run in runs]), mean(losses)


def _frontier(axes: Any, found: Found) -> None:  # Any: as above
    """A mark for each row; a line through those that nobody beats in both."""
    marks = {}
    for row in (one for one in found.rows if one.curves and one.role != "control"):
        nbytes = sum(run.nbytes for run in row.curves) / len(row.curves)
        if nbytes > 0:
            marks[_told(row)] = nbytes, sum(row.losses.values()) / len(row.losses)
    for label, (nbytes, loss) in marks.items():
        axes.plot([nbytes], [loss], "o")
        axes.annotate(label, (nbytes, loss), textcoords="offset points", xytext=(4, 4), fontsize=7)
    axes.plot(*zip(*frontier(list(marks.values())), strict=True), color="0.6", linewidth=1, zorder=0) if marks else None
    axes.set_xscale("log")


def frontier(marks: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Of (bytes, loss) those of which no other has both smaller, by bytes."""
    found: list[tuple[float, float]] = []
    for nbytes, loss in sorted(marks):
        if not found or loss < found[-1][1]:
            found.append((nbytes, loss))
    return found


def _told(row: Row) -> str:
    point = " ".join(f"{key.rpartition('.')[2]}={value}" for key, value in row.point.items())
    return f"{row.label} {point}".strip()


def _show_what_learns(axes: Any) -> None:  # Any: as above
    """Bytes and hours of methods may be far apart; where a control goes, up and away, nobody needs to see."""
    ends = [float(line.get_xdata()[-1]) for line in axes.lines]
    if min(end for end in ends if end > 0) * _WIDE < max(ends):
        axes.set_xscale("log", nonpositive="mask")
    losses = [loss for line in axes.lines if line.get_linestyle() != ":" for loss in line.get_ydata()]
    if losses:
        room = 0.05 * (max(losses) - min(losses))
        axes.set_ylim(min(losses) - room, max(losses) + room)


def _save(path: Path, title: str, across: str, up: str, plot: Callable[[Any], object]) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5))
    axes = figure.add_subplot()
    plot(axes)
    axes.set_title(title)
    axes.set_xlabel(across)
    axes.set_ylabel(f"held-out loss, {up}")
    handles: Mapping[str, Any] = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    if handles:
        axes.legend(fontsize=8)
    figure.tight_layout()
    FigureCanvasAgg(figure).print_png(path)
