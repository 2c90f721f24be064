"""The findings of a study as rows, and each row against a base: paired by seed, in shares of the base's mean loss.

A difference is of two methods on one seed, so what a seed does to both is out of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

import numpy as np

from decentral.lab.running import Outcome

__all__ = [
    "CONFIDENCE",
    "KINDS",
    "AtHours",
    "Compared",
    "Found",
    "Interval",
    "Pair",
    "Row",
    "Run",
    "Verdict",
    "compare",
    "compare_by_seed",
    "distances",
    "equivalence_p",
    "interval",
    "of_base",
    "pairs",
    "problems",
    "trouble",
    "verdict",
]


# ---- rows: a method at one point of the grid ----
#
# With its run on every seed.


KINDS: Final = ("alone", "data-parallel")  # of references, in the order of the tables


@dataclass(frozen=True, slots=True)
class Run:
    """A cell of a row."""

    cell: str  # its id
    outcome: Outcome
    hours: Mapping[str, Sequence[float]]  # by link, at each point of its curve

    @property
    def nbytes(self) -> float:
        """That one peer sent, of the small model."""
        return self.outcome.curve.points[-1].nbytes if self.outcome.curve is not None else 0.0


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the tables."""

    name: str
    role: Literal["method", "reference", "control"]
    point: Mapping[str, object]  # of the grid
    link: str | None  # where it holds for one of them only
    settings: Mapping[str, object]  # that the search chose; empty: nothing gave a number
    at_the_edge: bool  # the chosen rate is the least or the largest that was tried
    runs: Mapping[int, Run]  # by seed, those that are there
    wanted: int  # seeds
    of: str = ""  # of a control: its method

    @property
    def label(self) -> str:
        """As tables and figures call it."""
        return self.name if self.link is None else f"{self.name} @ {self.link}"

    @property
    def words(self) -> str:
        """Its settings."""
        return ", ".join(f"{key} {value}" for key, value in self.settings.items())

    @property
    def losses(self) -> dict[int, float]:
        """By seed, those that are numbers."""
        found = {seed: run.outcome.loss for seed, run in self.runs.items()}
        return {seed: loss for seed, loss in found.items() if loss is not None}

    @property
    def troubles(self) -> str:
        """Return what kept it from a number on every seed; empty where nothing did."""
        if not self.settings:
            return "no setting gave a number on every seed of the search"
        for status in ("failed", "diverged"):
            bad = [run.outcome for run in self.runs.values() if run.outcome.status == status]
            if bad:
                why = f": {bad[0].reason}" if bad[0].reason else ""
                return f"{status} on {len(bad)} of {self.wanted} seeds{why}"
        missing = self.wanted - len(self.runs)
        return f"{missing} of {self.wanted} seeds are not there yet" if missing else ""

    @property
    def curves(self) -> list[Run]:
        """The runs that came to their end."""
        return [run for run in self.runs.values() if run.outcome.loss is not None]


@dataclass(frozen=True, slots=True)
class Found:
    """All of a study, for its tables and figures."""

    name: str
    title: str  # what was trained, in one sentence
    unit: str  # of losses
    base: str
    margin: float
    links: tuple[str, ...]
    rows: tuple[Row, ...]
    compare: tuple[tuple[str, str], ...] = ()  # pairs of names, beside what is compared with the base
    searched: tuple[Row, ...] = field(default=())  # one for each setting that was tried, with the search's seeds
    references: Mapping[str, str] = field(default_factory=dict)  # the first of each kind: alone, data-parallel

    @property
    def points(self) -> list[Mapping[str, object]]:
        """Return the points of the grid, in order."""
        found: list[Mapping[str, object]] = []
        for row in self.rows:
            if row.point not in found:
                found.append(row.point)
        return found

    def at(self, point: Mapping[str, object]) -> list[Row]:
        """The rows of a point."""
        return [row for row in self.rows if row.point == point]


def of_base(row: Row, rows: Sequence[Row], base: str) -> Row | None:
    """The row that ``row`` is compared with: the base's at its point, and of its link where it has several."""
    same = [one for one in rows if one.name == base and one.point == row.point]
    return next((one for one in same if one.link == row.link), same[0] if same else None)


# ---- a row against training without an outer method ----


def distances(row: Row, found: Found, kind: str) -> dict[int, float]:
    """Return by seed its loss less that of the study's first reference of a kind; empty where there is none."""
    reference = of_base(row, found.rows, found.references.get(kind, ""))
    other = {} if reference is None else reference.losses
    return {seed: loss - other[seed] for seed, loss in row.losses.items() if seed in other}


# ---- a row against its base ----


@dataclass(frozen=True, slots=True)
class Compared:
    """A row's loss over its base's, less one."""

    seeds: int
    share: Interval
    equivalence_p: float
    word: str  # a verdict; or diverged, failed, missing


