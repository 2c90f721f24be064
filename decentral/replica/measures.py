"""Figures of contributions: how long each is and how far they differ, who stands out, what nobody has sent yet.

Shape suffixes: N = elements of one fragment, K = contributions, C = channels, S = numbers of a sketch or places of a
sample, V = values that are not zero; flat float32.
"""

from __future__ import annotations

import math
import statistics
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from decentral.compressors import Payload
from decentral.consensus.chain import contributions
from decentral.errors import PayloadError
from decentral.optimizers import Channel, Contributor, OuterMethod
from decentral.optimizers.aggregation.base import SquareSum, typical_norm
from decentral.optimizers.aggregation.gram import Sketching, cosines
from decentral.optimizers.mean import MOST
from decentral.replica.codec import Codec, numel
from decentral.replica.figures import LOSS_DISPERSION, MEAN_COSINE, NORM_DISPERSION, REPLICA_DISTANCE, REPLICA_VARIANCE
from decentral.replica.weights import attempt
from decentral.tensors.device import on_device_of
from decentral.tensors.ops import rows_of
from decentral.wire.keys import PeerId, peer_name
from decentral.wire.messages import Record

__all__ = [
    "LAST_PAIRS",
    "MOST_PLACES",
    "Coverage",
    "Distances",
    "Event",
    "Measure",
    "Measures",
    "Sample",
    "Scrutiny",
    "compare",
    "compare_losses",
    "compare_two",
    "dispersion",
    "mean_cosine",
    "outliers",
    "ratio",
]

# ---- the norm and the sketch of each contribution ----
#
# They are made where its frame is checked anyway: few numbers, kept by its hash.
#
# Straight from the parts where they say places and values (64 of 4096: 3 ms for 31 million parameters, 40 through a
# dense tensor); else one pass over what each tensor decompresses to. Which of the two is the compressor's alone, for
# squares add up in another order, and every peer must get the same bits. A sum of squares finds NaN and Inf, too. An
# outer step must not depend on what happens to be here: what is missing is measured again, to the same bits.

KEPT = 1024  # frames, 4 KiB each: a round of the largest membership


@dataclass(frozen=True, slots=True)
class Measure:
    """The measure of one contribution, or of one slice of it."""

    norm: float
    sketch_S: Tensor  # see ``Sketching``

    @classmethod
    def of(cls, pieces: Iterable[Tensor], numel: int) -> Measure:
        """Measure float32 tensors of ``numel`` values in all, one behind the other. PayloadError when one is NaN or
        Inf.
        """
        squares, sketching = SquareSum(), Sketching(numel)
        for value_RL in rows_of(pieces):
            squares.add(value_RL)
            sketching.add(value_RL)
        return cls._from_sums(squares, sketching)

    @classmethod
    def of_payloads(cls, codec: Codec, payloads: Sequence[Payload]) -> Measure:
        """Measure what a change's payloads hold. PayloadError when one does not decompress, or is NaN or Inf."""
        whole = numel([payload.shape for payload in payloads])
        found = codec.supports(payloads)
        if found is None:
            return cls.of(codec.pieces(payloads), whole)
        squares, sketching = SquareSum(), Sketching(whole)
        for place_V, value_V in found:
            sketching.add_at(place_V.numpy(), value_V.numpy())
        for value_RL in rows_of(value_V for _, value_V in found):
            squares.add(value_RL)
        return cls._from_sums(squares, sketching)

    @classmethod
    def _from_sums(cls, squares: SquareSum, sketching: Sketching) -> Measure:
        norm = squares.root()
        if not math.isfinite(norm):  # one NaN in a mean would reach every peer
            raise PayloadError("body decodes to NaN or Inf; drop it and its sender")
        return cls(norm, sketching.sketch())


class Measures:
    """The measures of the newest frames, by hash. Called from the threads that measure."""

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, Measure] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, frame: bytes) -> Measure | None:
        """Return the measure of a frame, while it is remembered."""
        return self._known.get(frame)

    def add(self, frame: bytes, made: Measure) -> Measure:
        """Remember what was measured of a frame."""
        with self._lock:
            self._known[frame] = made
            if len(self._known) > KEPT:
                self._known.popitem(last=False)
        return made


# ---- how far the contributions of one round differ ----
#
# From what was measured of each when its frame was checked:
#
# dispersion   std(x) / mean(x)                                           over the peers
# mean cosine  mean of <x_i, x_j> / (|x_i| |x_j|) over i < j = (|sum u_i|^2 - K) / (K (K - 1)),   u_i = x_i / |x_i|
#
# The right-hand side needs K sums instead of K^2 products. Its vectors are sketches of 1024 numbers
# (`decentral.optimizers.aggregation.gram`): the mean over K of them is off by about 0.04 / (K - 1), and exact for
# contributions that are equal or opposite. All is float64 in the order of the record, so that peers who measured the
# same frames have the same bits.


