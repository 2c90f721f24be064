"""How long a round waits, learned from what was seen: for late offers, for frames on their way, for each member.

No timeout is left for a user to guess, and nothing more crosses the wire for any of it.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from decentral.wire.keys import PeerId

# ---- the deadline for late offers ----
#
# It is ``median + max(floor, k * MAD)`` of the seconds after a round opened that full contributions took until their
# frames were here. One that was cut short because the deadline was near is not counted, or the deadline would chase
# its own tail. ``floor`` is the least slack, ``ceiling`` the longest wait after the first offer; both come from the
# manifest.

WINDOW = 64  # offers remembered; about a dozen rounds of a small swarm
SPREAD = 6.0  # MADs of slack: 6 MAD is about 4 sigma for a normal spread, so a false alarm a day, not an hour
ENOUGH = 4  # offers before the history is trusted


class Deadline:
    """The adaptive deadline of one peer; every peer keeps its own, from what it saw itself."""

    def __init__(self, floor: float, ceiling: float) -> None:
        self.floor = floor  # s
        self.ceiling = ceiling  # s
        self.delays: deque[float] = deque(maxlen=WINDOW)
        self._median = self._spread = 0.0  # of them; asked for with every event

    def observe(self, delay: float) -> None:
        """Remember that a full contribution was here ``delay`` seconds after its round opened."""
        self.delays.append(max(0.0, delay))
        self._median = median = statistics.median(self.delays)
        self._spread = statistics.median(abs(one - median) for one in self.delays)

    @property
    def typical(self) -> float | None:
        """Return the median seconds from the opening of a round to a contribution, or None before there is a
        history.
        """
        return self._median if len(self.delays) >= ENOUGH else None

    def early_at(self, opened: float, first_offer: float) -> float:
        """Return the moment to offer what there is rather than come late: half the slack after the first offer.

        What is offered then takes as long to arrive as the others' frames do, and is here half the slack before ``at``.
        """
        median = self.typical
        usual = first_offer if median is None else max(first_offer, opened + median)
        return first_offer + max(0.0, self.at(opened, first_offer) - usual) / 2

    def at(self, opened: float, first_offer: float) -> float:
        """Return the moment to go on without those whose offer is missing; never before ``first_offer + floor``."""
        latest = first_offer + self.ceiling
        median = self.typical
        if median is None:
            return latest
        learned = opened + median + max(self.floor, SPREAD * self._spread)
        return min(latest, max(learned, first_offer + self.floor))


# ---- time for frames on their way ----
#
# So long may a round's frames take before somebody is blamed for them. No constant fits: what is there in milliseconds
# on a LAN takes minutes behind 2 Mbit/s. A reduce whose slices took longer than the leader's two seconds was planned
# anew without their senders, round after round, until it named one peer alone. So it follows from the bytes that were
# offered and the uplinks as they were measured, and from nothing else: who is away is known from its lease, whatever
# was allowed.

# (bytes offered, by whom, to whom): seconds in which its part is done, as uplinks were measured; None: its was not
Takes = Callable[[int, PeerId, Sequence[PeerId]], float | None]

UNMEASURED = 125_000.0  # bytes/s of an uplink until its first frame has arrived: 1 Mbit/s, less than is sold
SLACK = 2.0  # times; rounds take 1.3 to 1.5 times what links need, and estimates of equal links differ by a quarter


def no_measurement(nbytes: int, peer: PeerId, members: Sequence[PeerId]) -> float | None:
    """Return None, as the ``Takes`` of a swarm in which nothing was measured."""
    return None


def allowance(nbytes: int, copies: int, takes: float | None) -> float:
    """Return the seconds that ``copies`` of so many bytes have to leave a peer, which should take it ``takes``."""
    return SLACK * (copies * nbytes / UNMEASURED if takes is None else takes)


FIRST_REST = 4  # rounds in which nobody waits for a peer that offered and did not send
LONGEST_REST = 64


@dataclass(slots=True)
class _Rest:
    rounds: int
    until: int  # the round in which it is waited for again


class Unsent:
    """Peers whose last offer was passed over, as its frame never came.

    They are waited for again after four rounds, and after twice as many each time that it was in vain. Never would be
    too seldom: a peer whose frame needs a little longer than the usual slack stayed out after one outage.
    """

    def __init__(self) -> None:
        self._rests: dict[PeerId, _Rest] = {}

    def note_frame(self, peer: PeerId) -> None:
        """Note that a frame of ``peer`` is here."""
        self._rests.pop(peer, None)

    def note_absence(self, peer: PeerId, round_: int) -> None:
        """Note that the commit of ``round_`` does without the frame that it offered, which is not here."""
        rest = self._rests.get(peer)
        if rest is None:
            self._rests[peer] = _Rest(FIRST_REST, round_ + 1 + FIRST_REST)
        elif rest.until <= round_:
            rest.rounds = min(2 * rest.rounds, LONGEST_REST)
            rest.until = round_ + 1 + rest.rounds

    def is_waited_for(self, peer: PeerId, round_: int) -> bool:
        """Tell whether its frame is worth waiting for in ``round_``."""
        return peer not in self._rests or self._rests[peer].until <= round_


# ---- the pace of each member ----
#
# Learned from the offers that everybody sees:
#
# seconds of a full contribution = seconds from the opening of the round to the offer * (full / steps offered)
#
# By steps, so that a peer which makes fewer of them is not taken for a fast one. Where training goes on while a round
# is in flight, the seconds are from the peer's last offer: its steps did not begin with the round. Offers of progress
# that is older than the round, and of newcomers, say nothing.
#
# What a peer says of its steps is free: no more than a full contribution's count, and who uses the figures takes their
# median over peers.

OFFERS_OF_A_PACE = 5  # offers whose median is a peer's pace: odd, so that one pause or straggle does not move it


class Paces:
    """The pace of each member, as one peer has seen of the others' speed."""

    def __init__(self, full: int, *, overlaps: bool) -> None:
        """``full``: inner steps of a full contribution; ``overlaps``: training goes on while a round is in flight."""
        self._full, self._overlaps = full, overlaps
        self._seconds: dict[PeerId, deque[float]] = {}
        self._usual: dict[PeerId, float] = {}  # their medians
        self._last: dict[PeerId, float] = {}  # when each offered last

    def observe(self, peer: PeerId, steps: int, opened: float, now: float) -> None:
        """Note an offer in time of so many inner steps, in a round that is open since ``opened``."""
        began = self._last.get(peer) if self._overlaps else opened
        self._last[peer] = now
        if began is not None and steps > 0 and self._full:
            per_step = max(0.0, now - began) / min(steps, self._full)
            seconds = self._seconds.setdefault(peer, deque(maxlen=OFFERS_OF_A_PACE))
            seconds.append(per_step * self._full)
            self._usual[peer] = statistics.median(seconds)

    def full_times(self, peers: Iterable[PeerId]) -> tuple[float, ...]:
        """Return the seconds of a full contribution of those of ``peers`` whose pace is known."""
        return tuple(self._usual[peer] for peer in peers if peer in self._usual)

    def keep(self, peers: Iterable[PeerId]) -> None:
        """Forget everybody else."""
        for peer in set(self._last) - set(peers):
            self._seconds.pop(peer, None)
            self._usual.pop(peer, None)
            del self._last[peer]
