"""Two rows against each other, as a study names them: at equal tokens, and at equal hours on each link.

At equal hours each seed's two runs are compared when the faster one ends: the slower one's loss there lies on the
straight line between two points of its curve. A difference is of one seed, as ever.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from decentral.lab.report.comparing import Compared, paired, trouble
from decentral.lab.report.rows import Found, Row, Run, of_base

__all__ = ["AtHours", "Pair", "pairs"]


@dataclass(frozen=True, slots=True)
class AtHours:
    """Of one link."""

    hours: float  # mean over the seeds of where they are compared
    compared: Compared


@dataclass(frozen=True, slots=True)
class Pair:
    """``a`` less ``b``, in shares of b's mean loss: below zero a is better."""

    a: Row
    b: Row
    at_tokens: Compared | None  # None: nothing to compare
    at_hours: Mapping[str, AtHours] = field(default_factory=dict)  # by link


def pairs(found: Found) -> list[Pair]:
    """All of a study, point by point."""
    return [
        _pair(found, row, other)
        for point in found.points
        for a, b in found.compare
        for row in found.at(point)
        if row.name == a and (other := of_base(row, found.rows, b)) is not None
    ]


def _pair(found: Found, a: Row, b: Row) -> Pair:
    told = trouble(a) or trouble(b)
    hours = {link: at for link in found.links if (at := _at_hours(a, b, link, found.margin, told)) is not None}
    return Pair(a, b, paired(a.losses, b.losses, found.margin, told), hours)


def _at_hours(a: Row, b: Row, link: str, margin: float, told: str) -> AtHours | None:
    met = {seed: one for seed, one in _met(a, b, link)}
    if not met:
        return None
    mine, other = ({seed: losses[place] for seed, (_, losses) in met.items()} for place in (0, 1))
    found = paired(mine, other, margin, told)
    mean = math.fsum(hours for hours, _ in met.values()) / len(met)
    return None if found is None else AtHours(mean, found)


def _met(a: Row, b: Row, link: str) -> Iterator[tuple[int, tuple[float, tuple[float, float]]]]:
    """By seed the hours at which the faster one ends, and the losses of both there."""
    for seed in sorted(a.losses.keys() & b.losses.keys()):
        runs = a.runs[seed], b.runs[seed]
        if all(link in run.hours for run in runs):
            hours = min(run.hours[link][-1] for run in runs)
            yield seed, (hours, (_loss_at(runs[0], link, hours), _loss_at(runs[1], link, hours)))


def _loss_at(run: Run, link: str, hours: float) -> float:
    assert run.outcome.curve is not None, "a run with a loss has one"
    losses = [math.nan if point.loss is None else point.loss for point in run.outcome.curve.points]
    return float(np.interp(hours, run.hours[link], losses))
