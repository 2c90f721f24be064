"""Rules that look at inner products of contributions, and so at their distances and angles.

Some choose contributions that lie together (Krum, Multi-Krum, MDA), some mix them and ask another rule (NNM,
bucketing), one moves a centre (RFA), and two go by main directions (CAF, Flag).
"""

import hashlib
import math
import statistics
from dataclasses import dataclass
from itertools import combinations
from typing import ClassVar

import numpy as np

from decentral.errors import ConfigError
from decentral.optimizers.aggregation.base import (
    MOST_PEERS,
    Aggregation,
    Floats,
    Sent,
    check_f,
    check_iterations,
    check_start,
    mean_scales,
    start_of,
    total,
)
from decentral.optimizers.aggregation.gram import largest_eigenvectors, scales_through
from decentral.optimizers.aggregation.registry import rule_after
from decentral.optimizers.base import key

__all__ = ["CAF", "MDA", "NNM", "RFA", "Bucketing", "Flag", "Krum", "MultiKrum", "krum_order"]

# ---- Krum: the nearest to its neighbours ----
#
# score_i = sum of |x_i - x_j|^2 over the n - f - 2 nearest others ;  g = x_i with the least score, the first of equals
#
# What is sent is one peer's work in a round, the others' is lost: for runs that expect attackers. Needs n >= 2f + 3.
#
# What differs. Squared distances to n - f - 2 others are the paper's; a well-known library takes n - f - 1, another
# squares twice, and then other contributions win.
#
# Source: Blanchard et al., "Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent", 2017,
# arXiv:1703.02757.


@dataclass(frozen=True, slots=True)
class Krum(Aggregation):
    """A choice of one contribution, as it was sent."""

    name: ClassVar[str] = "krum"
    equation: ClassVar[str] = "g = x_i with the least sum of |x_i - x_j|^2 over its n-f-2 nearest"
    source: ClassVar[str] = 'Blanchard et al., "Machine Learning with Adversaries", 2017, arXiv:1703.02757'
    f: int = key(1, "contributors that may send anything")

    def __post_init__(self) -> None:
        check_f(self, self.f)

    @property
    def least(self) -> int:
        """As the paper's proof wants."""
        return 2 * self.f + 3

    def scales(self, sent: Sent) -> list[float]:
        """Nothing of all others."""
        return mean_scales(sent, krum_order(sent, self.f)[:1])


def krum_order(sent: Sent, f: int) -> list[int]:
    """Places by score, the least first; of equals, as a mutually nearest pair may be, the first place."""
    near_KK = np.sort(sent.squared_distances_KK(), axis=1)[:, 1 : len(sent) - f - 1]  # less the 0 with itself
    scores = [total(near_K) for near_K in near_KK]
    return sorted(range(len(sent)), key=lambda place: (scores[place], place))


# ---- Multi-Krum: a mean of the nearest ----
#
# Krum with less of the honest work thrown away.
#
# g = weighted mean of the m with the least score_i ;  m = n - f - 2 unless it is given
#
# What differs. The paper leaves m open up to n - f - 2; a well-known implementation returns the sum of the m, another
# takes m = n - f with other scores.
#
# Source: Blanchard et al., as for Krum.


@dataclass(frozen=True, slots=True)
class MultiKrum(Aggregation):
    """A mean of those that lie together."""

    name: ClassVar[str] = "multi_krum"
    equation: ClassVar[str] = "g = mean of the m with the least Krum scores"
    source: ClassVar[str] = 'Blanchard et al., "Machine Learning with Adversaries", 2017, arXiv:1703.02757'
    f: int = key(1, "contributors that may send anything")
    m: int | None = key(None, "contributions that are averaged; unset: n - f - 2")

    def __post_init__(self) -> None:
        check_f(self, self.f)
        if self.m is not None and not (isinstance(self.m, int) and self.m >= 1):
            raise ConfigError(f"{self}: m contributions are averaged, want a whole number of 1 or more, or none")

    @property
    def least(self) -> int:
        """As Krum, and with m given f more than that."""
        return 2 * self.f + 3 if self.m is None else max(2 * self.f + 3, self.m + self.f)

    def scales(self, sent: Sent) -> list[float]:
        """Nothing of those that lie apart."""
        count = len(sent) - self.f - 2 if self.m is None else self.m
        return mean_scales(sent, krum_order(sent, self.f)[:count])


