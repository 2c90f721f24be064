"""Moments on the monotonic clock: until when somebody waits who said for how long. No torch, for the help's sake."""

import time


def moment_in(seconds: float | None) -> float | None:
    """The moment ``seconds`` from now; None: never."""
    return None if seconds is None else time.monotonic() + seconds


def time_left(until: float | None) -> float | None:
    """Seconds until a moment, 0 when it has passed; None: for ever."""
    return None if until is None else max(0.0, until - time.monotonic())
