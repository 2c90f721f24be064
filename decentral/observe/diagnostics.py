"""Figures of a swarm held to their bands: what is usual, what is said when one leaves it, when it is back."""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

__all__ = [
    *("BANDS", "BEHIND_ALONE", "DEBT_RATIO", "LOSS_DISPERSION", "MEAN_COSINE", "NAMES", "NEVER_SENT"),
    *("NORM_DISPERSION", "REPLICA_DISTANCE", "REPLICA_VARIANCE", "ROUNDS", "STILL_GAINED", "WORDS"),
    *("Alone", "Band", "BandWatch", "Crossing", "Diagnostics", "Figures", "Gains", "Look", "LookJudge", "Words"),
    *("back_sentence", "in_words", "likely_cause", "warning"),
]

# ---- the figures that a round tells, as files, statuses and dashboards name them ----

NORM_DISPERSION = "norm_dispersion"  # standard deviation of the contributions' norms over their mean
LOSS_DISPERSION = "loss_dispersion"  # the same of the losses, where a method's summaries tell them
MEAN_COSINE = "mean_cosine"  # over all pairs of contributions, in [-1, 1]
DEBT_RATIO = "debt_ratio"  # norm of what this peer owes over that of its newest pseudo-gradient
NEVER_SENT = "never_sent"  # share of coordinates that nobody has sent since this process looks, in [0, 1]
REPLICA_DISTANCE = "replica_distance"  # gossip: rms of (ours - theirs) over rms of ours, in the newest pair
REPLICA_VARIANCE = "replica_variance"  # gossip: half the mean square of that over the last pairs
BEHIND_ALONE = "behind_alone"  # share of what this peer's own steps would have learnt by now that the anchor lacks
STILL_GAINED = "still_gained"  # share of all that was learnt that steps, commits or the time between looks still gain
NAMES = (
    *(NORM_DISPERSION, LOSS_DISPERSION, MEAN_COSINE, DEBT_RATIO, NEVER_SENT),
    *(REPLICA_DISTANCE, REPLICA_VARIANCE, BEHIND_ALONE, STILL_GAINED),
)


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of one round; one that could not be told is not there."""

    outer_step: int = 0  # made so far, this one included; 0: none was looked at
    contributors: int = 0  # that the figures between peers are of
    rounds: int = 0  # of each fragment at least, that this process has looked at for what was never sent
    of_part: bool = False  # of the part that this peer summed, not of whole contributions: it saw no more
    values: Mapping[str, float] = field(default_factory=dict)  # by NAMES; finite


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
        """Return the lowest and the highest value in the band."""
        return self.low / max(1, contributors - 1) if self.among_all else self.low, self.high

    def cause(self, value: float) -> str:
        """Return the probable reason for a value outside of the band."""
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
    Band(
        figure=BEHIND_ALONE,
        says="together lacks {value:.0%} of what this peer's own steps would have learnt alone",
        high=0.1,
        after=8,
        if_high="its terms; decentral tune tries others",  # what `likely_cause` says of the run's own is told instead
    ),
    Band(
        figure=STILL_GAINED,
        says="the held-out loss stands: a dozen looks gained {value:.1%} of what was learnt, by steps or by commits",
        low=0.002,
        if_low="there is nothing left to learn from this data, and a peer alone may do as well, or the outer rate is "
        "too high; decentral tune SCRIPT.py:FUNCTION tells which, beside a peer alone",
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


class BandWatch:
    """Remembers where each figure is. One peer's."""

    def __init__(self, bands: Iterable[Band] = BANDS) -> None:
        self._bands = tuple(bands)
        self._sides = {band.figure: _Side() for band in self._bands}

    @property
    def out(self) -> tuple[str, ...]:
        """Return the figures that are out of their bands now."""
        return tuple(figure for figure, side in self._sides.items() if side.is_out)

    def see(self, figures: Figures) -> list[Crossing]:
        """Return which figures left their bands, or came back, with one more round."""
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


# ---- together against alone ----
#
# Nobody trains alone: what that would have come to is an estimate, the gains of this peer's own inner steps in a chain.
#
# A look tells what the steps of one round gain from a loss where they begin. A peer alone would make the same steps
# from where the last ones ended, so its loss after n rounds is that of n such gains one after another. What commits
# undo is not in there: a peer whose steps are taken back in every round is seen to gain from the same loss again and
# again, and alone it would have gone on. It is said for losses at which somebody looked: below the lowest of them the
# peer alone is taken to stand still, so that good runs, in which the anchor leads, are ahead of it by far.

NEAREST = 5  # looks whose median gain is taken at a loss: a batch more or less is nothing
KEPT = 256  # looks; beyond, every second one goes
CHAINED = 4096  # rounds of gains at most: a look takes milliseconds
LATEST = 3  # anchors whose median is the loss of now: with little sent it goes up and down


@dataclass(frozen=True, slots=True)
class Look:
    """Losses around one commit that took this peer's contribution, all of the same data."""

    outer_step: int  # made with it
    start: float  # where the inner steps before it began
    before: float  # where they ended
    after: float  # of the live model once it was in: without overlap, of the anchor