# ---- MDA: the narrowest subset ----
#
# g = weighted mean of the subset S of n - f with the least max |x_i - x_j| over S ;  the first of equals
#
# There are n! / (f! (n-f)!) subsets. Above 20,000 of them, as with f = 5 of 21, multi_krum decides instead.
# Needs n >= 2f + 1.
#
# Source: Rousseeuw, "Multivariate Estimation with High Breakdown Point", 1985; El Mhamdi et al., "The Hidden
# Vulnerability of Distributed Learning in Byzantium", 2018, arXiv:1802.07927.

MOST_SUBSETS = 20_000


@dataclass(frozen=True, slots=True)
class MDA(Aggregation):
    """A mean of those that lie together."""

    name: ClassVar[str] = "mda"
    equation: ClassVar[str] = "g = mean of the n-f with the least largest distance"
    source: ClassVar[str] = 'El Mhamdi et al., "The Hidden Vulnerability", 2018, arXiv:1802.07927'
    f: int = key(1, "contributors that may send anything")

    def __post_init__(self) -> None:
        check_f(self, self.f)

    @property
    def least(self) -> int:
        """So that most of every subset may be honest."""
        return 2 * self.f + 1

    def scales(self, sent: Sent) -> list[float]:
        """Nothing of those outside of the subset."""
        kept = len(sent) - self.f
        if math.comb(len(sent), kept) > MOST_SUBSETS:
            return MultiKrum(f=self.f).weigh(sent)
        return mean_scales(sent, narrowest(sent.squared_distances_KK(), self.f))


def narrowest(square_KK: Floats, f: int) -> list[int]:
    """Places of the subset without f of them that has the least diameter, of equals the first in lexicographic order.

    The diameter is the widest pair of which neither is left out: pairs are looked at from the widest on.
    """
    square, everybody = square_KK.tolist(), range(len(square_KK))
    pairs = sorted(((square[i][j], i, j) for i, j in combinations(everybody, 2)), reverse=True)
    least, best = math.inf, set[int]()
    for gone in map(set, combinations(everybody, f)):  # so that the first subset comes last
        diameter = next((width for width, i, j in pairs if i not in gone and j not in gone), 0.0)
        if diameter <= least:
            least, best = diameter, gone
    return [place for place in everybody if place not in best]


# ---- NNM: nearest-neighbour mixing ----
#
# Each contribution becomes the mean of the n - f nearest ones, then another rule decides.
#
# y_i = weighted mean of the n - f contributions nearest to x_i, itself included ;  g = then(y)
#
# Honest contributions come closer to one another, which rules want whose peers have different data. Needs n >= 2f + 1;
# of equally near ones the first is taken.
#
# Source: Allouah et al., "Fixing by Mixing: A Recipe for Optimal Byzantine ML under Heterogeneity", 2023,
# arXiv:2302.01772.


@dataclass(frozen=True, slots=True)
class NNM(Aggregation):
    """Mix, then ask another rule."""

    name: ClassVar[str] = "nnm"
    equation: ClassVar[str] = "y_i = mean of the n-f nearest to x_i ; g = then(y)"
    source: ClassVar[str] = 'Allouah et al., "Fixing by Mixing", 2023, arXiv:2302.01772'
    f: int = key(1, "contributors that may send anything")
    then: str = key("rfa", "the rule for the mixtures: krum, or rfa(iterations=8)")

    def __post_init__(self) -> None:
        check_f(self, self.f)
        rule_after(self.then, self.f)

    @property
    def least(self) -> int:
        """So that most of every mixture may be honest."""
        return 2 * self.f + 1

    def scales(self, sent: Sent) -> list[float]:
        """Return the share of each through the mixtures that it is in."""
        order_KK = np.argsort(sent.squared_distances_KK(), axis=1, kind="stable")
        nearest = [order_K[: len(sent) - self.f].tolist() for order_K in order_KK]
        share_KK = np.stack([sent.mean_shares(places) for places in nearest])
        return scales_through(sent, share_KK, sent.weight_K, rule_after(self.then, self.f))


