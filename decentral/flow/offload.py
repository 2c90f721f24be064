"""Where heavy work runs: on a worker thread, or inline when virtual time must not run ahead of it.

Torch and numpy release the GIL, so compressing on a thread leaves the event loop free. A simulated clock jumps
while a thread computes, which would fire every timer; the simulator therefore passes ``inline``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar, TypeVarTuple

import anyio.lowlevel
import anyio.to_thread

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class Offload(Protocol):
    """Runs ``work(*args)`` and returns its result."""

    async def __call__(self, work: Callable[[*Ts], T], *args: *Ts) -> T:
        """Run it."""
        ...


async def in_thread(work: Callable[[*Ts], T], *args: *Ts) -> T:
    """On one of anyio's worker threads."""
    return await anyio.to_thread.run_sync(work, *args)


async def inline(work: Callable[[*Ts], T], *args: *Ts) -> T:
    """Here and now, after one turn of the loop."""
    await anyio.lowlevel.checkpoint()
    return work(*args)