def compare(row: Row, base: Row | None, margin: float) -> Compared | None:
    """None: one of them has no loss, so that there is nothing to compare."""
    if base is None:
        return None
    return compare_by_seed(row.losses, base.losses, margin, trouble(row) or trouble(base))


def compare_by_seed(
    mine: Mapping[int, float], other: Mapping[int, float], margin: float, told: str = ""
) -> Compared | None:
    """Losses by seed against others; ``told``: the word where there is no verdict. None: no seed has both."""
    seeds = sorted(mine.keys() & other.keys())
    if not seeds:
        return None
    mean = math.fsum(other[seed] for seed in seeds) / len(seeds)
    shares = [(mine[seed] - other[seed]) / mean for seed in seeds]
    found = interval(shares)
    return Compared(len(seeds), found, equivalence_p(shares, margin), told or verdict(found, margin))


def trouble(row: Row) -> str:
    """Return why a row is not judged: one that lost a seed has left only what went well."""
    return row.troubles.partition(" ")[0] if row.troubles else ""


def problems(found: Found) -> list[str]:
    """Return what a reader must know first: controls that came out no worse, and rows without their numbers."""
    told = [line for row in found.rows if (line := _control(row, found.rows, found.margin))]
    return told + [f"{_where(row)}: {row.troubles}" for row in found.rows if row.troubles and row.role != "control"]


def _control(row: Row, rows: Sequence[Row], margin: float) -> str:
    """Empty: it came out worse, as it must."""
    if row.role != "control":
        return ""
    if row.troubles.startswith("diverged"):
        return ""
    against = compare(row, of_base(row, rows, row.of), margin)
    word = "not there" if against is None else against.word
    if word == "worse":
        return ""
    return f"control {_where(row)} is {word}, and it must be worse than {row.of}: trust no verdict of this study"


def _where(row: Row) -> str:
    point = ", ".join(f"{key} = {value}" for key, value in row.point.items())
    return f"{row.label} ({point})" if point else row.label


# ---- two rows that a study names ----
#
# At equal tokens, and at equal hours on each link: there each seed's two runs are compared when the faster one ends,
# and the slower one's loss lies on the straight line between two points of its curve.


@dataclass(frozen=True, slots=True)
class AtHours:
    """Figures of one link."""

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
    return Pair(a, b, compare_by_seed(a.losses, b.losses, found.margin, told), hours)


def _at_hours(a: Row, b: Row, link: str, margin: float, told: str) -> AtHours | None:
    met = {seed: one for seed, one in _met(a, b, link)}
    if not met:
        return None
    mine, other = ({seed: losses[place] for seed, (_, losses) in met.items()} for place in (0, 1))
    found = compare_by_seed(mine, other, margin, told)
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


# ---- intervals of differences, and verdicts ----
#
# Pure: numbers in, numbers out.
#
# The interval is Student's, of 90 %: two methods are equivalent at 5 % where it lies within the margin, which is what
# two one-sided tests (TOST) say.
#
# Source of TOST: Schuirmann, "A comparison of the two one-sided tests procedure and the power approach for assessing
# the equivalence of average bioavailability", 1987, doi:10.1007/BF01068419.

CONFIDENCE: Final = 0.9

Verdict = Literal["better", "worse", "tied", "undecided"]


@dataclass(frozen=True, slots=True)
class Interval:
    """An interval of a mean; from minus to plus infinity where one number tells nothing of how they spread."""

    mean: float
    low: float
    high: float

    def inside(self, margin: float) -> bool:
        """Return whether all of it is smaller than the margin, either way."""
        return -margin < self.low and self.high < margin


def interval(values: Sequence[float], confidence: float = CONFIDENCE) -> Interval:
    """Student's interval of the mean of at least one value."""
    mean, error = _mean_and_error(values)
    if math.isinf(error):
        return Interval(mean, -math.inf, math.inf)
    from scipy import stats

    half = float(stats.t.ppf((1 + confidence) / 2, len(values) - 1)) * error
    return Interval(mean, mean - half, mean + half)


def equivalence_p(values: Sequence[float], margin: float) -> float:
    """TOST: how likely a mean so near to zero is where the true one is at the margin or beyond."""
    mean, error = _mean_and_error(values)
    if math.isinf(error):
        return 1.0
    if error == 0:
        return 0.0 if abs(mean) < margin else 1.0
    from scipy import stats

    return float(stats.t.sf((margin - abs(mean)) / error, len(values) - 1))


def verdict(of: Interval, margin: float) -> Verdict:
    """Judge a difference in loss: below zero is better. One that is surely smaller than the margin is none."""
    if of.inside(margin):
        return "tied"
    if of.high < 0:
        return "better"
    return "worse" if of.low > 0 else "undecided"


def _mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """The mean, and its standard error: infinite of one value."""
    count = len(values)
    mean = math.fsum(values) / count
    if count < 2:
        return mean, math.inf
    return mean, math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (count - 1) / count)
