"""Hours of timeouts in seconds, and the same interleaving for the same seed, in every process.

trio runs ready tasks in an order that it shuffles with a random source of its own; seeding that source and a clock that
jumps to the next deadline make a run of many peers a function of its seed. The two names below are trio's own switch
for simulations (the one that Hypothesis flips) and no public interface: trio is pinned, and a test holds the pin.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import trio
import trio._core._run as scheduler
from trio.testing import MockClock

T = TypeVar("T")


def run_in_virtual_time(main: Callable[[], Awaitable[T]], seed: int) -> T:
    """Run ``main()`` on trio under virtual time; equal seeds give equal interleavings."""
    with _deterministic(seed):
        return trio.run(main, clock=MockClock(autojump_threshold=0))


@contextmanager
def _deterministic(seed: int) -> Iterator[None]:
    before = scheduler._ALLOW_DETERMINISTIC_SCHEDULING, scheduler._r
    scheduler._ALLOW_DETERMINISTIC_SCHEDULING = True  # type: ignore[misc]
    scheduler._r = random.Random(seed)
    try:
        yield
    finally:
        scheduler._ALLOW_DETERMINISTIC_SCHEDULING, scheduler._r = before  # type: ignore[misc]
