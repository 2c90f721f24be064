"""Which preset is justified for which line: ``justified.toml``, read. No torch."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from decentral.quantities import parse_rate

__all__ = ["ENOUGH_SEEDS", "Class", "Justified", "class_of", "classes", "faster", "justified", "no_faster"]

ENOUGH_SEEDS = 5  # of a table that shows that one method is better than another


@dataclass(frozen=True, slots=True)
class Class:
    """Lines of at most so much."""

    up_to: str  # as it is written: 20mbit
    preset: str
    why: str

    @property
    def rate(self) -> float:
        """Bytes per second."""
        return parse_rate(self.up_to)


@dataclass(frozen=True, slots=True)
class Justified:
    """With how many inner steps a preset is known to work, and from where."""

    least: int  # H
    shown: int  # H, the most with which it was shown to train well
    published: str
    table: str  # our own
    seeds: int  # of that table
    rounds: int = 0  # the fewest that a run should have
    short: Sequence[Mapping[str, float]] = ()  # rounds of a run at most, and the outer rate that is best for it
    unhindered: str = ""  # what speaks for it on a slower class's line where a model is so small that nobody waits

    def learning_rate(self, rounds: float) -> float | None:
        """The outer rate of a run of so many rounds; None: the preset's own."""
        return next((one["learning_rate"] for one in self.short if rounds <= one["rounds"]), None)

    @property
    def is_thin(self) -> bool:
        """Whether our own table is of too few seeds to tell methods apart."""
        return self.seeds < ENOUGH_SEEDS

    @property
    def evidence(self) -> str:
        """What stands behind it, thin or not."""
        seeds = f"{self.seeds} seed{'s' if self.seeds > 1 else ''}"
        thin = f", which is thin, as {ENOUGH_SEEDS} would be needed" if self.is_thin else ""
        return f"{self.published}; {self.table}: {seeds}{thin}"


def classes() -> list[Class]:
    """Slowest first."""
    return [Class(**one) for one in _document()["class"]]


def class_of(rate: float) -> Class:
    """The class of a line of ``rate`` bytes per second; a faster line than all of them is in the fastest."""
    known = classes()
    return next((one for one in known if rate <= one.rate), known[-1])


def no_faster(one: Class) -> list[str]:
    """The presets of this class and of all slower ones, each once, in the order in which they are tried."""
    known = classes()
    return list(dict.fromkeys(other.preset for other in reversed(known[: known.index(one) + 1])))


def faster(one: Class) -> list[str]:
    """The presets of the classes above this one that are not its own, slowest first."""
    known = classes()
    return [name for name in dict.fromkeys(other.preset for other in known[known.index(one) :]) if name != one.preset]


def justified(preset: str) -> Justified | None:
    """What is known of a preset; None where nothing is written down."""
    found = _document()["preset"].get(preset)
    return None if found is None else Justified(**found)


@cache
def _document() -> Mapping[str, Any]:  # Any: values of TOML
    return tomllib.loads(files("decentral.manifest").joinpath("justified.toml").read_text(encoding="utf-8"))
