"""What peers of one process read of the same frames: a simulation has hundreds, and each frame comes to all of them.

A frame's hash covers its header and body, and the schema and the codec are the run's, so what one peer has read of a
frame, and found to be as it should, is what every other would read. Parts are shared and never written to.
"""

from __future__ import annotations

from collections import OrderedDict

from decentral.replica.received.measures import Measure
from decentral.replica.received.unpacked import Payloads

__all__ = ["Readings"]

KEPT = 2048  # frames: two rounds of the largest membership


class Readings:
    """The newest frames', by hash: the payloads of a body that is in order, and what was measured of it."""

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, tuple[Payloads, Measure | None]] = OrderedDict()

    def get(self, frame: bytes) -> tuple[Payloads, Measure | None] | None:
        """What was read of a frame, while it is remembered."""
        return self._known.get(frame)

    def add(self, frame: bytes, payloads: Payloads, measure: Measure | None) -> None:
        """Remember what was read of a frame."""
        self._known[frame] = payloads, measure
        if len(self._known) > KEPT:
            self._known.popitem(last=False)