class Alone:
    """Estimates from looks how far a peer alone would be."""

    def __init__(self) -> None:
        self._looks: list[Look] = []

    def see(self, look: Look) -> float:
        """Return the share of what alone would have learnt by now that together lacks; negative where it leads: of what
        together has learnt, what alone would lack.
        """
        if len(self._looks) == KEPT:
            del self._looks[1::2]
        self._looks.append(look)
        first = self._looks[0]
        alone = self._chain(look.outer_step - first.outer_step + 1)
        now = statistics.median(one.after for one in self._looks[-LATEST:])
        learnt = first.start - min(alone, now)
        return max(-1.0, min(1.0, (now - alone) / learnt)) if learnt > 0 else 0.0

    def _chain(self, rounds: int) -> float:
        """Return the loss after so many rounds of own steps."""
        ordered = sorted((one.start, one.start - one.before) for one in self._looks)
        starts, gains = [start for start, _ in ordered], [gain for _, gain in ordered]
        loss = self._looks[0].start
        for _ in range(min(rounds, CHAINED)):
            gain = _gain_at(loss, starts, gains)
            if gain <= 0:
                break
            loss -= gain
        return loss


DOZEN = 12  # looks whose gains are compared with those of as many before


class Gains:
    """Tells whether anything is still learnt.

    Where data differ, steps raise the held-out loss and commits lower it; where momentum overshoots, commits raise it
    and steps lower it; and both may stand while the loss falls from look to look. Nothing is learnt where all stand.
    """

    def __init__(self) -> None:
        self._latest: deque[Look] = deque(maxlen=2 * DOZEN)
        self._begun: float | None = None
        self._least = math.inf

    def see(self, look: Look) -> float | None:
        """Return the largest of the three, as a share of all that was learnt; None while too few looks were seen."""
        self._begun = look.start if self._begun is None else self._begun
        self._latest.append(look)
        self._least = min(self._least, look.after)
        learnt = self._begun - self._least
        if len(self._latest) < 2 * DOZEN or learnt <= 0:
            return None
        before, now = list(self._latest)[:DOZEN], list(self._latest)[DOZEN:]
        by_steps = statistics.fmean(one.start - one.before for one in now)
        by_commits = statistics.fmean(one.before - one.after for one in now)
        fell = statistics.median(one.after for one in before) - statistics.median(one.after for one in now)
        return max(by_steps, by_commits, fell) / learnt


STALE = 0.6  # of a change lost by the compressor: most of it waits for later rounds
GAIN = 12.0  # of an outer step: at 13 the LoRA and the LSTM in experiments/defaults ended worst, at 11 not always


def likely_cause(gain: float, lost: float, rounds: int, *, waits: bool, held_out: bool) -> str:
    """Say why together is behind alone by the run's terms, and how to find out.

    ``gain``: how many times its length a contribution moves the anchor in the end; ``lost``: of its length, by the
    compressor; ``waits``: whether that is sent later; ``held_out``: whether it was seen in evaluations, not in the
    losses that the loop logs.
    """
    if lost > STALE:
        left = "left for later rounds" if waits else "lost for good"
        why = f"too little is sent: {lost:.0%} of a round's change is {left}"
    elif gain > GAIN:
        why = f"the outer rate is too high: in the end a change moves the anchor by {gain:.2g} times its length"
    elif 4 * gain > rounds:
        why = f"outer momentum is too long for {rounds} rounds: it carries a change on to {gain:.2g} times its length"
    else:
        why = "another seed would do better, or there is little left to learn: the terms are usual"
    weaker = "" if held_out else ", as far as the losses tell that the loop logs; pass evaluate= to join to be surer"
    return f"{why}{weaker}; decentral tune SCRIPT.py:FUNCTION tries terms on your model, beside a peer alone"


def _gain_at(loss: float, starts: Sequence[float], gains: Sequence[float]) -> float:
    """Return the median gain of the looks that begin nearest; none below all of them. ``starts`` rise."""
    at = bisect_left(starts, loss)
    if at == 0 and loss < starts[0]:
        return 0.0
    low, high = at, at
    while high - low < min(NEAREST, len(starts)):
        if low > 0 and (high == len(starts) or loss - starts[low - 1] <= starts[high] - loss):
            low -= 1
        else:
            high += 1
    return statistics.median(gains[low:high])


# ---- one peer's figures ----


class LookJudge(Protocol):
    """Makes one figure of the looks that it has seen."""

    def see(self, look: Look) -> float | None:
        """Return the figure with one more look; None: too few were seen."""
        ...


