"""The speed of the uplink, estimated from the transfers that this peer makes. Pure: the time comes in.

Copies of frames that others say they have, over the time since the first was begun, while any was under way: right
for frames of any size, and one slow receiver spoils nothing.

And, while nobody has said so, how fast pieces are taken; less sure, as on a busy machine a buffer is slow, too. Only
what had to wait counts: bytes that a buffer swallows at once say nothing of the link behind it. So a window is eight
seconds in which some piece was always under way, and its rate the bytes of those that waited; the fastest of the
last windows counts, as a slow receiver makes a window slow and nothing makes one fast. Frames of 0.9 MB fit into the
buffers for the most part, and their windows told 0.3 MB/s of a link of 2.5 (measured, seven streams at once).
"""

from __future__ import annotations

from collections import deque

WINDOW = 8.0  # s of being busy; a piece of 64 KiB that began before it is 1 % too many at 8 Mbit/s, for each stream
KEPT = 16  # windows: two minutes of sending, so an estimate follows a link that has become slower
WAITED = 0.001  # s; the daemon takes 64 KiB in 0.07 ms while it has room, and 0.5 Gbit/s carry them in 1 ms


class UplinkMeter:
    """``begin`` and ``end`` around every piece of bulk."""

    def __init__(self) -> None:
        self._under_way = 0
        self._since = 0.0
        self._busy, self._nbytes = 0.0, 0
        self._rates: deque[float] = deque(maxlen=KEPT)
        self._delivered: deque[float] = deque(maxlen=KEPT)

    def begin(self, now: float) -> None:
        """A piece is to be sent."""
        self._advance(now)
        self._under_way += 1

    def end(self, began: float, now: float, nbytes: int) -> None:
        """It was taken, or not: then ``nbytes`` is 0."""
        self._advance(now)
        self._under_way -= 1
        self._nbytes += nbytes if now - began > WAITED else 0
        if self._busy >= WINDOW:
            self._rates.append(self._nbytes / self._busy)
            self._busy, self._nbytes = 0.0, 0

    @property
    def is_idle(self) -> bool:
        """Whether no piece is under way."""
        return not self._under_way

    def begin_delivery(self) -> None:
        """A frame is to be sent, and none is under way."""
        self._delivered.append(0.0)

    def delivered(self, nbytes: int, seconds: float) -> None:
        """Copies of so many bytes had arrived so long after the first of them was begun."""
        if seconds > 0:
            self._delivered[-1] = max(self._delivered[-1], nbytes / seconds)

    @property
    def bytes_per_second(self) -> float | None:
        """The estimate; None: no transfer has filled the link yet."""
        return max(self._delivered, default=0.0) or max(self._rates, default=None)

    def _advance(self, now: float) -> None:
        if self._under_way:
            self._busy += now - self._since
        self._since = now


def lease_bits(bytes_per_second: float | None) -> int:
    """Bit/s as a lease tells it: two digits, so that noise is no news to everybody; 0: not measured."""
    if not bytes_per_second:
        return 0
    bits = round(8 * bytes_per_second)
    return round(bits, 2 - len(str(bits)))
