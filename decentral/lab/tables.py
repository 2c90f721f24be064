"""Rows as text: tables.md for people, and the same as JSON."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from decentral.lab.comparing import (
    CONFIDENCE,
    KINDS,
    Compared,
    Found,
    Pair,
    Row,
    compare,
    distances,
    interval,
    of_base,
    pairs,
    problems,
)

__all__ = ["as_json", "pairs_json", "tables_md"]

_MORE = 1.05  # times the base's tokens, from which on it is said


def tables_md(found: Found) -> str:
    """Write a table for each point of the grid."""
    parts = [f"# {found.name}", found.title, _meaning(found)]
    if told := problems(found):
        parts.append("**Problems**\n\n" + "\n".join(f"- {line}" for line in told))
    elif any(row.role == "control" for row in found.rows):
        parts.append("Every control came out worse than its method, as it must.")
    for point in found.points:
        if point:
            parts.append("## " + ", ".join(f"{key} = {value}" for key, value in point.items()))
        parts.append(_table(found, found.at(point)))
    if found.compare:
        parts += ["## Pairs", _PAIRED, _pairs_table(found)]
    if edges := [row.label for row in found.rows if row.at_the_edge and row.role != "control"]:
        parts.append(
            "The best learning rate is at an edge of what was tried for "
            f"{', '.join(dict.fromkeys(edges))}: a wider list may find a better one."
        )
    parts += list(_more_tokens(found))
    return "\n\n".join(parts) + "\n"


def _more_tokens(found: Found) -> Iterator[str]:
    """Rows that no table should compare without this."""
    for row in found.rows:
        base = of_base(row, found.rows, found.base)
        mine, other = _tokens(row), 0.0 if base is None else _tokens(base)
        if other and mine > _MORE * other:
            times = f"{mine / other:.1f} times the tokens of {found.base}"
            yield f"{row.label} saw {times}: its rounds take longer there than its inner steps."


def _meaning(found: Found) -> str:
    return (
        f"Loss: {found.unit}, mean of the seeds and half of its {CONFIDENCE:.0%} interval. Against `{found.base}`: the "
        f"mean of the differences on each seed, in % of its loss, with Student's {CONFIDENCE:.0%} interval. tied: it "
        f"lies within {found.margin:.2%} (TOST at 5 %); better, worse: it does not hold 0; undecided: neither. "
        "No correction for the number of rows. To alone, to data-parallel: the loss less that of one peer which trains "
        "as many steps alone, and less that of synchronous data-parallel training on the same tokens, by seed; below 0 "
        "is better. Bytes: that one peer sent of the small model; peak: at one inner step."
    )


def _table(found: Found, rows: Sequence[Row]) -> str:
    gossips = any(_of_mean(row) for row in rows)
    heads = ["", "settings", "loss", *(["loss of the mean model"] if gossips else []), f"against {found.base}, %"]
    heads += ["verdict", *(f"to {kind}" for kind in KINDS), "tokens", "bytes", "peak"]
    heads += [f"hours, {link}" for link in found.links]
    lines = [heads, ["---"] * len(heads)]
    for row in rows:
        against = compare(row, of_base(row, rows, found.base), found.margin)
        cells = [_name(row), row.words, _spread(list(row.losses.values()))]
        cells += [_spread(_of_mean(row)) or "-"] if gossips else []
        cells += [*_against(row, against, found.base), *(_distance(row, found, kind) for kind in KINDS)]
        cells += [*_spent(row), *(_hours(row, link) for link in found.links)]
        lines.append(cells)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


_PAIRED = (
    "The first against the second, in % of the second's loss, paired by seed as above. At equal hours: when the faster "
    "one of each seed ends, with straight lines between the points of the other's curve."
)


def _pairs_table(found: Found) -> str:
    lines = [["", "at equal tokens, %", "verdict", *(f"at equal hours, {link}, %" for link in found.links)]]
    lines.append(["---"] * len(lines[0]))
    for pair in pairs(found):
        point = ", ".join(f"{key} = {value}" for key, value in pair.a.point.items())
        name = f"{pair.a.label} against {pair.b.label}" + (f" ({point})" if point else "")
        lines.append([name, *_against(pair.a, pair.at_tokens, ""), *(_at_hours(pair, link) for link in found.links)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _at_hours(pair: Pair, link: str) -> str:
    at = pair.at_hours.get(link)
    return "-" if at is None else f"{_share(at.compared)} {at.compared.word} at {at.hours:.3g} h"


def _name(row: Row) -> str:
    return row.label if row.role == "method" else f"{row.label} ({row.role})"


def _spread(values: Sequence[float], sign: str = "") -> str:
    if not values:
        return ""
    found = interval(values)
    half = found.high - found.mean
    return f"{found.mean:{sign}.4f}" + (f" ± {half:.4f}" if math.isfinite(half) else "")


def _distance(row: Row, found: Found, kind: str) -> str:
    """Empty for the reference itself, and where a loss is missing."""
    if kind not in found.references:
        return "no such reference"
    return "" if row.name == found.references[kind] else _spread(list(distances(row, found, kind).values()), "+")


def _against(row: Row, against: Compared | None, base: str) -> list[str]:
    if row.name == base:
        return ["", row.troubles]
    if against is None:
        return ["", row.troubles or "nothing to compare with"]
    return [_share(against), against.word]


def _share(against: Compared) -> str:
    share = against.share
    span = f" [{100 * share.low:+.2f}, {100 * share.high:+.2f}]" if math.isfinite(share.low) else ""
    return f"{100 * share.mean:+.2f}{span}"


def _spent(row: Row) -> list[str]:
    runs = row.curves
    if not runs:
        return ["", "", ""]
    peaks = [run.outcome.curve.peak_nbytes for run in runs if run.outcome.curve is not None]
    mean = math.fsum(run.nbytes for run in runs) / len(runs)
    return [f"{_tokens(row):,.0f}", _shown(mean), _shown(max(peaks))]


def _tokens(row: Row) -> float:
    """That a peer saw, mean of the seeds."""
    tokens = [run.outcome.curve.points[-1].tokens for run in row.curves if run.outcome.curve is not None]
    return math.fsum(tokens) / len(tokens) if tokens else 0.0


def _shown(nbytes: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= size:
            return f"{nbytes / size:.3g} {unit}"
    return f"{nbytes:.0f} B"


def _hours(row: Row, link: str) -> str:
    hours = [run.hours[link][-1] for run in row.curves if link in run.hours]
    return f"{math.fsum(hours) / len(hours):.3g}" if hours else "-"


def _of_mean(row: Row) -> list[float]:
    """The losses of the mean model, of peers that are not alike."""
    last = [run.outcome.curve.points[-1] for run in row.curves if run.outcome.curve is not None]
    return [point.loss_of_mean for point in last if point.loss_of_mean is not None]


def as_json(found: Found) -> list[dict[str, object]]:
    """The rows of the tables."""
    return [_row_json(row, found) for row in found.rows]


def _row_json(row: Row, found: Found) -> dict[str, object]:
    told: dict[str, object] = {"name": row.name, "role": row.role, "point": dict(row.point), "link": row.link}
    told |= {"settings": dict(row.settings), "losses": row.losses, "trouble": row.troubles}
    told |= {"nbytes": [run.nbytes for run in row.curves]}
    told["hours"] = {link: hours[-1] for run in row.curves[:1] for link, hours in run.hours.items()}
    for kind in KINDS:  # None: there is nothing to be apart from
        apart = list(distances(row, found, kind).values())
        told[f"to_{kind.replace('-', '_')}"] = interval(apart).mean if apart else None
    return told | _comparison_json(compare(row, of_base(row, found.rows, found.base), found.margin))


def _comparison_json(against: Compared | None) -> dict[str, object]:
    if against is None:
        return {}
    share = against.share
    low, high = (value if math.isfinite(value) else None for value in (share.low, share.high))
    told: dict[str, object] = {"share": share.mean, "low": low, "high": high}
    return told | {"equivalence_p": against.equivalence_p, "verdict": against.word}


def pairs_json(found: Found) -> list[dict[str, object]]:
    """The pairs that the study names."""
    return [_pair_json(pair) for pair in pairs(found)]


def _pair_json(pair: Pair) -> dict[str, object]:
    told: dict[str, object] = {"a": pair.a.label, "b": pair.b.label, "point": dict(pair.a.point)}
    hours = {link: {"hours": at.hours, **_comparison_json(at.compared)} for link, at in pair.at_hours.items()}
    return told | {"tokens": _comparison_json(pair.at_tokens), "hours": hours}
