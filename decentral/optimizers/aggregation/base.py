"""An aggregation rule, by which the contributions to a round become one vector, and arithmetic that rules share.

Every peer must get the same bits. So float64 is added in one order (lane by lane in the order of the values, and then
the lanes in halves), or by `total`, for which any order will do: ``torch.sum`` splits by the number of threads, and a
product of matrices by a library adds in an order of the machine's choice.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from decentral.errors import ConfigError
from decentral.tensors.compiled import compiled
from decentral.tensors.ops import WIDTH, float32, rows_of, sum_of_lanes

__all__ = [
    "ENOUGH_TO_CLIP",
    "LARGEST_NORM",
    "MOST_PEERS",
    "NOTHING_LEARNT",
    "Aggregation",
    "Floats",
    "Needs",
    "Sent",
    "SquareSum",
    "Start",
    "aged_share",
    "check_f",
    "check_iterations",
    "check_start",
    "clip_scales",
    "is_outlier",
    "mean_and_variance",
    "mean_scales",
    "mean_share",
    "norm",
    "start_of",
    "total",
    "typical_norm",
    "typical_scales",
    "with_learnt",
]

# ---- what a rule is ----
#
# A rule says what each contribution is multiplied by: the result is sum(w_i s_i x_i) / sum(w_i), w the run's weights.
# It sees inner products and no vector, so sparse contributions stay sparse. Rules by coordinates see rows instead.
#
# A rule is one frozen dataclass in a module of this folder, or an entry point "decentral.aggregation" of another
# package; its fields are the keys that ``[outer.aggregation]`` accepts beside ``rule``. A rule sees one fragment at a
# time, and of a contribution its first channel: states beside the change are averaged. What a rule leaves out is not
# owed again.
#
# With fewer contributors than it needs no rule can tell who is wrong: they are then shortened to the typical norm, and
# of two the mean is taken. All peers see the same contributors, so all do the same.

# Shape suffixes: N = elements of one fragment, flat float32; K = contributors, by peer id.

Needs = Literal["nothing", "norms", "products", "rows"]  # nothing: the plain mean
MOST_PEERS = 1024  # of a run
MOST_ITERATIONS = 1000


class Aggregation:
    """Defaults of a rule that looks at inner products."""

    __slots__ = ()

    name: ClassVar[str]  # in manifests
    equation: ClassVar[str] = "not described"
    source: ClassVar[str] = "not described"  # authors, title, year, arXiv

    @property
    def needs(self) -> Needs:
        """The knowledge of contributions that it goes by."""
        return "products"

    @property
    def least(self) -> int:
        """Contributors below which it cannot tell who is wrong."""
        return 3

    def scales(self, sent: Sent) -> list[float]:
        """Return the scale of each; at least ``least`` of them, each with a weight above 0."""
        raise NotImplementedError

    def combine(self, row_KN: Tensor) -> Tensor:
        """The result (N,) of a rule by coordinates, which counts heads; at least ``least`` rows."""
        raise NotImplementedError

    def weigh(self, sent: Sent) -> list[float]:
        """The scales of all; who has no weight is not looked at."""
        counted = [place for place, weight in enumerate(sent.weight_K) if weight > 0]
        among, found = sent.among(counted), [1.0] * len(sent)
        enough = len(counted) >= self.least
        for place, scale in zip(counted, self.scales(among) if enough else typical_scales(among), strict=True):
            found[place] = scale
        return found


def typical_scales(sent: Sent) -> list[float]:
    """Where there are too few for a rule."""
    return clip_scales(sent.norm_K.tolist())


def check_f(rule: object, f: int) -> None:
    """ConfigError unless f is a number of contributors that may be wrong."""
    if not 1 <= f < MOST_PEERS // 2:
        raise ConfigError(
            f"{rule}: f contributors may send anything, want 1 <= f < {MOST_PEERS // 2}; 0 is the rule mean"
        )


def check_iterations(rule: object, iterations: int) -> None:
    """ConfigError unless every peer can make so many."""
    if not 1 <= iterations <= MOST_ITERATIONS:
        raise ConfigError(f"{rule}: want 1 <= iterations <= {MOST_ITERATIONS}; 8 is usual")


def mean_scales(sent: Sent, chosen: Sequence[int]) -> list[float]:
    """The weighted mean of those at these places."""
    return sent.scales_of(sent.mean_shares(chosen))


# ---- what a rule sees of contributions ----
#
# Their norms, weights and inner products. No vector is needed.
#
# A point is a mixture v = sum c_i x_i, said by its shares c. With G_ij = <x_i, x_j>:
#
# <x_i, v> = sum_j c_j G_ij ;  |v|^2 = sum_i c_i <x_i, v> ;  |x_i - v|^2 = G_ii - 2 <x_i, v> + |v|^2
#
# All is elementwise float64, with sums by `total` or row by row in the order of peer ids.

# Shape suffixes: K = contributors, J = mixtures of them.

Floats = NDArray[np.float64]


def total(values: Floats) -> float:
    """The sum, rounded once: the same in any order and on any machine."""
    return math.fsum(values.ravel().tolist())


@dataclass(frozen=True, slots=True, eq=False)
class Sent:
    """The contributions that a rule looks at, by peer id."""

    norm_K: Floats
    weight_K: Floats  # above 0 once ``weigh`` has left out who counts nothing
    gram_KK: Floats | None = None  # symmetric; None where only norms are known
    seed: bytes = b""  # of the round: alike on every peer, and not known before all have contributed

    @classmethod
    def of_norms(cls, norms: Sequence[float], weights: Sequence[float], seed: bytes = b"") -> Sent:
        """Describe contributions whose inner products nobody asked for."""
        return cls(np.array(norms, dtype=np.float64), np.array(weights, dtype=np.float64), None, seed)

    @classmethod
    def of_gram(cls, gram_KK: Floats, weights: Sequence[float], seed: bytes = b"") -> Sent:
        """Describe contributions by their inner products."""
        return cls(_roots(np.diagonal(gram_KK)), np.array(weights, dtype=np.float64), gram_KK, seed)

    def __len__(self) -> int:
        return len(self.norm_K)

    @property
    def products_KK(self) -> Floats:
        """The inner products, of a rule that asked for them."""
        assert self.gram_KK is not None, "the rule's `needs` does not say that it needs inner products"
        return self.gram_KK

    def among(self, places: Sequence[int]) -> Sent:
        """Return the contributions at these places alone."""
        chosen = list(places)
        gram_KK = None if self.gram_KK is None else self.gram_KK[np.ix_(chosen, chosen)]
        return Sent(self.norm_K[chosen], self.weight_K[chosen], gram_KK, self.seed)

    def scale(self, scale_K: Floats) -> Sent:
        """Each contribution times its scale."""
        gram_KK = None if self.gram_KK is None else self.gram_KK * scale_K[:, None] * scale_K[None, :]
        return Sent(self.norm_K * scale_K, self.weight_K, gram_KK, self.seed)

    def mix(self, share_JK: Floats, weight_J: Floats) -> Sent:
        """Mixtures of the contributions, each with a weight of its own."""
        half_JK = _times(share_JK, self.products_KK)
        gram_JJ = _times(half_JK, np.ascontiguousarray(share_JK.T))
        gram_JJ = np.tril(gram_JJ) + np.tril(gram_JJ, -1).T  # rounding may tell the halves apart
        return Sent(_roots(np.diagonal(gram_JJ)), weight_J, gram_JJ, self.seed)

    def squared_distances_KK(self) -> Floats:
        """|x_i - x_j|^2, symmetric to the last bit and 0 with itself."""
        gram_KK = self.products_KK
        square_K = np.diagonal(gram_KK)
        found_KK = np.maximum((square_K[:, None] + square_K[None, :]) - 2.0 * gram_KK, 0.0)
        np.fill_diagonal(found_KK, 0.0)
        return found_KK

    def distances_from(self, share_K: Floats) -> Floats:
        """|x_i - v| (K,) of a mixture v."""
        product_K = _times(share_K[None], self.products_KK)[0]
        square = total(share_K * product_K)
        return _roots(np.diagonal(self.products_KK) - 2.0 * product_K + square)

    def mean_shares(self, chosen: Sequence[int] | None = None) -> Floats:
        """The weighted mean of some, or all, as a mixture."""
        weight_K = self.weight_K.copy()
        if chosen is not None:
            left_K = np.ones(len(self), dtype=bool)
            left_K[list(chosen)] = False
            weight_K[left_K] = 0.0
        return weight_K / total(weight_K)

    def scales_of(self, share_K: Floats) -> list[float]:
        """Return the scale of each so that the weighted mean of all is this mixture."""
        scale_K: Floats = share_K * total(self.weight_K) / self.weight_K
        return scale_K.tolist()  # type: ignore[no-any-return]  # numpy's stubs say object

    def shares_of(self, scales: Sequence[float]) -> Floats:
        """The mixture that the weighted mean is after such scales."""
        return self.weight_K * np.array(scales, dtype=np.float64) / total(self.weight_K)


def _roots(square_K: Floats) -> Floats:
    found_K: Floats = np.sqrt(np.maximum(square_K, 0.0))
    return found_K


def _times(left_JK: Floats, right_KL: Floats) -> Floats:
    """left @ right, its terms added in the order of K."""
    found_JL = np.zeros((left_JK.shape[0], right_KL.shape[1]), dtype=np.float64)
    for k in range(right_KL.shape[0]):
        found_JL += left_JK[:, k, None] * right_KL[k]
    return found_JL


# ---- norms, and the scale that clips them ----
#
# How large contributions are, and what shortens those far above the typical one before the mean.
#
# scale_i = min(1, median(norms) / norm_i)      the mean's divisor stays the sum of the weights
#
# One peer with a wrong learning rate, or a flipped exponent, cannot move the anchor further than a typical peer does;
# a direction that is wrong at the usual length is not found. Every peer computes the scales itself: squares of float32
# are exact in float64.
#
# Source: median-norm clipping of Templar's SparseLoCo runs, "Covenant-72B", 2026; Lidin et al., "Incentivizing
# Permissionless Distributed Learning of LLMs", 2025, arXiv:2505.21684.

# Shape suffixes: N = elements of a contribution, L = lanes, R = rows of so many elements.

ENOUGH_TO_CLIP = 3  # contributors: of two the lower median is the smaller, which would shorten the other every round


class SquareSum:
    """The squares of values that come row by row; which rows come together changes no bit."""

    def __init__(self) -> None:
        self._lane_L = np.zeros(WIDTH, dtype=np.float64)

    def add(self, value_RL: NDArray[np.float32]) -> None:
        """The next rows."""
        _add_squares(value_RL, self._lane_L)

    def root(self) -> float:
        """The Euclidean norm: finite if, and only if, every value is, for float64 holds all sums of their squares."""
        return math.sqrt(sum_of_lanes(self._lane_L))


def norm(value_N: Tensor) -> float:
    """The Euclidean norm of a flat float32 tensor on the processor: the same bits on every machine."""
    squares = SquareSum()
    for value_RL in rows_of((value_N,)):
        squares.add(value_RL)
    return squares.root()


def typical_norm(norms: Sequence[float]) -> float | None:
    """The lower median: a norm that some contribution has. None when there are too few to say, or it is 0."""
    typical = statistics.median_low(norms) if len(norms) >= ENOUGH_TO_CLIP else 0.0
    return typical or None


def clip_scales(norms: Sequence[float]) -> list[float]:
    """Return the scale of each contribution, in (0, 1] and rounded to float32; all 1 where nothing is typical."""
    typical = typical_norm(norms)
    if typical is None:
        return [1.0] * len(norms)
    return [1.0 if one <= typical else float32(typical / one) for one in norms]


@compiled
def _add_squares(value_RL, lane_L):  # type: ignore[no-untyped-def]
    for row in range(value_RL.shape[0]):
        for lane in range(WIDTH):  # a constant: 16 million values take 2 ms, and 14 with a bound that is not known
            value = np.float64(value_RL[row, lane])
            lane_L[lane] += value * value


# ---- where a moving centre begins ----
#
# At no change, at the mean, or at the medoid: the contribution with the least sum of distances to the others, the
# first of equals.

Start = Literal["zero", "mean", "medoid"]


def check_start(rule: object, start: str, known: Sequence[Start]) -> None:
    """ConfigError unless it is one of them."""
    if start not in known:
        raise ConfigError(f"{rule}: start is where the centre begins, want one of {', '.join(known)}")


def start_of(sent: Sent, start: str) -> Floats:
    """The start as a mixture of the contributions."""
    if start == "mean":
        return sent.mean_shares()
    share_K = np.zeros(len(sent), dtype=np.float64)
    if start == "medoid":
        sums = [total(np.sqrt(square_K)) for square_K in sent.squared_distances_KK()]
        share_K[sums.index(min(sums))] = 1.0
    return share_K


# ---- usual norms, learnt from norm to norm ----
#
# The detector finds which norm is far above them.
#
# z = (norm - mean) / sigma, an outlier when z > 3 max(1, std z)
# mean <- mean + a d ;  M2 <- (1-a) (M2 + a d d')      d, d': norm - mean, before and after ;  a = 0.02
#
# What was learnt is four float32, (count, mean, M2, mean z^2), as part of a state that all peers hold alike. It is
# computed in float64. std z is learnt after the warm-up: after two norms that are nearly equal the third one's z may
# be 500, and nothing would be an outlier for the next 400.
#
# Source: Cheng et al., "EDiT", 2024, arXiv:2412.07210; constants as in intelligent-machine-learning/atorch.

LARGEST_NORM = 1e18  # of a norm, and of z: a square beyond float32 would stay in the state for ever
NOTHING_LEARNT = (0.0, 0.0, 0.0, 0.0)
_AVERAGING = 0.02  # a, of the moving mean and variance
_THRESHOLD = 3.0  # standard deviations


def is_outlier(value: float, usual: Tensor, warmup: int) -> bool:
    """Return whether a norm is far above the usual; before ``warmup`` norms were learnt from only one that cannot be
    is.
    """
    count, mean, squares, deviation = usual.tolist()
    if not math.isfinite(value):
        return True
    if count < warmup or squares <= 0:
        return False
    return bool((value - mean) / math.sqrt(squares) > _THRESHOLD * max(1.0, math.sqrt(deviation)))


def with_learnt(usual: Tensor, value: float, warmup: int) -> Tensor:
    """Learn one more norm, and return what is usual with it."""
    count, mean, squares, deviation = usual.tolist()
    if count == 0:
        return usual.new_tensor([1.0, value, 0.0, 0.0])
    off = value - mean
    if count >= warmup and squares > 0:
        z = min(abs(off) / math.sqrt(squares), LARGEST_NORM)
        deviation += _AVERAGING * (z * z - deviation)
    mean += _AVERAGING * off
    squares = (1 - _AVERAGING) * (squares + _AVERAGING * off * (value - mean))
    return usual.new_tensor([count + 1, mean, squares, deviation])


# ---- shares of late contributions ----
#
# A contribution may count less for the outer steps that passed since its progress began. A mean whose weights are
# multiplied by such shares must not divide by them as well: alone in a commit, a late contribution would count in full
# again. `mean_share` is the factor that puts the divisor right.
#
# Shares are products and quotients of float64 and square roots, which IEEE 754 rounds alike everywhere: the power of
# C's library differs in its last digits.


def aged_share(age: int, times: int) -> float:
    """``(1 + age) ** (-times / 2)``: 1 for one that is in time, and for ``times = 0``."""
    share, root = 1.0, math.sqrt(1.0 + age)
    for _ in range(times):
        share /= root
    return share


def mean_share(weights: Sequence[float], shares: Sequence[float]) -> float:
    """Return the factor by which a mean of ``weights``, each with its share in it, loses the shares in its divisor.

    Contributors whose share is 0 are in neither sum. 1 where all shares are 1.
    """
    counted = [(weight, share) for weight, share in zip(weights, shares, strict=True) if weight > 0]
    return math.fsum(weight for weight, _ in counted) / math.fsum(weight / share for weight, share in counted)


# ---- mean and variance of a tensor ----

# Shape suffixes: N = values, L = lanes, R = rows of so many.


def mean_and_variance(value_N: Tensor) -> tuple[float, float]:
    """The mean, and the unbiased variance, of two values or more of a flat float32 tensor on the processor.

    The mean is rounded to float32, so that deviations from it are float32 as well; what rounding took is put right.
    """
    count, mean = len(value_N), _sum(value_N) / len(value_N)
    near = float(np.float32(mean))
    with torch.no_grad():
        squares = norm(value_N - near) ** 2 - count * (mean - near) ** 2
    return near, max(0.0, squares / (count - 1))


def _sum(value_N: Tensor) -> float:
    """Row by row into the lanes, then the lanes in halves."""
    lane_L = np.zeros(WIDTH, dtype=np.float64)
    for value_RL in rows_of((value_N,)):
        for row_L in value_RL:
            lane_L += row_L
    while lane_L.size > 1:
        half = lane_L.size // 2
        lane_L = lane_L[:half] + lane_L[half:]
    return float(lane_L[0])
