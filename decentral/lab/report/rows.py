"""What a study found, line by line: a method at one point of the grid, with its run on every seed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from decentral.lab.runs.running import Outcome

__all__ = ["Found", "Row", "Run", "of_base"]


@dataclass(frozen=True, slots=True)
class Run:
    """One cell of a row."""

    cell: str  # its id
    outcome: Outcome
    hours: Mapping[str, Sequence[float]]  # by link, at each point of its curve

    @property
    def nbytes(self) -> float:
        """That one peer sent, of the small model."""
        return self.outcome.curve.points[-1].nbytes if self.outcome.curve is not None else 0.0


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the tables."""

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
    def told(self) -> str:
        """Its settings."""
        return ", ".join(f"{key} {value}" for key, value in self.settings.items())

    @property
    def losses(self) -> dict[int, float]:
        """By seed, those that are numbers."""
        found = {seed: run.outcome.loss for seed, run in self.runs.items()}
        return {seed: loss for seed, loss in found.items() if loss is not None}

    @property
    def troubles(self) -> str:
        """What kept it from a number on every seed; empty: nothing."""
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

    @property
    def points(self) -> list[Mapping[str, object]]:
        """Of the grid, in order."""
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
