"""Measured cells as a grid of rules by attacks: the worst attack of each rule, and what a rule costs without any.

The score of a rule is ByzFL's: of each attack the mean over seeds, and of those means the least.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import nan, sqrt
from statistics import fmean, stdev

from scipy import stats  # type: ignore[import-untyped]

from experiments.attacks.records import NONE, Result

BASE = "mean"  # the rule that a tax is counted against
CONFIDENCE = 0.9


@dataclass(frozen=True)
class Worst:
    """The attack that leaves a rule least, its mean accuracy, and the lowest of a single seed under any attack."""

    attack: str
    accuracy: float
    lowest: float


@dataclass(frozen=True)
class Tax:
    """A mean of paired differences and half of its 90 % t interval, over so many seeds. Without a pair it is nan."""

    mean: float
    half: float
    seeds: int

    @classmethod
    def of(cls, differences: list[float]) -> Tax:
        """Of one difference alone the interval has no bounds."""
        count = len(differences)
        if count < 2:
            return cls(fmean(differences) if differences else nan, nan, count)
        quantile = float(stats.t.ppf(0.5 + CONFIDENCE / 2, count - 1))
        return cls(fmean(differences), quantile * stdev(differences) / sqrt(count), count)

    def within(self, bound: float) -> bool | None:
        """Whether all of the interval is at most ``bound``; None where it lies on both sides, or has no bounds."""
        if self.mean + self.half <= bound:
            return True
        return False if self.mean - self.half > bound else None


@dataclass(frozen=True)
class Grid:
    """Results of one setting, by rule, attack and seed. ``seeds``: those in which every rule met every attack."""

    alpha: float
    rounds: int
    rules: list[str]
    attacks: list[str]
    seeds: list[int]
    found: dict[tuple[str, str, int], Result]

    @classmethod
    def of(cls, results: Iterable[Result], alpha: float, rounds: int) -> Grid:
        """In the order in which the file first names rules and attacks; the last of two results of a cell counts."""
        mine = [one for one in results if (one.cell.alpha, one.cell.rounds) == (alpha, rounds)]
        found = {(one.cell.rule, one.cell.attack, one.cell.seed): one for one in mine}
        rules, attacks = list(dict.fromkeys(key[0] for key in found)), list(dict.fromkeys(key[1] for key in found))
        attacks = [attack for attack in attacks if attack != NONE]
        numbers = sorted({key[2] for key in found}) if attacks else []
        whole = [n for n in numbers if all((rule, attack, n) in found for rule in rules for attack in attacks)]
        return cls(alpha, rounds, rules, attacks, whole, found)

    @classmethod
    def all_of(cls, results: list[Result]) -> list[Grid]:
        """One for each setting, in the order in which the file first names them."""
        settings = dict.fromkeys((one.cell.alpha, one.cell.rounds) for one in results)
        return [cls.of(results, alpha, rounds) for alpha, rounds in settings]

    def accuracies(self, rule: str, attack: str) -> list[float]:
        """Of whole seeds, in their order; those that were not run are left out."""
        keys = [(rule, attack, seed) for seed in self.seeds]
        return [self.found[key].accuracy for key in keys if key in self.found]

    def worst(self, rule: str) -> Worst:
        """Over attacks; ValueError where no seed is whole."""
        means = {attack: fmean(self.accuracies(rule, attack)) for attack in self.attacks if self.seeds}
        attack = min(means, key=means.__getitem__)
        return Worst(attack, means[attack], min(min(self.accuracies(rule, one)) for one in self.attacks))

    def ranked(self) -> list[str]:
        """Rules, the best in its worst case first."""
        return sorted(self.rules, key=lambda rule: -self.worst(rule).accuracy)

    def tax(self, rule: str) -> Tax:
        """Percent of the mean's accuracy that the rule loses where all are honest."""
        return Tax.of([100 * (1 - ours.accuracy / base.accuracy) for ours, base in self._pairs(rule)])

    def loss_tax(self, rule: str) -> Tax:
        """Percent by which the loss is above the mean's where all are honest, of seeds in which both are finite."""
        pairs = [(ours.loss, base.loss) for ours, base in self._pairs(rule)]
        return Tax.of([100 * (ours / base - 1) for ours, base in pairs if ours is not None and base])

    def _pairs(self, rule: str) -> list[tuple[Result, Result]]:
        seeds = sorted({seed for _, _, seed in self.found})
        pairs = [((rule, NONE, seed), (BASE, NONE, seed)) for seed in seeds]
        return [(self.found[ours], self.found[base]) for ours, base in pairs if {ours, base} <= self.found.keys()]
