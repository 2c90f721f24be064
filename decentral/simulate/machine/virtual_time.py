"""Hours of timeouts in seconds, and the same interleaving for the same seed, in every process."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import decentral.simulate.virtual.backend as virtual

T = TypeVar("T")


def run_in_virtual_time(main: Callable[[], Coroutine[Any, Any, T]], seed: int) -> T:  # Any: what the loop is told
    """Run ``main()`` under virtual time; equal seeds give equal interleavings."""
    result: T = virtual.run(main, seed)
    return result
