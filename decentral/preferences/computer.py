"""The computer around a peer: does it run on battery, does somebody use it, what do other programs take?

What a system does not tell is None, and stands against nothing.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from decentral.preferences.preferences import Seen

_DEVICES = Path("/dev")
_SMOOTH = 15.0  # s over which other programs' share is averaged: a page that loads is no use


class Computer:
    """Looks at this computer."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._load = OthersLoad(_busy_seconds, self._own_seconds, time.monotonic, os.cpu_count() or 1)

    def look(self, *, battery: bool, use: bool) -> Seen:
        """What there is to be seen now, of what is asked for."""
        return Seen(
            on_battery=on_battery() if battery else None,
            unused_seconds=unused_seconds(time.time()) if use else None,
            others_share=self._load.share() if use else None,
        )

    def memory(self) -> int:
        """Bytes of memory that this process holds."""
        return int(self._process.memory_info().rss)

    def _own_seconds(self) -> float:
        """Of this process and those that it started (the daemon, loaders of data)."""
        seconds = 0.0
        for process in (self._process, *self._process.children(recursive=True)):
            try:
                times = process.cpu_times()
            except psutil.Error:
                continue
            seconds += times.user + times.system
        return seconds


class OthersLoad:
    """Share of all processors that other programs took, averaged over some seconds."""

    def __init__(
        self, busy: Callable[[], float], own: Callable[[], float], clock: Callable[[], float], num_cpus: int
    ) -> None:
        self._busy, self._own, self._clock, self._num_cpus = busy, own, clock, num_cpus
        self._share: float | None = None
        self._last = (clock(), busy(), own())

    def share(self) -> float | None:
        """None before there is a second to judge by."""
        now, busy, own = self._clock(), self._busy(), self._own()
        passed = now - self._last[0]
        if passed >= 1.0:
            taken = max(0.0, (busy - self._last[1]) - max(0.0, own - self._last[2]))
            found = min(1.0, taken / (passed * self._num_cpus))
            weight = min(1.0, passed / _SMOOTH)
            self._share = found if self._share is None else self._share + weight * (found - self._share)
            self._last = (now, busy, own)
        return self._share


def on_battery() -> bool | None:
    """Whether this computer has a battery, and runs on it."""
    sensor = getattr(psutil, "sensors_battery", lambda: None)
    battery = sensor()
    return None if battery is None or battery.power_plugged is None else not battery.power_plugged


def unused_seconds(now: float, terminals: Callable[[], list[str]] | None = None) -> float | None:
    """Seconds since somebody typed at a terminal of this computer, as ``w`` tells it; None when nobody is logged in.

    Desktops without a terminal do not show here; what their programs take does.
    """
    if sys.platform == "win32":
        return None
    touched = []
    for name in (terminals or _terminals)():
        try:
            touched.append((_DEVICES / name).stat().st_atime)
        except OSError:
            continue
    return max(0.0, now - max(touched)) if touched else None


def _terminals() -> list[str]:
    return [user.terminal for user in psutil.users() if user.terminal]


def _busy_seconds() -> float:
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "guest", 0.0))