# ---- bucketing: means of small groups ----
#
# groups of ``size`` by a draw of the round ;  y_j = weighted mean of group j ;  g = then(y), a group weighs what its
# members do
#
# Groups of mixed peers look alike where single peers with different data do not. f contributors may spoil f groups, so
# more than 2f groups are needed; where there are fewer, ``then`` decides over the contributions themselves.
#
# What differs from the paper. The draw is by blake2b of the record and the place, so that every peer draws alike and
# nobody knows before all have contributed; the last group may be smaller.
#
# Source: Karimireddy, He, Jaggi, "Byzantine-Robust Learning on Heterogeneous Datasets via Bucketing", 2020,
# arXiv:2006.09365.


@dataclass(frozen=True, slots=True)
class Bucketing(Aggregation):
    """Mix by chance, then ask another rule."""

    name: ClassVar[str] = "bucketing"
    equation: ClassVar[str] = "y_j = mean of a group of size drawn by the round ; g = then(y)"
    source: ClassVar[str] = 'Karimireddy, He, Jaggi, "Bucketing", 2020, arXiv:2006.09365'
    f: int = key(1, "contributors that may send anything")
    size: int = key(2, "contributions in a group")
    then: str = key("rfa", "the rule for the groups: krum, or rfa(iterations=8)")

    def __post_init__(self) -> None:
        check_f(self, self.f)
        if not 1 <= self.size <= MOST_PEERS:
            raise ConfigError(f"{self}: size is of a group, want 1 <= size <= {MOST_PEERS}; 2 is usual")
        rule_after(self.then, self.f)

    def scales(self, sent: Sent) -> list[float]:
        """Return the share of each through its group."""
        after = rule_after(self.then, self.f)
        groups = drawn_groups(len(sent), self.size, sent.seed)
        if 2 * self.f >= len(groups):
            return after.weigh(sent)
        share_JK = np.stack([sent.mean_shares(group) for group in groups])
        weight_J = np.array([total(sent.weight_K[group]) for group in groups])
        return scales_through(sent, share_JK, weight_J, after)


def drawn_groups(count: int, size: int, seed: bytes) -> list[list[int]]:
    """Places in groups; alike on all who have the seed."""
    lots = [hashlib.blake2b(seed + place.to_bytes(4, "little"), digest_size=16).digest() for place in range(count)]
    order = sorted(range(count), key=lots.__getitem__)
    return [order[start : start + size] for start in range(0, count, size)]


# ---- RFA: the geometric median ----
#
# The point with the least sum of distances, by Weiszfeld's iteration.
#
# v <- sum(b_i x_i) / sum(b_i) ;  b_i = w_i / max(floor * d, |v - x_i|), d the lower median of the |x_i|
#
# Half of the weights must be honest, and no f is asked for. From the mean, a lie of a million times the usual length
# shrinks by (n - f) / f in an iteration: 100 are enough where 4 of 9 lie, and none is made once nothing moves any
# more.
#
# What differs from the paper. It makes 3 iterations with a floor of 1e-6, a length, where here it is a share of the
# typical norm, the same for any model and learning rate. A well-known library makes 3 from zero with a floor of 0.1.
#
# Source: Pillutla, Kakade, Harchaoui, "Robust Aggregation for Federated Learning", 2019, arXiv:1912.13445.


@dataclass(frozen=True, slots=True)
class RFA(Aggregation):
    """The geometric median of the contributions."""

    name: ClassVar[str] = "rfa"
    equation: ClassVar[str] = "v <- sum b_i x_i / sum b_i, b_i = w_i / max(floor d, |v - x_i|)"
    source: ClassVar[str] = 'Pillutla, Kakade, Harchaoui, "Robust Aggregation", 2019, arXiv:1912.13445'
    iterations: int = key(100, "moves of the centre at most")
    floor: float = key(1e-6, "distances below this share of the median norm count as it")
    start: str = key("mean", "where the centre begins: zero, mean")

    def __post_init__(self) -> None:
        if not 0 < self.floor <= 1:
            raise ConfigError(f"{self}: floor is a share of a norm, want it in (0, 1]; 1e-6 is usual")
        check_iterations(self, self.iterations)
        check_start(self, self.start, ("zero", "mean"))

    def scales(self, sent: Sent) -> list[float]:
        """By the shares of each in the centre."""
        share_K = start_of(sent, self.start)
        least = self.floor * (statistics.median_low(sent.norm_K.tolist()) or 1.0)
        for _ in range(self.iterations):
            pull_K = sent.weight_K / np.maximum(sent.distances_from(share_K), least)
            before_K, share_K = share_K, pull_K / total(pull_K)
            if np.array_equal(before_K, share_K):
                break
        return sent.scales_of(share_K)


