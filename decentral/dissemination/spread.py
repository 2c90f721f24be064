"""Parts of a frame, and who sends which: a peer whose own uplink is too thin for a copy to everybody has help.

Every frame must reach N - 1 peers, and all uplinks together can carry the N (N - 1) copies in ``N (N - 1) P / sum
up`` seconds; nobody is done before ``P / up`` with its own frame. A peer that needs longer for N - 1 copies sends
each part once, to somebody with uplink to spare, who passes it on to the others. What its uplink still carries it
sends itself, so that all are done at the same time.

Sent by a thin peer: between ``P`` and ``(N - 1) P`` instead of ``(N - 1) P``. Rates are what leases say: a hint,
wrong ones make a round slower and nothing else. So it must pay, too, where the own line is faster than thought by
``ERROR`` and all others are slower by that: on lines that are equal nobody gives anything to pass on. With one of six
equal lines taken for one of twice the rate, five gave it a quarter of their frames, and rounds took twice as long.

Source: Mundinger, Weber and Weiss, "Optimal scheduling of peer-to-peer file dissemination", 2008, give the bound.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from decentral.wire.keys import PeerId

UNKNOWN_RATE = 1.0  # bytes/s of a line of which nobody has said anything
ALIKE = 0.25  # of the median: most estimates of equal uplinks are that close (1.6 to 2.0 MB/s of 2.5)
WORTH = 0.25  # s: what it must save; passing on costs the time of one way more
ERROR = 0.3  # of a rate, by which each may be wrong


@dataclass(frozen=True, slots=True)
class Line:
    """The rate at which a peer can send."""

    rate: float  # bytes/s
    passes_on: bool  # whether others may give it parts to pass on: a peer behind a relay may not


@dataclass(frozen=True, slots=True)
class Spread:
    """The parts of a frame of ``direct + sum(passed)`` bytes, in this order."""

    direct: int  # bytes that its owner sends to everybody itself
    passed: tuple[int, ...]  # bytes that each peer gets to pass on, in the order of the lines


class Lines:
    """The seconds that frames take over the same lines, asked for again and again. Each answer costs the same for any
    N.
    """

    def __init__(self, lines: Sequence[Line]) -> None:
        self._rates, self._total = [line.rate for line in lines], sum(line.rate for line in lines)
        passing = sorted((number for number, line in enumerate(lines) if line.passes_on), key=self._rates.__getitem__)
        self._fastest = passing[-2:]  # of those who pass on

    def seconds_to_all(self, nbytes: int, me: int) -> float:
        """Return the seconds until everybody has a frame of ``nbytes`` of peer ``me``, if all have frames of that
        size.
        """
        n, rate = len(self._rates), self._rates[me]
        alone = (n - 1) * nbytes / rate
        if n < 3 or rate < 1:
            return alone
        finish = _seconds_to_finish(nbytes, n, rate, self._total - rate)
        others = [self._rates[number] for number in self._fastest if number != me]
        helped = _pays(nbytes, n, rate, self._total - rate) and any(finish * one > (n - 1) * nbytes for one in others)
        return finish if helped else alone

    def seconds_alone(self, nbytes: int, me: int) -> float:
        """Return the seconds in which peer ``me`` sends so many bytes once."""
        return nbytes / self._rates[me]


def spread(nbytes: int, lines: Sequence[Line], me: int) -> Spread | None:
    """Find how peer ``me`` should send a frame of ``nbytes``, if all have frames of that size; None: to everybody
    itself.
    """
    n, rate = len(lines), lines[me].rate
    if n < 3 or rate < 1:
        return None
    of_others = sum(line.rate for line in lines) - rate
    if not _pays(nbytes, n, rate, of_others):
        return None
    finish = _seconds_to_finish(nbytes, n, rate, of_others)
    spare = [max(0.0, finish * line.rate - (n - 1) * nbytes) * line.passes_on for line in lines]
    spare[me] = 0.0
    if not any(spare):
        return None
    direct = int(nbytes * min(1.0, max(0.0, (finish * rate / nbytes - 1) / (n - 2))))
    return Spread(direct, _divide(nbytes - direct, spare))


def even_out(rates: Sequence[float]) -> list[float]:
    """Return rates near the median as equal to it: estimates of equal lines differ, and all have to wait for what one
    peer owns too much of a reduce, or for a frame that went by way of others for nothing.
    """
    usual = median([u for u in rates if u > 0] or [0.0])
    return [usual if (1 - ALIKE) * usual <= u <= (1 + ALIKE) * usual else u for u in rates]


def thin_last(peers: Sequence[PeerId], lines: Sequence[Line]) -> list[PeerId]:
    """Return the same order, with peers last that send less than half of what is usual."""
    usual = median([line.rate for line in lines] or [0.0])
    thin = {peer: 2 * line.rate < usual for peer, line in zip(peers, lines, strict=True)}
    return sorted(peers, key=lambda peer: thin[peer])


def _seconds_to_finish(nbytes: int, n: int, rate: float, of_others: float) -> float:
    """Return the seconds until all ``n`` peers have all frames; rates in bytes/s: the own one, and that of the others
    together.
    """
    return max(nbytes / rate, n * (n - 1) * nbytes / (rate + of_others))


def _pays(nbytes: int, n: int, rate: float, of_others: float) -> bool:
    """Tell whether passing on saves time, however wrong the rates are."""
    rate, of_others = (1 + ERROR) * rate, (1 - ERROR) * of_others
    return (n - 1) * nbytes / rate - _seconds_to_finish(nbytes, n, rate, of_others) >= WORTH


def _divide(nbytes: int, weights: Sequence[float]) -> tuple[int, ...]:
    """Cut ``nbytes`` in proportion to ``weights``, none of it lost to rounding."""
    ends, cumulated, total = [], 0.0, sum(weights)
    for weight in weights:
        cumulated += weight
        ends.append(round(nbytes * cumulated / total))
    return tuple(end - begin for begin, end in zip((0, *ends), ends, strict=False))


# ---- which way was faster ----
#
# Rates are claims and estimates; rounds tell what is true. Compared are the seconds from a frame's first byte to the
# commit, in times of what sending to everybody should take, of rounds in which all others offered in time.
#
# Frames go by way of others as long as that takes less than half of that time: the own rate is hardly wrong by more
# than a factor of two, and a peer that sending to everybody would cost ten times as long never tries it. Otherwise the
# next frame goes to everybody. The way that was faster goes on, and the other one is tried again ever more rarely.
#
# Much else holds up a round: a leader that takes long, a receiver that is slow. It makes no way faster, so the fastest
# of the last rounds counts; and where both ways take as long, it was something else, and frames go as planned.

DOUBT = 0.5  # of what sending to everybody should take
SLOWER = 1.1  # times the other way
LAST = 3  # rounds of the way that is in use
FIRST_AGAIN, RARELY = 8, 128  # frames until the other way is tried again
TOGETHER = 0.25  # of the same time: others who offer later than that are waited for


class Ways:
    """The ways that the frames of one peer go which should go by way of others (True), or to everybody from here."""

    def __init__(self) -> None:
        self._in_use = True
        self._took = {way: deque[float](maxlen=LAST) for way in (True, False)}
        self._until_trial, self._next_trial = 0, FIRST_AGAIN

    def choose(self) -> bool:
        """Return the way of the next frame."""
        self._until_trial = max(0, self._until_trial - 1)
        is_in_doubt = not self._in_use or min(self._took[True], default=0.0) > DOUBT
        if self._until_trial or not is_in_doubt:
            return self._in_use
        self._until_trial = self._next_trial
        return not self._in_use

    def took(self, way: bool, times: float) -> None:
        """Learn that a frame took so many times what sending to everybody should take; infinity: it was too late."""
        is_trial = way != self._in_use
        if is_trial:
            self._took[way].clear()  # what it was like when it was tried before says nothing of today
        self._took[way].append(times)
        if is_trial and self._took[self._in_use]:
            self._judge()

    def _judge(self) -> None:
        before, self._in_use = self._in_use, min(self._took[True]) <= SLOWER * min(self._took[False])
        self._next_trial = min(2 * self._next_trial, RARELY) if before == self._in_use else FIRST_AGAIN
        self._until_trial = self._next_trial


LinesOf = Callable[[Sequence[PeerId]], Sequence[Line]]


def all_equal(peers: Sequence[PeerId]) -> list[Line]:
    """Give all peers equal lines: nothing is known of what anybody can send."""
    return [Line(UNKNOWN_RATE, passes_on=False)] * len(peers)
