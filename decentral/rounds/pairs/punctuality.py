"""How long a gossiping peer waits for a partner: learned from when partners come, those that came too late included.

wait = median + max(floor, SPREAD * MAD) of (the partner's frame here - own step begun), below 0 for who was first

Learned from the pairs that were made alone, it came down to the floor: whoever was later than that
was no pair and was not counted, and peers that had drifted apart by more than the floor met by chance alone.
Nothing crosses the wire for it.
"""

from __future__ import annotations

import statistics
from collections import deque

from decentral.consensus.timing import ENOUGH, SPREAD, WINDOW
from decentral.wire.keys import PeerId

__all__ = ["HELD_UP", "Punctuality"]

HELD_UP = 4.0  # s that one lost answer may keep a leader that has both frames from asking: it asks again after 2
LATEST = 8  # steps for which a partner's frame may be late and still tell by how much


class Punctuality:
    """When partners come, as seconds on one clock. Each step counts once, and only its own partner can be late."""

    def __init__(self, floor: float, ceiling: float) -> None:
        self.floor, self.ceiling = floor, ceiling  # s: the least slack, the longest wait
        self._delays: deque[float] = deque(maxlen=WINDOW)
        self._early: dict[tuple[int, PeerId], float] = {}  # when frames came for steps that have not begun
        self._begun: dict[int, tuple[PeerId, float]] = {}  # steps whose partner's frame has not come: whose, and since

    def began(self, step: int, partner: PeerId, now: float) -> None:
        """This peer is at ``step``, where it meets ``partner``."""
        early = self._early.pop((step, partner), None)
        if early is None:
            self._begun[step] = (partner, now)
        else:
            self._delays.append(early - now)
        self._early = {key: when for key, when in self._early.items() if key[0] > step}
        self._begun = {begun: one for begun, one in self._begun.items() if step - LATEST < begun <= step}

    def came(self, step: int, peer: PeerId, now: float, *, is_over: bool) -> None:
        """A frame of ``peer`` for ``step``; ``is_over``: it is of no use any more."""
        partner, begun = self._begun.get(step, (None, 0.0))
        if partner == peer:
            del self._begun[step]
            self._delays.append(now - begun)
        elif partner is None and not is_over:
            self._early.setdefault((step, peer), now)

    def patience(self) -> float:
        """Seconds to wait for the partner of a step that begins now, beyond what its frame takes on the way."""
        if len(self._delays) < ENOUGH:
            return self.ceiling
        median = statistics.median(self._delays)
        spread = statistics.median(abs(delay - median) for delay in self._delays)
        return min(self.ceiling, max(self.floor, median + max(self.floor, SPREAD * spread)))