def compare(measures: Sequence[Measure]) -> dict[str, float]:
    """Return the figures of contributions, as far as there are any: one alone differs from nobody."""
    found = {
        NORM_DISPERSION: dispersion([one.norm for one in measures]),
        MEAN_COSINE: mean_cosine([one.sketch_S for one in measures]),
    }
    return {name: value for name, value in found.items() if value is not None}


def dispersion(values: Sequence[float]) -> float | None:
    """Return the spread over the mean; None of fewer than two, or where their mean is not above 0 or is no float."""
    if len(values) < 2:
        return None
    mean = math.fsum(values) / len(values)
    if not 0 < mean < math.inf:
        return None
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values)) / mean


def mean_cosine(vectors: Sequence[Tensor]) -> float | None:
    """Return the mean cosine over all pairs of flat vectors (S,), but those that are zero or not finite; None: fewer
    than two are left.
    """
    if not vectors:
        return None
    vector_KS = torch.stack(list(vectors)).double()
    norm_K = vector_KS.norm(dim=1)
    has_one_K = norm_K.isfinite() & (norm_K > 0)
    count = int(has_one_K.sum())
    if count < 2:
        return None
    unit_KS = vector_KS[has_one_K] / norm_K[has_one_K, None]
    cosine = (float(unit_KS.sum(0).square().sum()) - count) / (count * (count - 1))
    return max(-1.0, min(1.0, cosine))


# ---- how far the peers' losses differ ----
#
# It is known of a method whose summaries tell them: of others nothing is known, nor asked.


def compare_losses(method: OuterMethod, told: Sequence[Contributor]) -> dict[str, float]:
    """Return the spread of losses over those whose summary tells one. A plugin that raises, or gives no number, tells
    none.
    """
    losses = [loss for one in told if (loss := _loss(method, one)) is not None]
    found = dispersion(losses)
    return {} if found is None else {LOSS_DISPERSION: found}


def _loss(method: OuterMethod, told: Contributor) -> float | None:
    """Return a finite number, or None: a summary is a peer's bytes, and a plugin anybody's code."""
    given, _ = attempt(lambda: method.summary.told_loss(told))
    found, _ = attempt(lambda: float(given))  # type: ignore[arg-type]  # TypeError is what None gives
    return found if found is not None and math.isfinite(found) else None


# ---- contributors that stand out ----
#
# A peer whose update is far larger than the others', or two that send the same one: both train at full speed, commit
# every round and look healthy; the first ruins the run, the second wastes a machine. Only names are told: what becomes
# of an update is the manifest's business (``outer.norm_clip``).

# Peers of a clean run stayed within 1.11 times the median; three times their learning rate made 2.3 to 2.7, a rate of
# 0.5 made 70 to 280 (experiments/clip). The spread guards swarms whose peers differ more than that.
OUTLIER_TIMES = 2.0  # the median norm
OUTLIER_SPREAD = 6.0  # median absolute deviations above it
# Honest peers are alike for two reasons, and copies for both at once. An outer step that went too far pulls all back
# the same way: cosines of up to 0.995 between any two, but of 0.81 at most once what a pair has in common with the
# others is taken off. Peers of similar data differ from the others together: 0.987 without the others, but 0.973 as
# they are. A copy with 1 % of noise is above both bounds (tests/lab/test_twins.py). Two that are alone have nobody to
# be compared with.
LOOKED_AT = 0.98  # cosine of two updates
TWIN_COSINE = 0.9  # of what they do not share with the others
TWO_ALONE = 0.997  # of two updates that have no others beside them
TWIN_ROUNDS = 3  # in a row
TOLD_AGAIN = 20  # rounds until the same is said again

Event = tuple[str, dict[str, object]]


