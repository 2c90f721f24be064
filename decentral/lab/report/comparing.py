"""Rows against a base: paired by seed, in shares of the base's mean loss."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from decentral.lab.report.rows import Found, Row, of_base
from decentral.lab.report.statistics import Interval, equivalence_p, interval, verdict

__all__ = ["Compared", "compared", "paired", "problems", "trouble"]


@dataclass(frozen=True, slots=True)
class Compared:
    """A row's loss over its base's, less one."""

    seeds: int
    share: Interval
    equivalence_p: float
    word: str  # a verdict; or diverged, failed, missing


def compared(row: Row, base: Row | None, margin: float) -> Compared | None:
    """None: one of them has no loss, so that there is nothing to compare."""
    if base is None:
        return None
    return paired(row.losses, base.losses, margin, trouble(row) or trouble(base))


def paired(mine: Mapping[int, float], other: Mapping[int, float], margin: float, told: str = "") -> Compared | None:
    """Losses by seed against others; ``told``: the word where there is no verdict. None: no seed has both."""
    seeds = sorted(mine.keys() & other.keys())
    if not seeds:
        return None
    mean = math.fsum(other[seed] for seed in seeds) / len(seeds)
    shares = [(mine[seed] - other[seed]) / mean for seed in seeds]
    found = interval(shares)
    return Compared(len(seeds), found, equivalence_p(shares, margin), told or verdict(found, margin))


def trouble(row: Row) -> str:
    """One that lost a seed is not judged by the others: what is left is what went well."""
    return row.troubles.partition(" ")[0] if row.troubles else ""


def problems(found: Found) -> list[str]:
    """What a reader must know first: controls that came out no worse, and rows without their numbers."""
    told = [line for row in found.rows if (line := _control(row, found.rows, found.margin))]
    return told + [f"{_where(row)}: {row.troubles}" for row in found.rows if row.troubles and row.role != "control"]


def _control(row: Row, rows: Sequence[Row], margin: float) -> str:
    """Empty: it came out worse, as it must."""
    if row.role != "control":
        return ""
    if row.troubles.startswith("diverged"):
        return ""
    against = compared(row, of_base(row, rows, row.of), margin)
    word = "not there" if against is None else against.word
    if word == "worse":
        return ""
    return f"control {_where(row)} is {word}, and it must be worse than {row.of}: trust no verdict of this study"


def _where(row: Row) -> str:
    point = ", ".join(f"{key} = {value}" for key, value in row.point.items())
    return f"{row.label} ({point})" if point else row.label
