"""ALIE and IPM with the factor that moves the result of the rule in use furthest from the honest mean.

factor = argmax |rule(x_1 .. x_K, x, .. x) - mean(x_i)|, by a line search: from 0 in steps that double while it gets
further, then in steps that shrink by ``ratio``, ``evaluations`` in all.

What differs from ByzFL. Its ALIE searches on one side, the one that the paper does not use; here both sides are
searched. The factors of the fixed attacks are tried, too, so that no optimised attack is the weaker one.

Source: Shejwalkar, Houmansadr, "Manipulating the Byzantine: Optimizing Model Poisoning Attacks and Defenses for
Federated Learning", NDSS 2021; the search and its constants from González et al., "ByzFL: Research Framework for Robust
Federated Learning", 2025, arXiv:2505.24802.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from decentral.errors import ConfigError
from decentral.lab.attacks.alie import ALIE, shift
from decentral.lab.attacks.attack import Attack, Rule, alike, distance_from_honest
from decentral.lab.attacks.ipm import IPM, reversal
from decentral.optimizers.base import key

__all__ = ["OptimisedALIE", "OptimisedIPM", "line_search"]

FIRST_STEP, RATIO = 10.0, 0.8  # ByzFL's
Line = tuple[Tensor, Tensor]  # where what is sent starts (N,), and what is added to it once per unit of the factor (N,)


@dataclass(frozen=True, slots=True)
class OptimisedALIE(Attack):
    """A little, on the worse side, and as much as hurts most."""

    name: ClassVar[str] = "optimised_alie"
    equation: ClassVar[str] = "x = mean(x_i) - z * std(x_i), z = argmax |rule(..) - mean(x_i)|"
    source: ClassVar[str] = 'Shejwalkar, Houmansadr, "Manipulating the Byzantine", NDSS 2021'
    evaluations: int = key(20, "times that the rule is tried on each side")

    def __post_init__(self) -> None:
        check_evaluations(self, self.evaluations)

    def changes(self, honest_KN: Tensor, num_hostile: int, rule: Rule, generator: torch.Generator) -> Tensor:
        """All the same."""
        return worst(honest_KN, num_hostile, rule, shift(honest_KN), self.evaluations, (1, -1), ALIE().z)


@dataclass(frozen=True, slots=True)
class OptimisedIPM(Attack):
    """Uphill, as far as hurts most."""

    name: ClassVar[str] = "optimised_ipm"
    equation: ClassVar[str] = "x = -tau * mean(x_i), tau = argmax |rule(..) - mean(x_i)|"
    source: ClassVar[str] = 'Shejwalkar, Houmansadr, "Manipulating the Byzantine", NDSS 2021'
    evaluations: int = key(20, "times that the rule is tried")

    def __post_init__(self) -> None:
        check_evaluations(self, self.evaluations)

    def changes(self, honest_KN: Tensor, num_hostile: int, rule: Rule, generator: torch.Generator) -> Tensor:
        """All the same."""
        return worst(honest_KN, num_hostile, rule, reversal(honest_KN), self.evaluations, (1,), IPM().tau)


def worst(
    honest_KN: Tensor, num_hostile: int, rule: Rule, line: Line, evaluations: int, sides: tuple[int, ...], usual: float
) -> Tensor:
    """What moves the result furthest, of a search on each of ``sides`` and of the ``usual`` factor there."""
    from_N, along_N = line

    def sent_FN(factor: float) -> Tensor:
        return alike(from_N + along_N * factor, num_hostile)

    def distance(factor: float) -> float:
        return distance_from_honest(honest_KN, sent_FN(factor), rule)

    found = [line_search(distance, side * FIRST_STEP, evaluations) for side in sides]
    found += [(side * usual, distance(side * usual)) for side in sides]
    factor, _ = max(found, key=lambda one: one[1])
    return sent_FN(factor)


def line_search(
    distance: Callable[[float], float], first_step: float = FIRST_STEP, evaluations: int = 20, ratio: float = RATIO
) -> tuple[float, float]:
    """The factor that gets furthest, and how far: from 0 in steps that grow until one gets less far, then shrink."""
    best, most = 0.0, distance(0.0)
    step, grows = first_step, True
    for _ in range(evaluations - 1):
        found = distance(best + step)
        gains = found > most
        if gains:
            best, most = best + step, found
        grows = grows and gains
        step *= 2.0 if grows else ratio
    return best, most


def check_evaluations(attack: object, evaluations: int) -> None:
    """ConfigError unless the rule is tried at least once beside 0."""
    if not 2 <= evaluations <= 1000:
        raise ConfigError(f"{attack}: the rule is tried so many times, want 2 to 1000; 20 is usual")
