"""The contributions of each round, looked at by one peer: figures of how they differ, and who stands out, as events.

An observer: rounds tell it of each commit (`RoundObserver`), and do not depend on it. Nothing is sent or decoded for
it: a frame was measured when it was checked, the mean was made for the outer step. In a gather every peer sees all, in
a reduce an owner its part of all. Figures are made between two waits of the loop, from what is there; what goes wrong
here is written to the log, and the round goes on.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from decentral.compressors.feedback import DEBT
from decentral.consensus.chain import contributions
from decentral.flow.waiting import Offload, in_thread
from decentral.observe.diagnostics import (
    DEBT_RATIO,
    LOSS_DISPERSION,
    MEAN_COSINE,
    NEVER_SENT,
    NORM_DISPERSION,
    REPLICA_DISTANCE,
    REPLICA_VARIANCE,
    Figures,
)
from decentral.optimizers import Channel, Contributor, OuterMethod
from decentral.optimizers.aggregation.base import typical_norm
from decentral.optimizers.aggregation.gram import cosines
from decentral.optimizers.mean import MOST
from decentral.replica.contribution import Contribution
from decentral.replica.measures import Measure, Sample, norm_of
from decentral.replica.pair_step import GossipStep
from decentral.replica.replica import OuterStep, Replica
from decentral.replica.weights import attempt, contributors_of
from decentral.wire.frames import Frame, FrameKind
from decentral.wire.keys import PeerId, peer_name
from decentral.wire.messages import Record

# Shape suffixes: N = elements of one fragment, K = contributions, C = channels, S = numbers of a sketch or places of a
# sample; flat float32.

logger = logging.getLogger("decentral.observe")


class RoundMetrics:
    """The view of one peer of the rounds that it commits, and of the pairs that it meets."""

    def __init__(
        self,
        replica: Replica,
        on_event: Callable[[str, dict[str, object]], None],
        on_figures: Callable[[Figures], None] = lambda figures: None,
        offload: Offload = in_thread,
    ) -> None:
        """``on_event`` is told of contributors that stand out, ``on_figures`` the rest, before the round's update."""
        self._replica, self._on_event, self._on_figures, self._offload = replica, on_event, on_figures, offload
        self._scrutiny, self._coverage, self._distances = Scrutiny(), Coverage(replica.samples), Distances()
        self._fails = False  # it has been said

    async def name_contributors(
        self, record: Record, frames: Mapping[bytes, Frame], known: Mapping[PeerId, Measure] | None
    ) -> None:
        """Tell of outliers and twins."""
        if record.contributors or known:
            measured = known or {}
        else:
            named, measure = _pair_frames(record, frames), self._replica.contents.measure
            measured = {peer: await self._offload(measure, frame) for peer, frame in named}
        for event, fields in self._scrutiny.events(record, measured):
            self._on_event(event, fields)

    def see_commit(
        self,
        record: Record,
        frames: Mapping[bytes, Frame],
        step: OuterStep,
        mine: Contribution | None,
        known: Mapping[PeerId, Measure] | None,
    ) -> None:
        """Tell the figures of a commit that moved the anchor."""
        if self._replica.agrees:  # else its one commit merges replicas
            self._tell(lambda: self._figures(record, frames, step, mine, known))

    def see_pair(self, mine: Contribution, mine_CN: Tensor, theirs_CN: Tensor, taken: GossipStep) -> None:
        """Tell the figures of a gossip step that a pair took."""
        self._tell(lambda: self._pair_figures(mine, mine_CN, theirs_CN, taken))

    # ---- figures ----

    def _figures(
        self,
        record: Record,
        frames: Mapping[bytes, Frame],
        step: OuterStep,
        mine: Contribution | None,
        known: Mapping[PeerId, Measure] | None,
    ) -> Figures:
        measures = self._measures(record, frames, known)
        method = self._replica.method
        steps = [ref.steps for ref in contributions(record)]
        values = {} if method.summary.divides else compare(measures, steps)
        values |= compare_losses(
            method, contributors_of(contributions(record), record.outer_step, len(self._coverage.samples))
        )
        if step.came_S is not None:
            self._coverage.add(step.fragment, step.came_S)
        learnt_S = None if mine is None else mine.change_at(self._coverage.samples[step.fragment])
        values |= self._of_fragment(step.fragment, self._replica.feedback[step.fragment], learnt_S)
        return Figures(record.outer_step + 1, len(measures), self._coverage.rounds, bool(record.contributors), values)

    def _pair_figures(self, mine: Contribution, mine_CN: Tensor, theirs_CN: Tensor, taken: GossipStep) -> Figures:
        due, fragment = self._replica.due(taken.step), taken.fragment
        values = compare_two(due, mine_CN, theirs_CN, self._coverage.samples[fragment])
        if not due[0].is_replica:
            changes = [sent_CN.view(len(due), -1)[0] for sent_CN in (mine_CN, theirs_CN)]
            self._coverage.add(fragment, *map(self._coverage.samples[fragment].nonzero, changes))
        values |= self._of_fragment(
            fragment, taken.feedback, self._coverage.samples[fragment].of(mine.gradient_N)
        ) | self._distances.add(taken.disagreement)
        return Figures(taken.step + 1, 2, self._coverage.rounds, False, values)

    def _of_fragment(self, fragment: int, books: Mapping[str, Tensor], learnt_S: Tensor | None) -> dict[str, float]:
        """Return the residual over what was learnt, and the share that was never sent."""
        sample = self._coverage.samples[fragment]
        owes = None if learnt_S is None or DEBT not in books else ratio(sample.of(books[DEBT]), learnt_S)
        found = {DEBT_RATIO: owes, NEVER_SENT: self._coverage.never_sent}
        return {name: value for name, value in found.items() if value is not None}

    def _measures(
        self, record: Record, frames: Mapping[bytes, Frame], known: Mapping[PeerId, Measure] | None
    ) -> Sequence[Measure]:
        """Return the measures of the contributors, in the record's order: all of them, or none."""
        if known is None and not record.contributors:
            found = self._replica.contents.unpacked.measures
            known = {
                peer: one for peer, frame in _pair_frames(record, frames) if (one := found.get(frame.hash)) is not None
            }
        peers = [ref.peer for ref in contributions(record)]
        return [known[peer] for peer in peers] if known and all(peer in known for peer in peers) else []

    def _tell(self, make: Callable[[], Figures]) -> None:
        try:
            self._on_figures(make())
        except Exception:
            if not self._fails:
                logger.exception("the figures of a round could not be made; training is not affected")
            self._fails = True


