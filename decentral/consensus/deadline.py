"""When to stop waiting for late peers: learned from how late they have been.

No timeout for a user to guess: the deadline is ``median + max(floor, k * MAD)`` of the seconds after a round opened
that full contributions took until their frames were here. One that was cut short because the deadline was near is not
counted, or the deadline would chase its own tail. ``floor`` is the least slack, ``ceiling`` the longest wait after the
first offer; both come from the manifest. Nothing crosses the wire for it.
"""

from __future__ import annotations

import statistics
from collections import deque

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
        """Median seconds from the opening of a round to a contribution, or None before there is a history."""
        return self._median if len(self.delays) >= ENOUGH else None

    def early_at(self, opened: float, first_offer: float) -> float:
        """The moment to offer what there is rather than come late: half the slack after the first offer.

        What is offered then takes as long to arrive as the others' frames do, and is here half the slack before ``at``.
        """
        median = self.typical
        usual = first_offer if median is None else max(first_offer, opened + median)
        return first_offer + max(0.0, self.at(opened, first_offer) - usual) / 2

    def at(self, opened: float, first_offer: float) -> float:
        """The moment to go on without those whose offer is missing; never before ``first_offer + floor``."""
        latest = first_offer + self.ceiling
        median = self.typical
        if median is None:
            return latest
        learned = opened + median + max(self.floor, SPREAD * self._spread)
        return min(latest, max(learned, first_offer + self.floor))
