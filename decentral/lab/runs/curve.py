"""The curve of a run: at some of its rounds, what was spent and what was reached."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

__all__ = ["Curve", "Looks", "Point"]


@dataclass(frozen=True, slots=True)
class Point:
    """Where a run is. Bytes are of the small model."""

    step: float  # inner steps that a peer has made, mean over peers
    tokens: float  # that it has seen
    rounds: int  # exchanges so far, each of one fragment
    nbytes: float  # that it has sent
    seconds: float  # virtual: of a cell without a world those of its inner steps, a second each
    loss: float | None  # None: not finite
    loss_of_mean: float | None = None  # see HeldOut; None: all peers are alike


@dataclass(frozen=True, slots=True)
class Curve:
    """A whole run."""

    points: tuple[Point, ...]
    peak_nbytes: float  # most that one peer sent at one inner step
    numel: int  # parameters of the model

    def columns(self) -> dict[str, list[Any]]:  # Any: numbers, or None
        """Its points for JSON, name by name; what no point has is left out."""
        found = {one.name: [getattr(point, one.name) for point in self.points] for one in fields(Point)}
        return {name: column for name, column in found.items() if any(value is not None for value in column)}

    @classmethod
    def of(cls, columns: Mapping[str, Sequence[Any]], peak_nbytes: float, numel: int) -> Curve:  # Any: as above
        """From what ``columns`` gave. ValueError where they have other lengths, TypeError for other names."""
        points = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        return cls(tuple(Point(**{"loss": None} | point) for point in points), peak_nbytes, numel)

    @property
    def diverged(self) -> bool:
        """Whether it ended in no number."""
        return self.points[-1].loss is None


class Looks:
    """When the loss is measured: at the first round at or behind each of ``points`` even parts of the ``steps``."""

    def __init__(self, steps: int, points: int) -> None:
        self._steps, self._points, self._made = steps, points, 0

    def due(self, step: float) -> bool:
        """Whether to look after so many inner steps of a peer; asked in their order."""
        behind = int(step * self._points / self._steps + 1e-9)
        due, self._made = behind > self._made, max(behind, self._made)
        return due
