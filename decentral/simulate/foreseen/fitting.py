"""The terms that fit a line: the preset that is justified for it, with inner steps enough to compute nearly always."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from decentral.manifest import Manifest
from decentral.manifest.presets import Class, Justified, class_of, faster, justified, no_faster
from decentral.optimizers import presets
from decentral.simulate.foreseen.round_time import RoundTime, steps_for, time_of_round

__all__ = ["TARGET", "Circumstances", "Fit", "fitting"]

TARGET = 0.95  # of the time in inner steps
MARGIN = 1.1  # times the wait: simulated swarms of the four classes wait for up to 1.06 times what arithmetic says
MOST = 500  # H: what DiLoCo's own paper trains with; with 1,000 it ended 2.9 % worse in perplexity than with 50
Make = Callable[[str, int], Manifest]  # preset, H


@dataclass(frozen=True, slots=True, kw_only=True)
class Circumstances:
    """What a run is to be made for."""

    rate: float  # bytes/s of every peer's line, each way
    peers: int
    num_parameters: int
    step_seconds: float  # of an inner step


@dataclass(frozen=True, slots=True)
class Fit:
    """Terms, and what is expected of them."""

    preset: str
    manifest: Manifest
    time: RoundTime
    link: Class
    known: Justified | None
    asked: bool  # for this preset, whatever the line
    instead_of: Fit | None = None  # the line's own, for which the run is too short, or the model too small

    @property
    def is_shown(self) -> bool:
        """Whether somebody showed that it trains well with so many inner steps."""
        return self.known is not None and self.time.steps <= self.known.shown

    @property
    def rounds(self) -> float:
        """That the run has."""
        run = self.manifest.run
        return run.rounds if run.minutes is None else min(run.rounds, 60 * run.minutes / self.time.seconds)

    @property
    def lasts(self) -> bool:
        """Whether the run has as many rounds as the preset should have."""
        return self.known is None or self.rounds >= self.known.rounds

    @property
    def reaches(self) -> bool:
        """Whether enough of the time is computing."""
        return self.time.share >= TARGET

    @property
    def is_unhindered(self) -> bool:
        """Whether that takes no more inner steps than it was shown with, and it was shown to be better then."""
        return self.is_shown and self.known is not None and bool(self.known.unhindered)


def fitting(make: Make, given: Circumstances, *, preset: str | None = None, steps: int | None = None) -> Fit:
    """The first preset that computes enough with as many inner steps as are justified for it, else the best of them.

    Tried are that of the line's class, then those of slower ones; or ``preset`` alone, and ``steps`` alone. Where the
    run is too short for what is found, one of a faster class that computes enough, too, sends more in its few rounds;
    and where the model is small, one of a faster class may compute enough with as few inner steps as it wants.
    """
    link = class_of(given.rate)
    if preset is not None:
        return replace(_fit(make, given, link, preset, steps), asked=True)
    slower = [_fit(make, given, link, name, steps) for name in no_faster(link)]
    found = next((fit for fit in slower if fit.reaches), None)
    if found is None:
        return max(slower, key=lambda fit: fit.time.share)
    denser = [_fit(make, given, link, name, steps) for name in faster(link)]
    fitting_too = (fit for fit in denser if fit.reaches and fit.lasts and (fit.is_unhindered or not found.lasts))
    better = next(fitting_too, None)
    return found if better is None else replace(better, instead_of=found)


def _fit(make: Make, given: Circumstances, link: Class, preset: str, steps: int | None) -> Fit:
    known = justified(preset)
    fragments = presets()[preset].fragments if preset in presets() else 1
    least = fragments if known is None else known.least
    manifest = make(preset, steps or fragments * (MOST // fragments))
    time = time_of_round(manifest, given.num_parameters, given.peers, given.rate, given.step_seconds)
    if steps is None:
        longer = replace(time, wait=MARGIN * time.wait)
        fewest = steps_for(
            longer, given.step_seconds, TARGET, max(least, fragments * (1 + manifest.outer.overlap)), MOST
        )
        manifest, time = make(preset, fewest), time.with_steps(fewest)
    return Fit(preset, manifest, time, link, known, asked=False)