# ---- CAF: a filter by covariance ----
#
# Whoever stands out along the direction of most spread counts less, until 2f are gone.
#
# c_i = 1 ;  while sum c > n - 2f:  m = sum c_i x_i / sum c ;  u = the main direction of sum c_i (x_i-m)(x_i-m)^T
#   keep the m with the least spread along u ;  t_i = <x_i - m, u>^2 ;  c_i <- c_i (1 - t_i / max t)
# g = that m
#
# No bound on honest spread must be known. Needs n >= 2f + 1. Every lap takes one contribution to zero at least, so
# there are n laps at most. The run's weights multiply c, and heads are counted.
#
# What differs from the library that its authors wrote. The largest t is of those who still count: theirs may be of one
# that is gone, and then a second, nearer attacker loses a millionth in a lap, and the loop does not end. They make one
# power iteration from a random vector; here it starts at the contribution that is furthest from m, and makes 100.
#
# Source: Allouah, Guerraoui, Stephan, "Towards Trustworthy Federated Learning with Untrusted Participants", 2025,
# arXiv:2505.01874.

_POWER_ITERATIONS = 100
_STEADY = 1e-12  # change of the spread in one iteration, of itself, after which no more are made


@dataclass(frozen=True, slots=True)
class CAF(Aggregation):
    """The mean at which what is left is least spread."""

    name: ClassVar[str] = "caf"
    equation: ClassVar[str] = "c_i <- c_i (1 - t_i / max t), t_i along the main direction, until sum c <= n - 2f"
    source: ClassVar[str] = 'Allouah, Guerraoui, Stephan, "Untrusted Participants", 2025, arXiv:2505.01874'
    f: int = key(1, "contributors that may send anything")

    def __post_init__(self) -> None:
        check_f(self, self.f)

    @property
    def least(self) -> int:
        """So that some are left."""
        return 2 * self.f + 1

    def scales(self, sent: Sent) -> list[float]:
        """By the shares of each in the best mean."""
        count_K, best, least = np.ones(len(sent)), sent.mean_shares(), math.inf
        while total(count_K) > len(sent) - 2 * self.f:
            share_K = count_K * sent.weight_K / total(count_K * sent.weight_K)
            spread, along_K = _main_direction(_center(sent.products_KK, share_K), share_K)
            if spread < least:
                least, best = spread, share_K
            stands_out_K = np.where(count_K > 0, along_K * along_K, 0.0)
            furthest = float(stands_out_K.max())
            if furthest == 0.0:
                break
            count_K = count_K * np.maximum(1.0 - stands_out_K / furthest, 0.0)
        return sent.scales_of(best)


def _center(gram_KK: Floats, share_K: Floats) -> Floats:
    """Inner products of x_i - m."""
    product_K = np.array([total(row_K * share_K) for row_K in gram_KK])
    centred_KK: Floats = (gram_KK - product_K[:, None] - product_K[None, :]) + total(share_K * product_K)
    return centred_KK


def _main_direction(gram_KK: Floats, share_K: Floats) -> tuple[float, Floats]:
    """The spread along the direction u of most spread, and <x_i - m, u> (K,), by power iteration on sum p_i z_i z_i^T.

    u = sum a_i z_i is known by its products with all z.
    """
    first = int(np.argmax(np.where(share_K > 0, np.diagonal(gram_KK), -1.0)))
    length = math.sqrt(max(float(gram_KK[first, first]), 0.0))
    if length == 0.0:
        return 0.0, np.zeros(len(share_K))
    along_K, spread = gram_KK[first] / length, 0.0
    for _ in range(_POWER_ITERATIONS):
        pull_K = share_K * along_K
        next_K = np.array([total(row_K * pull_K) for row_K in gram_KK])
        length = math.sqrt(max(total(pull_K * next_K), 0.0))
        if length == 0.0:
            return 0.0, np.zeros(len(share_K))
        along_K, before, spread = next_K / length, spread, length
        if abs(spread - before) <= _STEADY * spread:
            break
    return spread, along_K


