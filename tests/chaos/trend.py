"""Whether something grows: least squares over many processes that each have a level of their own."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Series = Sequence[tuple[float, float]]  # (seconds, value) of one process


@dataclass(frozen=True, slots=True)
class Trend:
    """A common slope per hour, its standard error, and what it was fitted to."""

    per_hour: float
    error: float
    hours: float  # of all processes together
    processes: int


def trend(series: Mapping[object, Series], *, skip: float, least: float) -> Trend | None:
    """Slope of the values of all processes after their first ``skip`` seconds; None without one that lived ``least`` s.

    Every process has its own intercept (a fixed effect), so a restart is no step. The standard error allows for
    samples that depend on their neighbours: each process counts as its number of ``BLOCK`` s blocks.
    """
    settled = {key: _after(rows, skip) for key, rows in series.items()}
    long = {key: rows for key, rows in settled.items() if len(rows) > 2 and rows[-1][0] - rows[0][0] >= least}
    if not long:
        return None
    centred = [pair for rows in long.values() for pair in _centred(rows)]
    spread = sum(t * t for t, _ in centred)
    slope = sum(t * value for t, value in centred) / spread
    noise = sum((value - slope * t) ** 2 for t, value in centred)
    seconds = sum(rows[-1][0] - rows[0][0] for rows in long.values())
    independent = max(1.0, seconds / BLOCK - len(long) - 1)
    error = math.sqrt(noise / (independent * spread))
    return Trend(3600 * slope, 3600 * error, seconds / 3600, len(long))


BLOCK = 30.0  # s after which a sample of memory says something new


def _after(rows: Series, skip: float) -> list[tuple[float, float]]:
    return [(at, value) for at, value in rows if at - rows[0][0] >= skip]


def _centred(rows: Series) -> list[tuple[float, float]]:
    middle = sum(at for at, _ in rows) / len(rows)
    level = sum(value for _, value in rows) / len(rows)
    return [(at - middle, value - level) for at, value in rows]