class Scrutiny:
    """The contributors that stand out in one peer's view of the rounds: what was said of them, and which were alike."""

    def __init__(self) -> None:
        self._alike: Counter[tuple[PeerId, PeerId]] = Counter()  # rounds in a row, of those that both contributed to
        self._told: dict[tuple[PeerId, ...], int] = {}  # an outlier or a pair -> the round it was last told

    def events(self, record: Record, measures: Mapping[PeerId, Measure]) -> list[Event]:
        """Return what is to be told of the contributors of ``record`` as far as they were measured."""
        refs = [ref for ref in contributions(record) if ref.peer in measures]
        norms = [measures[ref.peer].norm for ref in refs]
        far = outliers(norms, [ref.steps for ref in refs])
        if far:  # an anchor that was thrown off pulls all honest peers the same way: cosines of 0.94 to 0.99
            self._alike.clear()
            named = [(refs[i].peer, norms[i]) for i in far if self._is_news((refs[i].peer,), record.round)]
            return [("outlier", _outlier(record, peer, norm, norms)) for peer, norm in named]
        return self._twins(record.round, sorted(ref.peer for ref in refs), measures)

    def _twins(self, round_: int, peers: Sequence[PeerId], measures: Mapping[PeerId, Measure]) -> list[Event]:
        if len(peers) < 2:
            return []
        cosine = cosines([measures[peer].sketch_S for peer in peers])
        alike = {
            (peers[i], peers[j]): float(cosine[i, j]) for i, j in _above(cosine, LOOKED_AT) if _copies(cosine, i, j)
        }
        here, found = set(peers), list[Event]()
        for pair in [pair for pair in self._alike if here.issuperset(pair) and pair not in alike]:
            del self._alike[pair]
        for (one, other), how_much in alike.items():
            self._alike[one, other] += 1
            if self._alike[one, other] >= TWIN_ROUNDS and self._is_news((one, other), round_):
                names = [peer_name(one), peer_name(other)]
                found.append(("twins", {"round": round_, "peers": names, "cosine": how_much}))
        return found

    def _is_news(self, who: tuple[PeerId, ...], round_: int) -> bool:
        self._told = {key: told for key, told in self._told.items() if round_ - told < TOLD_AGAIN}
        if who in self._told:
            return False
        self._told[who] = round_
        return True


def outliers(norms: Sequence[float], steps: Sequence[int]) -> list[int]:
    """Return the places of those far above the lower median, given the inner steps that they claim: an absent peer
    brings several rounds', and who claims more than ``MOST`` times the usual number is taken for one that claims so
    many.
    """
    typical = typical_norm(norms)
    if typical is None:
        return []
    least = typical + OUTLIER_SPREAD * statistics.median(abs(norm - typical) for norm in norms)
    usual = max(1, statistics.median_low(steps))
    allowed = [OUTLIER_TIMES * typical * min(max(1.0, count / usual), MOST) for count in steps]
    return [i for i, norm in enumerate(norms) if norm > max(least, allowed[i])]


def _copies(cosine: Tensor, i: int, j: int) -> bool:
    """Tell whether updates ``i`` and ``j`` are as alike without what all others have, too."""
    count = len(cosine) - 2
    if not count:
        return bool(cosine[i, j] > TWO_ALONE)
    with_others = (cosine[[i, j]].sum(dim=1) - 1 - cosine[i, j]) / count  # of each, with the others' mean
    of_others = (cosine.sum() - 2 - 2 * cosine[i, j] - 2 * count * with_others.sum()) / count**2
    shared = cosine[i, j] - with_others.sum() + of_others
    lengths = (1 - 2 * with_others + of_others).clamp_min(0).sqrt()
    return bool(shared > TWIN_COSINE * lengths.prod())


def _above(cosine: Tensor, bound: float) -> list[list[int]]:
    """Return the places of pairs, each once: most swarms have none, and a loop over all pairs of 1,024 took a
    second.
    """
    pairs: list[list[int]] = torch.triu(cosine > bound, diagonal=1).nonzero().tolist()
    return pairs


def _outlier(record: Record, peer: PeerId, norm: float, norms: Sequence[float]) -> dict[str, object]:
    typical = statistics.median_low(norms)
    said = {"peer": peer_name(peer), "norm": norm, "median": typical, "times": norm / typical}
    return {"round": record.round, "outer_step": record.outer_step + 1, **said}


# ---- a sample of each fragment's coordinates ----
#
# A few are looked at for all: which of them anybody has sent yet, how large is what is owed.
#
# One random place in each of S equal ranges, the same on every peer: of 16,384 a share is off by 0.4 % at most and a
# norm of Gaussian values by 0.6 % (one standard deviation). All of a fragment that is no larger. A pass over every
# coordinate would be a sizeable part of the outer step.

MOST_PLACES = 1 << 14  # places of one fragment
_SEED = 1  # any, the same on all peers


