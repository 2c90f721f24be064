"""Figures of a swarm held to their bands: what is usual, what is said when one leaves it, when it is back."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from decentral.replica.figures import (
    DEBT_RATIO,
    LOSS_DISPERSION,
    MEAN_COSINE,
    NEVER_SENT,
    NORM_DISPERSION,
    REPLICA_DISTANCE,
    REPLICA_VARIANCE,
    Figures,
)

__all__ = ["BANDS", "ROUNDS", "Band", "Crossing", "Watch", "back_sentence", "in_words", "warning"]

# ---- where each figure belongs ----
#
# Between which bounds it stays in a healthy swarm, and the probable cause where it does not.
#
# The bounds are for warnings that are worth a person's time: each lies well outside of what healthy runs showed
# (docs/diagnostics.md has the numbers), and none of them changes what the run does.


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """Where one figure belongs. ``says`` and causes complete a sentence for people."""

    figure: str
    says: str  # the figure in words; ``{value}`` is where its value goes
    low: float = -math.inf
    high: float = math.inf
    among_all: bool = False  # ``low`` is of two contributors; of K it is K - 1 times nearer to 0
    after: int = 0  # rounds of each fragment before which it is not looked at: it begins far out, and comes in
    if_low: str = ""  # probable cause, and what to do
    if_high: str = ""

    def bounds(self, contributors: int) -> tuple[float, float]:
        """Lowest and highest value in the band."""
        return self.low / max(1, contributors - 1) if self.among_all else self.low, self.high

    def cause(self, value: float) -> str:
        """Why a value outside of the band is there, probably."""
        return self.if_high if value > self.high else self.if_low


BANDS = (
    Band(
        figure=NORM_DISPERSION,
        says="the peers' updates differ in length by {value:.0%} of their mean",
        high=0.5,
        if_high="one of them has another learning rate, batch size or data; compare settings, and see outliers in "
        'decentral logs; norm_clip = "median" under [outer] shortens what is far too long',
    ),
    Band(
        figure=LOSS_DISPERSION,
        says="the peers' losses differ by {value:.0%} of their mean",
        high=0.25,
        if_high="their data differ in kind, or one of them diverges; compare data and learning rates",
    ),
    Band(
        figure=MEAN_COSINE,
        says="the peers' updates have a mean cosine of {value:.2f}",
        low=-0.5,  # the mean of K updates then has half the energy that independent ones would have: 1 + (K - 1) c
        high=0.95,
        among_all=True,
        if_low="they undo one another's steps: their data differ so much that each goes to an optimum of its own; make "
        "fewer inner steps between rounds, or share the data more evenly",
        if_high="all pull the anchor back, as the outer learning rate or momentum is too high, or all train on the "
        "same data in the same order, so that more peers bring nothing (peer.seed, peer.shard)",
    ),
    Band(
        figure=DEBT_RATIO,
        says="this peer owes {value:.0f} times what it learnt in a round",
        high=30.0,
        if_high="the compressor sends too little for its error feedback, so that what is sent is stale; keep more "
        "values, or let the debt decay (feedback under [compressor]) in the next run",
    ),
    Band(
        figure=NEVER_SENT,
        says="{value:.0%} of the parameters were never sent by anybody",
        high=0.5,
        after=200,
        if_high="the compressor keeps the same few values each round, or most parameters get no gradient (unused "
        "experts, rare tokens); keep more values, or add a feedback under [compressor]",
    ),
    Band(
        figure=REPLICA_VARIANCE,
        says="the replicas have a variance of {value:.2g} of their own square",
        high=0.02,  # a distance of 20 % of a replica's length
        if_high="pairs pull them together less than training drives them apart: the learning rate is too high, there "
        "are too many inner steps, or pairs fail (decentral logs --event pair); lower one of the first two",
    ),
)


# ---- leaving a band, and coming back ----
#
# Told after three rounds running each time, so that one odd round is nothing, and a figure near its bound does not come
# and go.
#
# A round that does not have the figure counts for neither: in a streaming run, say, or where a peer was away.

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


# ---- figures in words ----
#
# The warning when one leaves its band, and the line of ``decentral status``.

_SAYS = {band.figure: band.says for band in BANDS}
_SHORT = {
    NORM_DISPERSION: "norms differ by {:.0%}",
    LOSS_DISPERSION: "losses differ by {:.0%}",
    MEAN_COSINE: "mean cosine {:.3f}",
    DEBT_RATIO: "owed {:.2g} x a round's update",
    NEVER_SENT: "{:.0%} never sent",
    REPLICA_DISTANCE: "replicas {:.2%} apart",
    REPLICA_VARIANCE: "variance {:.2g}",
}


def warning(figure: str, value: float, why: str, outer_step: int) -> str:
    """What is said when a figure left its band."""
    said = _SAYS[figure].format(value=value) if figure in _SAYS else f"{figure} is {value:.3g}"
    return f"{said} (round {outer_step}); probably {why}"


def back_sentence(figure: str, value: float, outer_step: int) -> str:
    """What is said when it is back."""
    said = _SAYS[figure].format(value=value) if figure in _SAYS else f"{figure} is {value:.3g}"
    return f"{said} (round {outer_step}); that is usual again"


def in_words(values: Mapping[str, float]) -> str:
    """All figures in one line; of a name that this version does not know, the name."""
    return ", ".join(_SHORT.get(name, f"{name} {{:.3g}}").format(value) for name, value in values.items())