def _pair_frames(record: Record, frames: Mapping[bytes, Frame]) -> list[tuple[PeerId, Frame]]:
    named = [(ref.peer, frames[ref.frame]) for ref in record.frames]
    return [(peer, frame) for peer, frame in named if frame.header.kind == FrameKind.CONTRIBUTION]


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


def compare(measures: Sequence[Measure], steps: Sequence[int]) -> dict[str, float]:
    """Return the figures of contributions, as far as there are any: one alone differs from nobody.

    ``steps``: inner steps behind each, as it says. Who made less than half of the usual number is as short as that: it
    has just come.
    """
    least = statistics.median_low(steps) / 2 if steps else 0.0
    found = {
        NORM_DISPERSION: dispersion([one.norm for one, count in zip(measures, steps, strict=False) if count >= least]),
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
# Steps are what a peer claims. So they explain no more than this many times the usual length of a step: a rate of 0.5
# made updates of 70 to 280 times the median, who trained on while a member died one of 8.82.
MOST_EXCUSED = 16.0

Event = tuple[str, dict[str, object]]


class Scrutiny:
    """The contributors that stand out in one peer's view of the rounds: what was said of them, and which were alike."""

    def __init__(self) -> None:
        self._alike: Counter[tuple[PeerId, PeerId]] = Counter()  # rounds in a row, of those that both contributed to
        self._told: dict[tuple[PeerId, ...], int] = {}  # an outlier or a pair -> the round it was last told
        self._excused: dict[PeerId, tuple[int, int]] = {}  # whose length its steps explained -> when last, how often

    def events(self, record: Record, measures: Mapping[PeerId, Measure]) -> list[Event]:
        """Return what is to be told of the contributors of ``record`` as far as they were measured."""
        refs = [ref for ref in contributions(record) if ref.peer in measures]
        norms, steps = [measures[ref.peer].norm for ref in refs], [ref.steps for ref in refs]
        far = outliers(norms, steps)
        if far:  # an anchor that was thrown off pulls all honest peers the same way: cosines of 0.94 to 0.99
            self._alike.clear()
            explained = set(far) - set(outliers(norms, steps, most=MOST_EXCUSED))
            told = [i for i in far if i not in explained or not self._excuse(refs[i].peer, record.round)]
            named = [(refs[i].peer, norms[i]) for i in told if self._is_news((refs[i].peer,), record.round)]
            return [("outlier", _outlier(record, peer, norm, norms)) for peer, norm in named]
        return self._twins(record, sorted(ref.peer for ref in refs), measures)

    def _twins(self, record: Record, peers: Sequence[PeerId], measures: Mapping[PeerId, Measure]) -> list[Event]:
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
            if self._alike[one, other] >= TWIN_ROUNDS and self._is_news((one, other), record.round):
                names = [peer_name(one), peer_name(other)]
                found.append(("twins", {**_where(record), "peers": names, "cosine": how_much}))
        return found

    def _excuse(self, peer: PeerId, round_: int) -> bool:
        """Excuse an update that is as long as the steps that it claims, once in a while: where no round is made, as
        when a member dies, a peer trains on, and brings all that in its next. A wrong rate comes with every round, and
        who lies may wait for the next excuse: each is longer in coming.
        """
        before, times = self._excused.get(peer, (round_, 0))
        is_excused = round_ - before >= TOLD_AGAIN * times
        self._excused[peer] = round_, times + is_excused
        return is_excused

    def _is_news(self, who: tuple[PeerId, ...], round_: int) -> bool:
        self._told = {key: told for key, told in self._told.items() if round_ - told < TOLD_AGAIN}
        if who in self._told:
            return False
        self._told[who] = round_
        return True


def outliers(norms: Sequence[float], steps: Sequence[int], *, most: float = MOST) -> list[int]:
    """Return the places of those far above the lower median, given the inner steps that they claim: an absent peer
    brings several rounds', and who claims more than ``most`` times the usual number is taken for one that claims so
    many.
    """
    typical = typical_norm(norms)
    if typical is None:
        return []
    least = typical + OUTLIER_SPREAD * statistics.median(abs(norm - typical) for norm in norms)
    usual = max(1, statistics.median_low(steps))
    allowed = [OUTLIER_TIMES * typical * min(max(1.0, count / usual), most) for count in steps]
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
    return {**_where(record), **said}


def _where(record: Record) -> dict[str, object]:
    return {"round": record.round, "outer_step": record.outer_step + 1}


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


def ratio(one_S: Tensor, other_S: Tensor) -> float | None:
    """Return the norm of one sample over that of the other; None where that is no finite number."""
    below, above = norm_of(other_S), norm_of(one_S)
    found = above / below if 0 < below < math.inf else math.inf
    return found if math.isfinite(found) else None


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
