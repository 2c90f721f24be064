"""Wait for what other threads and processes do."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

PATIENCE = (
    240.0  # s: only what hangs takes as long; a process imports torch in 5, on a machine with a queue of ten in 50
)


def pause(seconds: float = 0.05) -> None:
    threading.Event().wait(seconds)


def until(holds: Callable[[], object], meanwhile: Callable[[], object] = pause, within: float = PATIENCE) -> None:
    """Return as soon as it holds."""
    deadline = time.monotonic() + within
    while not holds():
        assert time.monotonic() < deadline, "it never came"
        meanwhile()
