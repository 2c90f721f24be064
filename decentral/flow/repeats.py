"""One thing that is said to many until it has had its effect, to each of them more and more rarely.

Any of them may have missed it, or have forgotten it in a restart; most have not, and what they know need not be said
every second: of 64 peers that asked to be let in at once, and then a few, every fourth message asked again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from decentral.wire.keys import PeerId


@dataclass(slots=True)
class _Told:
    again_at: float
    wait: float  # s, the last one


class Repeats:
    """``first``: s until somebody is told for the second time; then twice as long each time, up to ``longest``."""

    def __init__(self, first: float, longest: float) -> None:
        self._first, self._longest = first, longest
        self._said: object = None
        self._told: dict[PeerId, _Told] = {}

    def due(self, said: object, peers: Iterable[PeerId], now: float) -> list[PeerId]:
        """Those who are to be told ``said`` now, as they will be. Another thing than before is told to all at once."""
        if said != self._said:
            self._said, self._told = said, {}
        now_due = [peer for peer in peers if (told := self._told.get(peer)) is None or told.again_at <= now]
        for peer in now_due:
            before = self._told.get(peer)
            wait = self._first if before is None else min(self._longest, 2 * before.wait)
            self._told[peer] = _Told(now + wait, wait)
        return now_due
