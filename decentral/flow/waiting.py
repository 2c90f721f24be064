"""Ways in which a task waits: for a change, for the next try, for work on a thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol, TypeVar, TypeVarTuple

import anyio
import anyio.lowlevel
import anyio.to_thread

from decentral.wire.keys import PeerId


# ---- changes that tasks wait for ----
class Changes:
    """Each change wakes every task that waits then, and nobody that comes later."""

    def __init__(self) -> None:
        self._coming: anyio.Event | None = None  # made for the first that waits: there may be no loop before

    def tell(self) -> None:
        """Wake those who wait."""
        if self._coming is not None:
            self._coming.set()
            self._coming = None

    def coming(self) -> anyio.Event:
        """The next one. Taken before a look that takes time, so that no change meanwhile is missed."""
        self._coming = self._coming or anyio.Event()
        return self._coming

    async def next(self) -> None:
        """Wait for the next one."""
        await self.coming().wait()


# ---- repeats, more and more rarely ----
#
# For one thing that is said to many until it has had its effect.
#
# Any of them may have missed it, or have forgotten it in a restart; most have not, and what they know need not be said
# every second: of 64 peers that asked to be let in at once, and then a few, every fourth message asked again.


@dataclass(slots=True)
class _Told:
    again_at: float
    wait: float  # s, the last one


class Repeats:
    """``first``: s until somebody is told for the second time; then twice as long each time, up to ``longest``."""

    def __init__(self, first: float, longest: float) -> None:
        self._first, self._longest = first, longest
        self._said: object = None
        self._told: dict[PeerId, _Told] = {}

    def due(self, said: object, peers: Iterable[PeerId], now: float) -> list[PeerId]:
        """Return the peers to tell ``said`` now, taken for told from then on. Something new is told to all at once, and
        anything to one that was not among ``peers`` the last time.
        """
        peers = list(peers)
        known = {} if said != self._said else self._told
        self._said, self._told = said, {peer: known[peer] for peer in peers if peer in known}
        now_due = [peer for peer in peers if (told := self._told.get(peer)) is None or told.again_at <= now]
        for peer in now_due:
            before = self._told.get(peer)
            wait = self._first if before is None else min(self._longest, 2 * before.wait)
            self._told[peer] = _Told(now + wait, wait)
        return now_due


# ---- a clock that goes on while the machine sleeps ----


def seconds_asleep_or_not() -> float:
    """Seconds since some moment, those included in which the machine was suspended, where the system tells them: the
    monotonic clock of Linux stands still in a suspend, and a laptop that was shut all night would know of none.
    """
    boot = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if boot is None else time.clock_gettime(boot)


# ---- threads for heavy work ----
#
# It runs on a worker thread, or inline when virtual time must not run ahead of it.
#
# Torch and numpy release the GIL, so compressing on a thread leaves the event loop free. A simulated clock jumps
# while a thread computes, which would fire every timer; the simulator therefore passes ``inline``.

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
