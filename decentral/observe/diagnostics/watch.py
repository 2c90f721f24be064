"""Tells when a figure leaves its band and when it is back: after three rounds running each time, so that one odd round
is nothing, and a figure near its bound does not come and go.

A round that does not have the figure counts for neither: in a streaming run, say, or where a peer was away.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from decentral.observe.diagnostics.bands import BANDS, Band
from decentral.replica.figures import Figures

__all__ = ["ROUNDS", "Crossing", "Watch"]

ROUNDS = 3  # running, out until a warning and in until the all-clear


@dataclass(frozen=True, slots=True)
class Crossing:
    """A figure that has left its band, or is back."""

    outer_step: int
    figure: str
    value: float
    low: float | None  # None: no such bound
    high: float | None
    is_out: bool
    why: str  # the probable cause, and what to do; "" when it is back


@dataclass(slots=True)
class _Side:
    """On which side a figure is taken to be, and for how many rounds it was on the other one."""

    is_out: bool = False
    against: int = 0


class Watch:
    """Remembers where each figure is. One peer's."""

    def __init__(self, bands: Iterable[Band] = BANDS) -> None:
        self._bands = tuple(bands)
        self._sides = {band.figure: _Side() for band in self._bands}

    @property
    def out(self) -> tuple[str, ...]:
        """The figures that are out of their bands now."""
        return tuple(figure for figure, side in self._sides.items() if side.is_out)

    def see(self, figures: Figures) -> list[Crossing]:
        """What changed with the figures of one more round."""
        found = (self._look(band, figures) for band in self._bands if self._is_told(band, figures))
        return [crossing for crossing in found if crossing is not None]

    def _is_told(self, band: Band, figures: Figures) -> bool:
        return band.figure in figures.values and figures.rounds >= band.after

    def _look(self, band: Band, figures: Figures) -> Crossing | None:
        value, side = figures.values[band.figure], self._sides[band.figure]
        low, high = band.bounds(figures.contributors)
        is_out = not low <= value <= high
        side.against = side.against + 1 if is_out != side.is_out else 0
        if side.against < ROUNDS:
            return None
        side.is_out, side.against = is_out, 0
        bounds = (_finite(low), _finite(high))
        return Crossing(figures.outer_step, band.figure, value, *bounds, is_out, band.cause(value) if is_out else "")


def _finite(bound: float) -> float | None:
    return bound if math.isfinite(bound) else None
