"""Attacks by name: what hostile peers send in place of the change that they trained, for experiments on aggregation
rules.

The attacker knows everything: what honest peers will send, as receivers decode it, and the rule in use. Most attacks
craft a vector of it; what is sent then goes through the run's compressor, as everybody's does. Others train as honest
peers do, on labels that are wrong, or keep back what they offered. A change is a descent direction, anchor - local: the
outer step subtracts it.

An attack is one frozen dataclass, here or behind an entry point "decentral.attacks" of another package; its fields are
the keys of its spelling: ``scale(factor=100)``.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

import torch
from torch import Tensor

from decentral import plugins
from decentral.errors import ConfigError
from decentral.optimizers.base import key
from decentral.plugins import Plugins

# Shape suffixes: N = elements of one fragment, flat; K = honest contributors, F = hostile ones, B = labels of a batch.

Rule = Callable[[Tensor], Tensor]  # rows (K + F, N), the honest ones first -> what receivers make of them (N,)


class Attack:
    """Defaults of an attack that crafts vectors, trains on the right labels and delivers what it offers."""

    __slots__ = ()

    name: ClassVar[str]  # in spellings
    equation: ClassVar[str]
    source: ClassVar[str]  # authors, title, year, arXiv
    poisons_data: ClassVar[bool] = False  # hostile peers train, on ``labels``, and send what they trained
    withholds: ClassVar[bool] = False  # hostile peers train and offer; ``delivers`` says who of them sends

    @property
    def crafts(self) -> bool:
        """Whether hostile peers send ``changes``; others send what they trained."""
        return not (self.poisons_data or self.withholds)

    def changes(self, honest_KN: Tensor, num_hostile: int, rule: Rule, generator: torch.Generator) -> Tensor:
        """What hostile peers send (F, N), where they craft it. ``honest_KN``: what receivers decode of honest peers."""
        raise NotImplementedError

    def labels(self, label_B: Tensor, num_labels: int) -> Tensor:
        """What hostile peers take for the labels, each from 0 to ``num_labels`` - 1."""
        return label_B

    def delivers(self, num_hostile: int, generator: torch.Generator) -> list[bool]:
        """Which of the hostile peers' contributions are part of this round."""
        return [True] * num_hostile


def alike(row_N: Tensor, num_hostile: int) -> Tensor:
    """The same vector from every hostile peer (F, N)."""
    return row_N.expand(num_hostile, -1).clone()


def distance_from_honest(honest_KN: Tensor, hostile_FN: Tensor, rule: Rule) -> float:
    """How far what receivers make of all is from the mean of the honest ones: what the optimised attacks maximise.

    Of vectors that are not finite, which no peer takes, it is less than of any other.
    """
    if not bool(hostile_FN.isfinite().all()):
        return -math.inf
    apart_N = rule(torch.cat([honest_KN, hostile_FN])).double() - honest_KN.double().mean(0)
    return float(torch.linalg.vector_norm(apart_N))


# ---- a little is enough (ALIE) ----
#
# Off the honest mean by a few standard deviations in every coordinate, within the crowd.
#
# x = mean(x_i) - z * std(x_i) ;  std with K - 1
#
# What differs from the source. There z is the largest that a majority of peers hides: 0.18 for 3 of 10. Here it is
# ByzFL's 1.5 (González et al., 2025, arXiv:2505.24802), which adds where the paper subtracts: that is z = -1.5.
# ``OptimisedALIE`` tries many z on both sides.
#
# Source: Baruch, Baruch, Goldberg, "A Little Is Enough: Circumventing Defenses For Distributed Learning", 2019,
# arXiv:1902.06156.


@dataclass(frozen=True, slots=True)
class ALIE(Attack):
    """A shift that hides in the honest spread."""

    name: ClassVar[str] = "alie"
    equation: ClassVar[str] = "x = mean(x_i) - z * std(x_i)"
    source: ClassVar[str] = 'Baruch, Baruch, Goldberg, "A Little Is Enough", 2019, arXiv:1902.06156'
    z: float = key(1.5, "standard deviations off the mean; below 0: to the other side")

    def __post_init__(self) -> None:
        if not math.isfinite(self.z):
            raise ConfigError(f"{self}: want a finite number of standard deviations; 1.5 is usual")

    def changes(self, honest_KN: Tensor, num_hostile: int, rule: Rule, generator: torch.Generator) -> Tensor:
        """All the same."""
        mean_N, spread_N = shift(honest_KN)
        return alike(mean_N + spread_N * self.z, num_hostile)


def shift(honest_KN: Tensor) -> tuple[Tensor, Tensor]:
    """The honest mean (N,), and what is added to it per z (N,): nothing where one honest peer alone shows no spread."""
    mean_N = honest_KN.mean(0)
    return mean_N, -honest_KN.std(0) if len(honest_KN) > 1 else torch.zeros_like(mean_N)


