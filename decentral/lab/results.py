"""The report of a study: from a plan and its cells to the rows that it speaks of, and to its files."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from decentral.lab.cells import Cell
from decentral.lab.comparing import KINDS, Found, Row, Run, distances
from decentral.lab.laboratory import Store
from decentral.lab.own import unit_of
from decentral.lab.plan import Contestant, Plan, Reported
from decentral.lab.running import Outcome
from decentral.lab.tables import tables_md
from decentral.lab.terms import PEERS, Link, Place, Reference, Study
from decentral.state.durable import disk_errors
from decentral.trial.replicas import ExchangeKind

__all__ = ["FIGURES", "collect", "curves_csv", "draw", "results_csv", "write_report"]


# ---- all that is known of a study ----

Known = Mapping[str, Outcome]  # by cell id


def collect(plan: Plan, known: Known) -> Found:
    """All that is known of a study."""
    aims = plan.study.study
    rows = [row for one in plan.contestants for row in _rows(plan, one, known)]
    searched = [row for one in plan.contestants for row in _search_rows(plan, one, known)]
    return Found(
        aims.name,
        _title(plan.study),
        unit_of(aims.task),
        plan.study.base,
        aims.margin,
        tuple(link.name for link in plan.study.link),
        tuple(rows),
        tuple((one.a, one.b) for one in plan.study.compare),
        tuple(searched),
        {one.kind: one.name for one in reversed(plan.study.reference)},
    )


def _title(study: Study) -> str:
    """Say in one sentence what was trained, and how it was searched for."""
    aims = study.study
    peers = "" if PEERS in study.grid else f", {aims.peers} peers"
    length = f"{aims.rounds} rounds" if aims.rounds is not None else f"{aims.tokens:,} tokens of each peer"
    rates = ", ".join(f"{rate:g}" for rate in aims.learning_rates)
    others = f"{len(aims.search_seeds)} other seed{'s' if len(aims.search_seeds) > 1 else ''}"
    seeds = f"{len(aims.seeds)} seed{'s' if len(aims.seeds) > 1 else ''}"
    return f"{aims.task}{peers}, {length}; {seeds}; the search tries {rates} as inner learning rate on {others}."


def _rows(plan: Plan, contestant: Contestant, known: Known) -> Iterator[Row]:
    """Yield one row, or one for each link that decides what is learnt."""
    chosen = plan.choose(contestant, known)
    if not chosen.over or chosen.place is None:
        yield _row(plan, contestant, None, None, [], known)
        return
    reported = list(plan.report(contestant, chosen))
    for link in dict.fromkeys(one.link for one in reported):
        yield _row(plan, contestant, chosen.place, link, [one for one in reported if one.link == link], known)


def _row(
    plan: Plan, contestant: Contestant, place: Place | None, link: str | None, cells: Sequence[Reported], known: Known
) -> Row:
    rates = plan.study.study.learning_rates
    edge = place is not None and len(rates) > 1 and place.learning_rate in (min(rates), max(rates))
    links = [one for one in plan.study.link if link in (None, one.name)]
    runs = {one.seed: _run(one.cell, known[one.cell.id], links) for one in cells if one.cell.id in known}
    role: Any = "control" if contestant.flips else _role(plan, contestant)
    of = contestant.entry if contestant.flips else ""
    settings, wanted = {} if place is None else _settings_of(place), len(plan.study.study.seeds)
    return Row(contestant.name, role, dict(contestant.point), link, settings, edge, runs, wanted, of)


def _search_rows(plan: Plan, contestant: Contestant, known: Known) -> Iterator[Row]:
    tried: dict[Place, dict[int, Run]] = {}
    for place, seed, cell in plan.search_cells(contestant, known):
        if cell.id in known:
            tried.setdefault(place, {})[seed] = _run(cell, known[cell.id], plan.study.link)
    wanted = len(plan.study.study.search_seeds)
    for place, runs in tried.items():
        role: Any = _role(plan, contestant)
        yield Row(contestant.name, role, dict(contestant.point), None, _settings_of(place), False, runs, wanted)


def _role(plan: Plan, contestant: Contestant) -> str:
    references = [one.name for one in plan.study.entries if isinstance(one, Reference)]
    return "reference" if contestant.entry in references else "method"


def _settings_of(place: Place) -> dict[str, object]:
    return {"learning rate": f"{place.learning_rate:g}", **dict(place.own)}


def _run(cell: Cell, outcome: Outcome, links: Sequence[Link]) -> Run:
    """With the hours of each link: its own where the cell is of one, else by steps and bytes."""
    curve = outcome.curve
    if curve is None:
        return Run(cell.id, outcome, {})
    kind: ExchangeKind = cell.manifest.exchange.kind if cell.kind == "swarm" else "reduce"
    hours: dict[str, Sequence[float]] = {}
    for link in links:
        if cell.line is not None:
            hours[link.name] = [point.seconds / 3600 for point in curve.points]
        else:  # the slow peer is one of several: who is alone is a usual one
            line = replace(link.line, slow=1.0) if cell.kind == "alone" else link.line
            hours[link.name] = [line.hours(point, curve.numel, cell.peers, kind) for point in curve.points]
    return Run(cell.id, outcome, hours)


# ---- rows for other programs ----
#
# A line for each cell, and one for each point of each curve.

_CELL_HEADS = ("phase", "name", "role", "point", "link", "settings", "seed", "cell", "status")


def results_csv(found: Found) -> str:
    """A line for each cell."""
    heads = [*_CELL_HEADS, "reason", "loss", "loss_of_mean", "tokens", "nbytes", "peak_nbytes", "machine_seconds"]
    heads += [f"to_{kind.replace('-', '_')}" for kind in KINDS]
    heads += [f"hours_{link}" for link in found.links]
    return _csv(heads, (_cell_line(found, *told) for told in _runs(found)))


def _cell_line(found: Found, phase: str, row: Row, seed: int, run: Run) -> list[object]:
    outcome, curve = run.outcome, run.outcome.curve
    last = curve.points[-1] if curve is not None else None
    spent: list[object] = ["", "", "", "", ""]
    if curve is not None and last is not None:
        spent = [_number(last.loss), _number(last.loss_of_mean), last.tokens, last.nbytes, curve.peak_nbytes]
    hours = [run.hours[link][-1] if link in run.hours else "" for link in found.links]
    apart = [_number(distances(row, found, kind).get(seed)) for kind in KINDS] if phase == "report" else ["", ""]
    return [*_cell_fields(phase, row, seed, run), outcome.reason, *spent, round(outcome.seconds, 3), *apart, *hours]


def curves_csv(found: Found) -> str:
    """A line for each point of each curve."""
    heads = [*_CELL_HEADS, "step", "tokens", "rounds", "nbytes", "loss", "loss_of_mean"]
    heads += [f"hours_{link}" for link in found.links]
    return _csv(heads, (line for told in _runs(found) for line in _curve_lines(found, *told)))


def _curve_lines(found: Found, phase: str, row: Row, seed: int, run: Run) -> Iterator[list[object]]:
    for place, point in enumerate(run.outcome.curve.points if run.outcome.curve is not None else ()):
        spent = [point.step, point.tokens, point.rounds, point.nbytes, _number(point.loss), _number(point.loss_of_mean)]
        hours = [run.hours[link][place] if link in run.hours else "" for link in found.links]
        yield [*_cell_fields(phase, row, seed, run), *spent, *hours]


def _runs(found: Found) -> Iterator[tuple[str, Row, int, Run]]:
    for phase, rows in (("search", found.searched), ("report", found.rows)):
        for row in rows:
            for seed, run in row.runs.items():
                yield phase, row, seed, run


def _cell_fields(phase: str, row: Row, seed: int, run: Run) -> list[object]:
    point = _point_text(row.point)
    return [phase, row.name, row.role, point, row.link or "", row.words, seed, run.cell, run.outcome.status]


def _point_text(point: Mapping[str, object]) -> str:
    return " ".join(f"{key}={value}" for key, value in point.items())


def _number(value: float | None) -> object:
    return "" if value is None else value


def _csv(heads: Sequence[str], lines: Iterable[Sequence[object]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(heads)
    writer.writerows(lines)
    return text.getvalue()


# ---- rows as figures ----
#
# The loss over what was spent, and over bytes the frontier of all that was tried.

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
                _save_figure(path, title, axis, found.unit, partial(_draw_curves, rows=rows, spent=spent))
                made.append(path)
    if any(row.curves for row in found.rows):
        path = folder / "frontier.png"
        _save_figure(path, found.name, "bytes that one peer sent", found.unit, partial(_draw_frontier, found=found))
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


def _draw_curves(axes: Any, rows: Sequence[Row], spent: Spent) -> None:  # Any: matplotlib is untyped
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


def _draw_frontier(axes: Any, found: Found) -> None:  # Any: as above
    """A mark for each row; a line through those that nobody beats in both."""
    marks = {}
    for row in (one for one in found.rows if one.curves and one.role != "control"):
        nbytes = sum(run.nbytes for run in row.curves) / len(row.curves)
        if nbytes > 0:
            marks[_label_of(row)] = nbytes, sum(row.losses.values()) / len(row.losses)
    for label, (nbytes, loss) in marks.items():
        axes.plot([nbytes], [loss], "o")
        axes.annotate(label, (nbytes, loss), textcoords="offset points", xytext=(4, 4), fontsize=7)
    axes.plot(*zip(*frontier(list(marks.values())), strict=True), color="0.6", linewidth=1, zorder=0) if marks else None
    axes.set_xscale("log")


def frontier(marks: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the pairs (bytes, loss) of which no other has both smaller, by bytes."""
    found: list[tuple[float, float]] = []
    for nbytes, loss in sorted(marks):
        if not found or loss < found[-1][1]:
            found.append((nbytes, loss))
    return found


def _label_of(row: Row) -> str:
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


def _save_figure(path: Path, title: str, across: str, up: str, plot: Callable[[Any], object]) -> None:
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


# ---- the report's files ----


def write_report(store: Store, found: Found) -> None:
    """Tables and figures, anew. DiskError where they cannot be written."""
    store.write("tables.md", tables_md(found))
    store.write("results.csv", results_csv(found))
    store.write("curves.csv", curves_csv(found))
    with disk_errors(f"writing {store.folder / FIGURES}"):
        draw(found, store.folder / FIGURES)
