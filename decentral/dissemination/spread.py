"""Who sends which part of a frame when one's own uplink is too thin for a copy to everybody.

Every frame must reach N - 1 peers, and all uplinks together can carry the N (N - 1) copies in ``N (N - 1) P / sum up``
seconds; nobody is done before ``P / up`` with its own frame. A peer that needs longer for N - 1 copies sends each part
once, to somebody with uplink to spare, who passes it on to the others. What its uplink still carries it sends itself,
so that all are done at the same time.

Sent by a thin peer: between ``P`` and ``(N - 1) P`` instead of ``(N - 1) P``. Rates are what leases say: a hint, wrong
ones make a round slower and nothing else.

Source: Mundinger, Weber and Weiss, "Optimal scheduling of peer-to-peer file dissemination", 2008, give the bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from decentral.wire.keys import PeerId

UNKNOWN = 1.0  # bytes/s of a line of which nobody has said anything
WORTH = 0.25  # s: what it must save; passing on costs the time of one way more


@dataclass(frozen=True, slots=True)
class Line:
    """What a peer can send."""

    rate: float  # bytes/s
    passes_on: bool  # whether others may give it parts to pass on: a peer behind a relay may not


@dataclass(frozen=True, slots=True)
class Spread:
    """Parts of a frame of ``direct + sum(passed)`` bytes, in this order."""

    direct: int  # bytes that its owner sends to everybody itself
    passed: tuple[int, ...]  # bytes that each peer gets to pass on, in the order of the lines


class Lines:
    """What is asked of the same lines again and again: how long a frame takes. Each answer costs the same for any N."""

    def __init__(self, lines: Sequence[Line]) -> None:
        self._rates, self._total = [line.rate for line in lines], sum(line.rate for line in lines)
        passing = sorted((number for number, line in enumerate(lines) if line.passes_on), key=self._rates.__getitem__)
        self._fastest = passing[-2:]  # of those who pass on

    def seconds_to_all(self, nbytes: int, me: int) -> float:
        """Seconds until everybody has a frame of ``nbytes`` of peer ``me``, if all have frames of that size."""
        n, rate = len(self._rates), self._rates[me]
        alone = (n - 1) * nbytes / rate
        if n < 3 or rate < 1:
            return alone
        finish = max(nbytes / rate, n * (n - 1) * nbytes / self._total)
        others = [self._rates[number] for number in self._fastest if number != me]
        helped = alone - finish >= WORTH and any(finish * other > (n - 1) * nbytes for other in others)
        return finish if helped else alone

    def seconds_alone(self, nbytes: int, me: int) -> float:
        """Seconds in which peer ``me`` sends so many bytes once."""
        return nbytes / self._rates[me]


def spread(nbytes: int, lines: Sequence[Line], me: int) -> Spread | None:
    """How peer ``me`` should send a frame of ``nbytes``, if all have frames of that size; None: to everybody itself."""
    n, rate = len(lines), lines[me].rate
    if n < 3 or rate < 1:
        return None
    finish = _finish(nbytes, lines, me)
    if (n - 1) * nbytes / rate - finish < WORTH:
        return None
    spare = [max(0.0, finish * line.rate - (n - 1) * nbytes) * line.passes_on for line in lines]
    spare[me] = 0.0
    if not any(spare):
        return None
    direct = int(nbytes * min(1.0, max(0.0, (finish * rate / nbytes - 1) / (n - 2))))
    return Spread(direct, _cut(nbytes - direct, spare))


def thin_last(peers: Sequence[PeerId], lines: Sequence[Line]) -> list[PeerId]:
    """The same order, but those who send less than half of what is usual are asked when nobody else has it."""
    usual = median([line.rate for line in lines] or [0.0])
    thin = {peer: 2 * line.rate < usual for peer, line in zip(peers, lines, strict=True)}
    return sorted(peers, key=lambda peer: thin[peer])


def _finish(nbytes: int, lines: Sequence[Line], me: int) -> float:
    n = len(lines)
    return max(nbytes / lines[me].rate, n * (n - 1) * nbytes / sum(line.rate for line in lines))


def _cut(nbytes: int, weights: Sequence[float]) -> tuple[int, ...]:
    """``nbytes`` in proportion to ``weights``, none of it lost to rounding."""
    ends, cumulated, total = [], 0.0, sum(weights)
    for weight in weights:
        cumulated += weight
        ends.append(round(nbytes * cumulated / total))
    return tuple(end - begin for begin, end in zip((0, *ends), ends, strict=False))