# ---- inner product manipulation (IPM) ----
#
# Against the honest mean, so that the result no longer points downhill.
#
# x = -tau * mean(x_i)
#
# With tau below 1 it is shorter than honest changes and near them, which fools rules that go by distance; with tau
# above (K / F) it turns the plain mean around.
#
# Source: Xie, Koyejo, Gupta, "Fall of Empires: Breaking Byzantine-tolerant SGD by Inner Product Manipulation", 2019,
# arXiv:1903.03936; tau = 2 as in ByzFL (González et al., 2025, arXiv:2505.24802).


@dataclass(frozen=True, slots=True)
class IPM(Attack):
    """Uphill, some times the mean."""

    name: ClassVar[str] = "ipm"
    equation: ClassVar[str] = "x = -tau * mean(x_i)"
    source: ClassVar[str] = 'Xie, Koyejo, Gupta, "Fall of Empires", 2019, arXiv:1903.03936'
    tau: float = key(2.0, "how many times the honest mean")

    def __post_init__(self) -> None:
        if not (self.tau > 0 and math.isfinite(self.tau)):
            raise ConfigError(f"{self}: want tau above 0, 0.5 or 2 for instance; scale is the other way")

    def changes(self, honest_KN: Tensor, num_hostile: int, rule: Rule, generator: torch.Generator) -> Tensor:
        """All the same."""
        nothing_N, back_N = reversal(honest_KN)
        return alike(nothing_N + back_N * self.tau, num_hostile)


def reversal(honest_KN: Tensor) -> tuple[Tensor, Tensor]:
    """Nothing (N,), and what is added to it per tau (N,)."""
    mean_N = honest_KN.mean(0)
    return torch.zeros_like(mean_N), -mean_N


# ---- ALIE and IPM, optimised ----
#
# The factor is the one that moves the result of the rule in use furthest from the honest mean.
#
# factor = argmax |rule(x_1 .. x_K, x, .. x) - mean(x_i)|, by a line search: from 0 in steps that double while it gets
# further, then in steps that shrink by ``ratio``, ``evaluations`` in all.
#
# What differs from ByzFL. Its ALIE searches on one side, the one that the paper does not use; here both sides are
# searched. The factors of the fixed attacks are tried, too, so that no optimised attack is the weaker one.
#
# Source: Shejwalkar, Houmansadr, "Manipulating the Byzantine: Optimizing Model Poisoning Attacks and Defenses for
# Federated Learning", NDSS 2021; the search and its constants from González et al., "ByzFL: Research Framework for
# Robust Federated Learning", 2025, arXiv:2505.24802.

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


# ---- the mean, the other way ----
#
# x = -mean(x_i)
#
# Source: Li et al., "RSA: Byzantine-Robust Stochastic Aggregation Methods for Distributed Learning from Heterogeneous
# Datasets", 2019, arXiv:1811.03761; of the mean, and not of each peer's own change, as ByzFL has it (González et al.,
# "ByzFL: Research Framework for Robust Federated Learning", 2025, arXiv:2505.24802).


@dataclass(frozen=True, slots=True)
class SignFlip(Attack):
    """The wrong direction, at the usual length."""

    name: ClassVar[str] = "sign_flip"
    equation: ClassVar[str] = "x = -mean(x_i)"
    source: ClassVar[str] = 'Li et al., "RSA", 2019, arXiv:1811.03761'

    def changes(self, honest_KN: Tensor, num_hostile: int, rule: Rule, generator: torch.Generator) -> Tensor:
        """All the same."""
        return alike(-honest_KN.mean(0), num_hostile)


# ---- the right direction, far too long ----
#
# As from a learning rate that is wrong by as much.
#
# x = factor * mean(x_i)
#
# What differs from the source. There the direction is that of a model of the attacker's own, scaled so that it takes
# the mean's place; here it is the honest one: the harm is in the length alone, and what finds wrong directions sees
# none.
#
# Source: Bagdasaryan et al., "How To Backdoor Federated Learning", 2020, arXiv:1807.00459.


@dataclass(frozen=True, slots=True)
class Scale(Attack):
    """The honest direction, many times."""

    name: ClassVar[str] = "scale"
    equation: ClassVar[str] = "x = factor * mean(x_i)"
    source: ClassVar[str] = 'Bagdasaryan et al., "How To Backdoor Federated Learning", 2020, arXiv:1807.00459'
    factor: float = key(10.0, "how many times the honest mean")

    def __post_init__(self) -> None:
        if not (self.factor > 0 and math.isfinite(self.factor)):
            raise ConfigError(f"{self}: want a factor above 0, 10 or 100 for instance; ipm is the other way")

    def changes(self, honest_KN: Tensor, num_hostile: int, rule: Rule, generator: torch.Generator) -> Tensor:
        """All the same."""
        return alike(honest_KN.mean(0) * self.factor, num_hostile)


