"""The same run on trio itself, its shuffles seeded by its own switch for simulations, which Hypothesis flips, too."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

import trio
import trio._core._run as scheduler
from trio.testing import MockClock

T = TypeVar("T")


def run_under_trio(main: Callable[[], Awaitable[T]], seed: int) -> T:
    """Run ``main()`` on trio under virtual time; equal seeds give equal interleavings."""
    before = scheduler._ALLOW_DETERMINISTIC_SCHEDULING, scheduler._r
    scheduler._ALLOW_DETERMINISTIC_SCHEDULING, scheduler._r = True, random.Random(seed)
    try:
        return trio.run(main, clock=MockClock(autojump_threshold=0))
    finally:
        scheduler._ALLOW_DETERMINISTIC_SCHEDULING, scheduler._r = before
