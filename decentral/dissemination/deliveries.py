"""What arrived of the frames that are under way, of all of them together, for the estimate of the uplink.

Counted from when the first stream was open over there, so neither the way nor what waited on it before counts, and for
each quarter of a second after it. What had arrived by any of them, over the time since, is a rate that the uplink has;
the highest is the estimate. Not what arrived within some seconds: of a stream whose first answers were slow, early
arrivals count as late ones, beside those that were late, and a link of 238 kB/s was taken for one of 388.

Believed after ``SURE`` seconds or when somebody has a whole copy: a few bytes leave sooner than the link carries more
of them, as its shaper allows them at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from decentral.flow.uplink import UplinkMeter
from decentral.flow.window import Ack

SURE = 1.0  # s
BIN = 0.25  # s


class Deliveries:
    """Of one peer, told to ``meter``."""

    def __init__(self, meter: UplinkMeter) -> None:
        self._meter = meter
        self._frames = 0
        self._began: float | None = None  # nothing arrived before; None: not known yet
        self._last = 0.0  # s after that, of what arrived last
        self._nbytes: list[int] = []  # by the end of each bin

    @contextmanager
    def of_a_frame(self) -> Iterator[None]:
        """Held while a frame is sent."""
        if not self._frames:
            self._began, self._last, self._nbytes = None, 0.0, []
            self._meter.begin_delivery()
        self._frames += 1
        try:
            yield
        finally:
            self._frames -= 1

    def arrived(self, landing: Ack, whole: bool) -> None:
        """Somebody has so many bytes more, and perhaps all that it should get."""
        self._begin(landing.opened)
        self._count(landing, whole)

    def passed_on(self, landing: Ack) -> None:
        """Somebody has so many bytes of another's frame from here."""
        if self._frames and self._began is not None and landing.at >= self._began:
            self._count(landing, False)

    def _begin(self, at: float) -> None:
        """Answers that came faster may tell of an earlier time."""
        if self._began is None:
            self._began = at
        earlier = int((self._began - at) / BIN)
        if earlier > 0:
            self._nbytes[:0] = [0] * earlier
            self._began -= earlier * BIN
            self._last += earlier * BIN

    def _count(self, landing: Ack, whole: bool) -> None:
        assert self._began is not None, "it begins with the first arrival"
        seconds = max(0.0, landing.at - self._began)
        self._last = max(self._last, seconds)
        turn = int(seconds / BIN)
        self._nbytes += [self._nbytes[-1] if self._nbytes else 0] * (turn + 1 - len(self._nbytes))
        for later in range(turn, len(self._nbytes)):
            self._nbytes[later] += landing.nbytes
            if (later + 1) * BIN >= SURE:
                self._meter.delivered(self._nbytes[later], (later + 1) * BIN)
        if whole:
            self._meter.delivered(self._nbytes[-1], self._last)