# ---- noise of the usual length ----
#
# A random vector of each hostile peer, as long as honest changes typically are, or some times that.
#
# x ~ normal(0, s**2) ;  s = times * median |x_i| / sqrt(N)
#
# What differs from the source. There s is a number, 200 for images, whatever changes are like; ByzFL's default is 1.
# Here it follows the honest lengths, so that one key means the same for any model and learning rate.
#
# Source: Blanchard et al., "Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent", 2017,
# arXiv:1703.02757.


@dataclass(frozen=True, slots=True)
class GaussianNoise(Attack):
    """No direction at all, another one from each."""

    name: ClassVar[str] = "noise"
    equation: ClassVar[str] = "x ~ normal(0, s^2), s = times * median|x_i| / sqrt(N)"
    source: ClassVar[str] = 'Blanchard et al., "Machine Learning with Adversaries", 2017, arXiv:1703.02757'
    times: float = key(1.0, "length, in lengths of the median honest change")

    def __post_init__(self) -> None:
        if not (self.times > 0 and math.isfinite(self.times)):
            raise ConfigError(f"{self}: want times above 0; 1 is as long as an honest change")

    def changes(self, honest_KN: Tensor, num_hostile: int, rule: Rule, generator: torch.Generator) -> Tensor:
        """Drawn anew for each peer and round."""
        numel = honest_KN.shape[1]
        spread = torch.linalg.vector_norm(honest_KN, dim=1).median() * (self.times / math.sqrt(max(1, numel)))
        drawn_FN = torch.randn((num_hostile, numel), generator=generator, dtype=honest_KN.dtype)
        return drawn_FN.mul_(spread)


# ---- one honest peer, many times ----
#
# All hostile peers send what one honest peer sends, so that its data count F + 1 times.
#
# x = x_victim
#
# Nothing of it is wrong; where peers' data differ, rules that look for a crowd find one. Of sparse frames it is a copy
# of one frame, which ``Scrutiny`` tells as twins.
#
# What differs from the source. There the victim is chosen in the first rounds as the one that stands out most; here, as
# in ByzFL (González et al., 2025, arXiv:2505.24802), it is named.
#
# Source: Karimireddy, He, Jaggi, "Byzantine-Robust Learning on Heterogeneous Datasets via Bucketing", 2020,
# arXiv:2006.09365.


@dataclass(frozen=True, slots=True)
class Mimic(Attack):
    """One honest peer, many times."""

    name: ClassVar[str] = "mimic"
    equation: ClassVar[str] = "x = x_victim"
    source: ClassVar[str] = 'Karimireddy, He, Jaggi, "Bucketing", 2020, arXiv:2006.09365'
    victim: int = key(0, "which honest peer, counted from 0")

    def __post_init__(self) -> None:
        if self.victim < 0:
            raise ConfigError(f"{self}: victim is the place of an honest peer, counted from 0")

    def changes(self, honest_KN: Tensor, num_hostile: int, rule: Rule, generator: torch.Generator) -> Tensor:
        """All the same; of fewer honest peers the last."""
        return alike(honest_KN[min(self.victim, len(honest_KN) - 1)], num_hostile)


# ---- copies of honest frames ----
#
# Each hostile peer sends the places of another honest peer's frame, and hides that its values are the same.
#
# x = x_i * (1 + noise * normal(0, 1)) for the honest peer i of its own
#
# It trains nothing and is counted, paid where that is paid, and takes weight from those who trained. Only sparse frames
# show it: places in common are few among honest peers (Covenant-72B's runs saw a share of 0.07 to 0.12 and put the
# bound at 0.4), and all of a copy. Who copied whom is not to be seen from two frames: a bound on the overlap blames
# whoever is later, so that a quick copier has its victim thrown out, unless all commit to a hash first, as offers here
# do.
#
# Source: Lidin et al., "Incentivizing Permissionless Distributed Learning of LLMs", 2025, arXiv:2505.21684;
# "Covenant-72B", 2026.