class Diagnostics:
    """The newest figures of one peer, of its rounds and of looks at its losses, held to their bands.

    Rounds are told on the swarm's thread before the training side learns of them, looks on the training thread; the
    figures are read by any.
    """

    def __init__(
        self,
        emit: Callable[[str, dict[str, object]], None],
        cause: Callable[[], str] = lambda: "",
    ) -> None:
        """``emit``: takes an event and its fields; ``cause``: says why together is behind alone, and what to do."""
        self._emit, self._cause, self._bands = emit, cause, BandWatch()
        self._judges: dict[str, LookJudge] = {BEHIND_ALONE: Alone(), STILL_GAINED: Gains()}
        self._num_looks = 0
        self.of_newest_round = self._of_newest_look = Figures()  # replaced, never written to

    @property
    def values(self) -> Mapping[str, float]:
        """Return the newest of each figure."""
        return {**self.of_newest_round.values, **self._of_newest_look.values}

    @property
    def out(self) -> tuple[str, ...]:
        """Return the names of the figures that are out of their bands."""
        return self._bands.out

    def add_round(self, figures: Figures) -> None:
        """Take the figures of one more round."""
        self.of_newest_round = figures
        self._hold_to_bands(figures)

    def add_look(self, look: Look, *, held_out: bool = True) -> None:
        """Judge one more look at the losses around a commit.

        ``held_out``: of data that nobody trains on; others tell nothing of whether more is to be learnt.
        """
        self._num_looks += 1
        asked = self._judges if held_out else {BEHIND_ALONE: self._judges[BEHIND_ALONE]}
        judged = {figure: judge.see(look) for figure, judge in asked.items()}
        values = {figure: value for figure, value in judged.items() if value is not None}
        self._of_newest_look = Figures(look.outer_step, rounds=self._num_looks, values=values)
        self._hold_to_bands(self._of_newest_look)

    def _hold_to_bands(self, figures: Figures) -> None:
        for crossing in self._bands.see(figures):
            by_terms = crossing.is_out and crossing.figure == BEHIND_ALONE
            self._emit(
                "out_of_band" if crossing.is_out else "back_in_band",
                {
                    "outer_step": crossing.outer_step,
                    "figure": crossing.figure,
                    "value": crossing.value,
                    "low": crossing.low,
                    "high": crossing.high,
                    "why": self._cause() if by_terms else crossing.why,
                },
            )


# ---- figures in words ----
#
# The warning when one leaves its band, the line of ``decentral status``, Prometheus and the page.


@dataclass(frozen=True, slots=True)
class Words:
    """A figure for people."""

    short: str  # in the line of ``decentral status``, with the place of its value
    meaning: str  # a sentence for Prometheus
    title: str  # above its chart on the page


WORDS: Mapping[str, Words] = {
    NORM_DISPERSION: Words(
        "norms differ by {:.0%}",
        "Standard deviation of the contributions' norms over their mean.",
        "norms differ by",
    ),
    LOSS_DISPERSION: Words(
        "losses differ by {:.0%}",
        "Standard deviation of the peers' losses over their mean.",
        "losses differ by",
    ),
    MEAN_COSINE: Words("mean cosine {:.3f}", "Mean cosine over all pairs of contributions.", "mean cosine"),
    DEBT_RATIO: Words(
        "owed {:.2g} x a round's update",
        "Norm of what this peer owes over that of its newest pseudo-gradient.",
        "owed, in rounds' updates",
    ),
    NEVER_SENT: Words(
        "{:.0%} never sent",
        "Share of parameters that nobody has sent since this process began.",
        "share never sent",
    ),
    REPLICA_DISTANCE: Words(
        "replicas {:.2%} apart",
        "Distance to the last partner's replica over the length of ours.",
        "replicas apart",
    ),
    REPLICA_VARIANCE: Words(
        "variance {:.2g}", "Half the mean square of that distance over the last pairs.", "variance of replicas"
    ),
    BEHIND_ALONE: Words(
        "behind alone by {:.0%}",
        "Share of what this peer's own steps would have learnt that the anchor lacks; below 0: it leads.",
        "behind alone",
    ),
    STILL_GAINED: Words(
        "still gains {:.1%}",
        "Share of all that was learnt that the latest dozen looks still gained.",
        "still gained",
    ),
}
_SAYS = {band.figure: band.says for band in BANDS}


def warning(figure: str, value: float, why: str, outer_step: int) -> str:
    """Return the sentence for a figure that left its band."""
    said = _SAYS[figure].format(value=value) if figure in _SAYS else f"{figure} is {value:.3g}"
    return f"{said} (round {outer_step}); probably {why}"


def back_sentence(figure: str, value: float, outer_step: int) -> str:
    """Return the sentence for a figure that is back in its band."""
    said = _SAYS[figure].format(value=value) if figure in _SAYS else f"{figure} is {value:.3g}"
    return f"{said} (round {outer_step}); that is usual again"


def in_words(values: Mapping[str, float]) -> str:
    """Return all figures in one line; one that this version does not know goes by its name."""
    return ", ".join(_in_words(name, value) for name, value in values.items())


def _in_words(name: str, value: float) -> str:
    if name == BEHIND_ALONE and value <= 0:
        return f"ahead of alone by {-value:.0%}"
    return (WORDS[name].short if name in WORDS else f"{name} {{:.3g}}").format(value)
