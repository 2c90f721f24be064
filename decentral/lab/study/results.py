"""From a plan and its cells to what the report speaks of, and the report's files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from decentral.lab.report.figures import FIGURES, draw
from decentral.lab.report.rows import Found, Row, Run
from decentral.lab.report.sheets import curves_csv, results_csv
from decentral.lab.report.tables import tables_md
from decentral.lab.runs.cell import Cell
from decentral.lab.runs.running import Outcome
from decentral.lab.study.plan import Contestant, Plan, Reported
from decentral.lab.study.settings import PEERS, Place
from decentral.lab.study.store import Store
from decentral.lab.study.terms import Link, Reference, Study
from decentral.lab.swarm.world import ExchangeKind
from decentral.state.durable import disk_errors

__all__ = ["found_by", "write_report"]

Known = Mapping[str, Outcome]  # by cell id

_UNITS = {"digits": "nats per digit"}


def found_by(plan: Plan, known: Known) -> Found:
    """All that is known of a study."""
    aims = plan.study.study
    rows = [row for one in plan.contestants for row in _rows(plan, one, known)]
    searched = [row for one in plan.contestants for row in _searched(plan, one, known)]
    return Found(
        aims.name,
        _title(plan.study),
        _UNITS.get(aims.task, "bits per byte"),
        plan.study.base,
        aims.margin,
        tuple(link.name for link in plan.study.link),
        tuple(rows),
        tuple((one.a, one.b) for one in plan.study.compare),
        tuple(searched),
    )


def _title(study: Study) -> str:
    """What was trained, and how it was searched for, in one sentence."""
    aims = study.study
    peers = "" if PEERS in study.grid else f", {aims.peers} peers"
    length = f"{aims.rounds} rounds" if aims.rounds is not None else f"{aims.tokens:,} tokens of each peer"
    rates = ", ".join(f"{rate:g}" for rate in aims.learning_rates)
    others = f"{len(aims.search_seeds)} other seed{'s' if len(aims.search_seeds) > 1 else ''}"
    seeds = f"{len(aims.seeds)} seed{'s' if len(aims.seeds) > 1 else ''}"
    return f"{aims.task}{peers}, {length}; {seeds}; the search tries {rates} as inner learning rate on {others}."


def _rows(plan: Plan, contestant: Contestant, known: Known) -> Iterator[Row]:
    """One, or one for each link that decides what it learns."""
    chosen = plan.chosen(contestant, known)
    if not chosen.over or chosen.place is None:
        yield _row(plan, contestant, None, None, [], known)
        return
    reported = list(plan.reported(contestant, chosen))
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
    settings, wanted = {} if place is None else _told(place), len(plan.study.study.seeds)
    return Row(contestant.name, role, dict(contestant.point), link, settings, edge, runs, wanted, of)


def _searched(plan: Plan, contestant: Contestant, known: Known) -> Iterator[Row]:
    tried: dict[Place, dict[int, Run]] = {}
    for place, seed, cell in plan.search_cells(contestant, known):
        if cell.id in known:
            tried.setdefault(place, {})[seed] = _run(cell, known[cell.id], plan.study.link)
    wanted = len(plan.study.study.search_seeds)
    for place, runs in tried.items():
        role: Any = _role(plan, contestant)
        yield Row(contestant.name, role, dict(contestant.point), None, _told(place), False, runs, wanted)


def _role(plan: Plan, contestant: Contestant) -> str:
    references = [one.name for one in plan.study.entries if isinstance(one, Reference)]
    return "reference" if contestant.entry in references else "method"


def _told(place: Place) -> dict[str, object]:
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


def write_report(store: Store, found: Found) -> None:
    """Tables and figures, anew. DiskError where they cannot be written."""
    store.write("tables.md", tables_md(found))
    store.write("results.csv", results_csv(found))
    store.write("curves.csv", curves_csv(found))
    with disk_errors(f"writing {store.folder / FIGURES}"):
        draw(found, store.folder / FIGURES)