@dataclass(frozen=True, slots=True)
class Copycat(Attack):
    """The work of others, once more."""

    name: ClassVar[str] = "copycat"
    equation: ClassVar[str] = "x = x_i * (1 + noise * normal(0, 1))"
    source: ClassVar[str] = 'Lidin et al., "Incentivizing Permissionless Distributed Learning", 2025, arXiv:2505.21684'
    noise: float = key(0.1, "by what share of itself a value is changed")

    def __post_init__(self) -> None:
        if not 0 <= self.noise <= 1:
            raise ConfigError(f"{self}: noise is a share of each value, want it in [0, 1]; 0 is a plain copy")

    def changes(self, honest_KN: Tensor, num_hostile: int, rule: Rule, generator: torch.Generator) -> Tensor:
        """Of the honest peers in turn."""
        copied_FN = honest_KN[torch.arange(num_hostile) % len(honest_KN)]
        hidden_FN = torch.randn(copied_FN.shape, generator=generator, dtype=honest_KN.dtype)
        return copied_FN * (1 + self.noise * hidden_FN)


def index_overlap(one_N: Tensor, other_N: Tensor) -> float:
    """The share of the shorter frame's places that the other one has, too; 0 where one has none."""
    one, other = one_N != 0, other_N != 0
    fewest = min(int(one.sum()), int(other.sum()))
    return int((one & other).sum()) / fewest if fewest else 0.0


# ---- labels for their opposites ----
#
# Hostile peers train as honest ones do, and take every label for its opposite.
#
# y = num_labels - 1 - y ;  digits: 9 - y, bytes of text: 255 - y
#
# What they send is arithmetic without fault, as long as an honest change, and fits the data of nobody.
#
# Source: Tolpegin et al., "Data Poisoning Attacks Against Federated Learning Systems", 2020, arXiv:2007.08432; all
# labels at once as in ByzFL (González et al., 2025, arXiv:2505.24802).


@dataclass(frozen=True, slots=True)
class LabelFlip(Attack):
    """Honest work on wrong labels."""

    name: ClassVar[str] = "label_flip"
    equation: ClassVar[str] = "y = num_labels - 1 - y"
    source: ClassVar[str] = 'Tolpegin et al., "Data Poisoning Attacks", 2020, arXiv:2007.08432'
    poisons_data: ClassVar[bool] = True

    def labels(self, label_B: Tensor, num_labels: int) -> Tensor:
        """The opposite ones."""
        return num_labels - 1 - label_B


# ---- offers without a frame ----
#
# Hostile peers offer a contribution, and then hand it to nobody.
#
# delivered with chance 1 - share, each peer and round by itself
#
# A round of this project ends without it: a record names only frames that a majority holds, and the divisor counts
# nobody who is not named. What is left to harm is the number: a rule that was given f, and waits for 2f + 3
# contributors, finds fewer, and all honest peers lose what the hostile ones would have trained. Frames that are
# delivered are honest.
#
# Source: the threat of this project's own protocol (docs/protocol.md); dropped uploads as in Lidin et al.,
# "Incentivizing Permissionless Distributed Learning of LLMs", 2025, arXiv:2505.21684.


@dataclass(frozen=True, slots=True)
class Withheld(Attack):
    """An offer without a frame."""

    name: ClassVar[str] = "withheld"
    equation: ClassVar[str] = "delivered with chance 1 - share"
    source: ClassVar[str] = 'Lidin et al., "Incentivizing Permissionless Distributed Learning", 2025, arXiv:2505.21684'
    withholds: ClassVar[bool] = True
    share: float = key(0.5, "of the rounds in which a frame is kept back")

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ConfigError(f"{self}: share is of rounds, want it in (0, 1]; 1 withholds always")

    def delivers(self, num_hostile: int, generator: torch.Generator) -> list[bool]:
        """Drawn for each peer."""
        return (torch.rand(num_hostile, generator=generator) >= self.share).tolist()


# ---- attacks by name ----

_OURS = (
    ALIE, Copycat, GaussianNoise, IPM, LabelFlip, Mimic, OptimisedALIE, OptimisedIPM, Scale, SignFlip, Withheld,
)  # fmt: skip
_ATTACKS = Plugins("attack", "decentral.attacks", MappingProxyType({one.name: one for one in _OURS}))


def attack_names() -> list[str]:
    """The names of our attacks, sorted."""
    return sorted(_ATTACKS.ours)


def make_attack(word: str) -> Attack:
    """The attack of a spelling, ``sign_flip`` or ``scale(factor=100)``; ConfigError, with the nearest, for none."""
    made = plugins.make(word, _ATTACKS, "sign_flip or scale(factor=100)")
    if not isinstance(made, Attack):
        raise ConfigError(f"attack {word}: it is no attacks.Attack; ask its author")
    return made


def describe_attacks() -> list[dict[str, object]]:
    """One row per attack: name, keys with their defaults, equation, source."""
    return [_described(name, make_attack(name)) for name in _ATTACKS.names()]


def _described(name: str, attack: Attack) -> dict[str, object]:
    keys = dataclasses.asdict(attack)  # type: ignore[call-overload]  # a dataclass: see Plugins
    return {"name": name, "keys": keys, "equation": attack.equation, "source": attack.source}