class Sample:
    """The coordinates of one fragment that are looked at."""

    def __init__(self, numel: int, most: int = MOST_PLACES) -> None:
        self.numel, self._place_S = numel, _places(numel, most) if numel > most else None

    @property
    def size(self) -> int:
        """Return how many coordinates it has."""
        return self.numel if self._place_S is None else len(self._place_S)

    def of(self, value: Tensor) -> Tensor:
        """Return the sample's values of (N,) or (K, N), no copy where it is all of them."""
        return value if self._place_S is None else value.index_select(-1, on_device_of(self._place_S, value))

    def of_part(self, value: Tensor, start: int) -> Tensor:
        """Return the sample's values of what lies at ``start`` of the fragment, flat; of parts in order they make up
        `of`.
        """
        if self._place_S is None:
            return value
        ends = torch.tensor([start, start + len(value)], dtype=torch.int64, device="cpu")
        first, last = torch.searchsorted(self._place_S, ends).tolist()
        return value[self._place_S[first:last] - start]

    def nonzero(self, change: Tensor) -> Tensor:
        """Return where something was sent, bool (S,), of a change (N,) in which only what nobody sent is zero; or of
        rows (K, N) of each.
        """
        came = self.of(change) != 0
        return came if came.dim() == 1 else came.any(0)

    def norm(self, value_N: Tensor) -> float:
        """Return the norm of the sample alone: for ratios of two."""
        return _norm(self.of(value_N))


def ratio(one_S: Tensor, other_S: Tensor) -> float | None:
    """Return the norm of one sample over that of the other; None where that is no finite number."""
    below, above = _norm(other_S), _norm(one_S)
    found = above / below if 0 < below < math.inf else math.inf
    return found if math.isfinite(found) else None


def _norm(value_S: Tensor) -> float:
    return float(torch.linalg.vector_norm(value_S, dtype=torch.float64))


def _places(numel: int, count: int) -> Tensor:
    """Return rising places, one in each of ``count`` ranges that differ in length by one at most."""
    bound = torch.arange(count + 1, dtype=torch.int64, device="cpu") * numel // count
    within = torch.rand(count, generator=torch.Generator().manual_seed(_SEED), dtype=torch.float64, device="cpu")
    return bound[:-1] + (within * bound.diff()).long()


# ---- coordinates that nobody has sent yet ----


class Coverage:
    """The places where anybody has sent something since this process looks, by the sample of each fragment: one peer's
    view.
    """

    def __init__(self, samples: Sequence[Sample]) -> None:
        """``samples``: of each fragment."""
        self.samples = samples
        self._came = [torch.zeros(sample.size, dtype=torch.bool, device="cpu") for sample in samples]
        self._rounds = [0] * len(samples)

    def add(self, fragment: int, *came: Tensor) -> None:
        """Add where in the sample something came in one round, each bool (S,)."""
        self._rounds[fragment] += 1
        for came_S in came:
            self._came[fragment] |= came_S

    @property
    def rounds(self) -> int:
        """Return how many rounds were looked at, of each fragment at least."""
        return min(self._rounds, default=0)

    @property
    def never_sent(self) -> float | None:
        """Return the share of all coordinates that never came; None while nothing was looked at."""
        if not any(self._rounds):
            return None
        numel = sum(sample.numel for sample in self.samples)
        pairs = zip(self.samples, self._came, strict=True)
        missing = sum(
            sample.numel * (1.0 - float(came_S.sum()) / sample.size) for sample, came_S in pairs if sample.size
        )
        return missing / numel if numel else None


# ---- what a gossip pair tells ----
#
# It tells whether both changes pull together, and how far the two replicas are from one another.
#
# Of independent replicas x_i with the same mean, E |x_i - x_j|^2 = 2 Var(x): half the mean square of the distances to
# the last partners is the variance between all replicas, in units of a replica's own square.

LAST_PAIRS = 16  # pairs: one replica of eight that diverges is met every seventh step


def compare_two(due: Sequence[Channel], mine_CN: Tensor, theirs_CN: Tensor, sample: Sample) -> dict[str, float]:
    """Return the figures of the changes that both sent, by a sample; nothing of a method that keeps its change to
    itself.
    """
    if due[0].is_replica:
        return {}
    changes = [one_CN.view(len(due), -1)[0] for one_CN in (mine_CN, theirs_CN)]
    found = {
        NORM_DISPERSION: dispersion([sample.norm(change_N) for change_N in changes]),
        MEAN_COSINE: mean_cosine([sample.of(change_N) for change_N in changes]),
    }
    return {name: value for name, value in found.items() if value is not None}


class Distances:
    """The distances between this peer's replica and those of its last partners."""

    def __init__(self) -> None:
        self._last: deque[float] = deque(maxlen=LAST_PAIRS)

    def add(self, distance: float | None) -> dict[str, float]:
        """Return the figures after one more pair; ``distance``: see `GossipStep.disagreement`."""
        if distance is None:
            return {}
        self._last.append(distance)
        squares = [one * one for one in self._last]
        return {REPLICA_DISTANCE: distance, REPLICA_VARIANCE: sum(squares) / (2 * len(squares))}
