"""How long each member takes for a full contribution, learned from the offers that everybody sees.

seconds of a full contribution = seconds from the opening of the round to the offer * (full / steps offered)

By steps, so that a peer which makes fewer of them is not taken for a fast one. Where training goes on while a round is
in flight, the seconds are from the peer's last offer: its steps did not begin with the round. Offers of progress that
is older than the round, and of newcomers, say nothing. Nothing more crosses the wire for it.

What a peer says of its steps is free: no more than a full contribution's count, and who uses the figures takes their
median over peers.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable

from decentral.wire.keys import PeerId

USUAL = 5  # offers whose median is a peer's pace: odd, so that one pause or straggle does not move it


class Paces:
    """What one peer has seen of the others' speed."""

    def __init__(self, full: int, *, overlaps: bool) -> None:
        """``full``: inner steps of a full contribution; ``overlaps``: training goes on while a round is in flight."""
        self._full, self._overlaps = full, overlaps
        self._seconds: dict[PeerId, deque[float]] = {}
        self._usual: dict[PeerId, float] = {}  # their medians
        self._last: dict[PeerId, float] = {}  # when each offered last

    def observe(self, peer: PeerId, steps: int, opened: float, now: float) -> None:
        """An offer in time of so many inner steps, in a round that is open since ``opened``."""
        began = self._last.get(peer) if self._overlaps else opened
        self._last[peer] = now
        if began is not None and steps > 0 and self._full:
            per_step = max(0.0, now - began) / min(steps, self._full)
            seconds = self._seconds.setdefault(peer, deque(maxlen=USUAL))
            seconds.append(per_step * self._full)
            self._usual[peer] = statistics.median(seconds)

    def full_times(self, peers: Iterable[PeerId]) -> tuple[float, ...]:
        """Seconds of a full contribution of those of ``peers`` whose pace is known."""
        return tuple(self._usual[peer] for peer in peers if peer in self._usual)

    def keep(self, peers: Iterable[PeerId]) -> None:
        """Forget everybody else."""
        for peer in set(self._last) - set(peers):
            self._seconds.pop(peer, None)
            self._usual.pop(peer, None)
            del self._last[peer]