# ---- Flag: directions of a shared subspace ----
#
# The mean of the directions, as far as it lies in the subspace that most of them share.
#
# u_i = x_i / l_i, l_i = max(|x_i|, d 2^-20)
# in turns Y = the ``rank`` main directions of the a_i u_i, a_i = (1 - |Y^T u_i|^2 + 1e-7)^(-1/4)
# g = d Y Y^T sum(w_i u_i) / sum(w_i),  d the lower median of the |x_i|
#
# With inner products alone: if v_k are the main eigenvectors of a_i <u_i, u_j> a_j, then |Y^T u_i|^2 = sum_k l_k
# v_ki^2 / a_i^2, and x_i counts d a_i / l_i sum_k v_ki sum_j v_kj w_j / a_j / sum(w).
#
# What differs. The authors' code loses all lengths, and how long the paper's result is could not be found out: here it
# is d. The term over pairs is left out, the start is a_i = 1 and not random, and there are 5 turns where the code has
# 1. A vector a million times shorter than d has hardly a direction; with |x_i| for l_i it could be scaled beyond
# float32. ``rank`` unset is half of the contributors, rounded up. Above 128 contributors `rfa` decides.
#
# Source: Almasi et al., "Flag Aggregator: Scalable Distributed Training under Failures and Augmented Losses using
# Convex Optimization", 2023, arXiv:2302.05865.

MOST_FOR_FLAG = 128  # contributors: a sweep over so many turns 3 million pairs of values
_SHORTEST = 2.0**-20  # of the typical length: shorter ones are not lengthened beyond a million times
_INSIDE = 1e-7  # of the sine squared: who lies in the subspace does not count without bound


@dataclass(frozen=True, slots=True)
class Flag(Aggregation):
    """A mean of directions in a shared subspace."""

    name: ClassVar[str] = "flag"
    equation: ClassVar[str] = "g = median|x| Y Y^T mean(x_i / |x_i|), Y the main directions, reweighted"
    source: ClassVar[str] = 'Almasi et al., "Flag Aggregator", 2023, arXiv:2302.05865'
    rank: int | None = key(None, "directions of the subspace; unset: half of the contributors")
    iterations: int = key(5, "times that the subspace is found anew")

    def __post_init__(self) -> None:
        check_iterations(self, self.iterations)
        if self.rank is not None and not (isinstance(self.rank, int) and 1 <= self.rank <= MOST_PEERS):
            raise ConfigError(f"{self}: rank is a number of directions, want a whole one from 1 on, or none")

    def scales(self, sent: Sent) -> list[float]:
        """Return the share of each in the projected mean; zeros have no direction, and count nothing."""
        if len(sent) > MOST_FOR_FLAG:
            return RFA().scales(sent)
        typical = statistics.median_low(sent.norm_K.tolist())
        length_K = np.maximum(sent.norm_K, typical * _SHORTEST)
        length_K = np.where(length_K > 0, length_K, 1.0)
        cosine_KK, pull_K = sent.products_KK / length_K[:, None] / length_K[None, :], np.ones(len(sent))
        rank = (len(sent) + 1) // 2 if self.rank is None else self.rank
        for _ in range(self.iterations):
            weighed_KK = cosine_KK * pull_K[:, None] * pull_K[None, :]
            vector_RK = largest_eigenvectors(weighed_KK, rank)
            share_K = _project(vector_RK, sent.mean_shares() / pull_K) * pull_K
            inside_K = _sum_of_squares(vector_RK, weighed_KK) / (pull_K * pull_K)
            pull_K = 1.0 / np.sqrt(np.sqrt(np.maximum(1.0 - inside_K, 0.0) + _INSIDE))
        return sent.scales_of(share_K * (typical / length_K))


def _project(vector_RK: Floats, value_K: Floats) -> Floats:
    """sum_k v_k <v_k, value>."""
    found_K = np.zeros(len(value_K), dtype=np.float64)
    for vector_K in vector_RK:
        found_K = found_K + vector_K * total(vector_K * value_K)
    return found_K


def _sum_of_squares(vector_RK: Floats, weighed_KK: Floats) -> Floats:
    """sum_k l_k v_ki^2, as v_ki times what the matrix makes of v_k."""
    found_K = np.zeros(len(weighed_KK), dtype=np.float64)
    for vector_K in vector_RK:
        found_K = found_K + vector_K * np.array([total(row_K * vector_K) for row_K in weighed_KK])
    return found_K
