"""Rest after each inner step, so that a machine computes for a share of the time only: less power, heat and noise.

BOINC's "use at most so much of the CPU time". A limit in watts is the driver's, for all programs of a machine, and asks
for an administrator (``nvidia-smi -pl``); this one is a peer's own, on every device.
"""

from __future__ import annotations

from collections.abc import Callable

_LONG = 3.0  # times the usual step: what takes longer was a pause, or an evaluation, and earns no longer rest
_FORGET = 0.2  # weight of the newest step in what is usual


class Duty:
    """``share`` of the time is computed; 1: no rest. Any thread may set it, the training thread rests."""

    def __init__(self, clock: Callable[[], float], settle: Callable[[], None]) -> None:
        """``settle`` returns once the device has done all that it was given: its work is no rest."""
        self.share = 1.0
        self._clock, self._settle = clock, settle
        self._began: float | None = None  # when it last went on computing
        self._usual: float | None = None  # s of a step

    def worked(self) -> float:
        """Seconds to rest for, now that a step is over."""
        if self.share >= 1.0 or self._began is None:
            return 0.0
        self._settle()
        took = self._clock() - self._began
        if self._usual is not None:
            took = min(took, _LONG * self._usual)
        self._usual = took if self._usual is None else self._usual + _FORGET * (took - self._usual)
        return took * (1.0 / self.share - 1.0)

    def goes_on(self) -> None:
        """The next step begins now."""
        self._began = self._clock()
