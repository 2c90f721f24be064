"""How far a long command is, on stderr, as stdout is for its result; and how far the peer of a folder is."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from shutil import get_terminal_size
from types import TracebackType
from typing import IO, TYPE_CHECKING, Self

if TYPE_CHECKING:
    from decentral.observe.status import Status

_QUIET_SECONDS = 2.0  # what takes less says nothing
_REFRESH_SECONDS = 0.25
_CLEAR = "\r\x1b[2K"  # to the beginning of the line, and empty it


class Countdown:
    """A bar that is refreshed on a terminal, a line every 10 % anywhere else. Call it with what is done.

    ``what`` is before each line, where a command does several things.
    """

    def __init__(self, stream: IO[str], clock: Callable[[], float] = time.monotonic, *, what: str = "") -> None:
        self._stream, self._clock, self._what = stream, clock, f"{what}: " if what else ""
        self._is_terminal = stream.isatty()
        self._began = self._shown_at = clock()
        self._furthest, self._tenths = 0.0, 0
        self._shown = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._shown and self._is_terminal:
            self._write(_CLEAR)

    def __call__(self, share: float, sentence: str = "") -> None:
        """``share``: from 0 to 1. It never goes back: who is furthest may crash, and what is done is done.

        ``sentence``: in the place of how much of the time is left.
        """
        from decentral.observe.screen import bar  # here: who asks for help loads nothing of observe

        now = self._clock()
        share = self._furthest = max(self._furthest, share)
        if share <= 0 or now - self._began < _QUIET_SECONDS:
            return
        if self._is_terminal and now - self._shown_at >= _REFRESH_SECONDS:
            shown = f"{bar(share)} {sentence or self._sentence(share, now)}"
            self._write(_CLEAR + shown[: get_terminal_size().columns - 1])  # what is broken over two is not cleared
            self._shown_at = now
        elif not self._is_terminal and int(10 * share) > self._tenths:
            self._write((sentence or self._sentence(share, now)) + "\n")
        self._tenths = int(10 * share)

    def _sentence(self, share: float, now: float) -> str:
        seconds = round((now - self._began) * (1 - share) / share)
        left = f"{seconds} s" if seconds < 120 else f"{seconds // 60} min"
        return f"{self._what}{share:.0%} done, about {left} left"

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()
        self._shown = True


# ---- the peer of a folder ----
#
# What the folder says of it, for the commands that look into one.


def read_peer(directory: Path) -> tuple[Status, bool]:
    """The last status and whether its process runs; the sentence is another when that is gone or frozen."""
    from decentral.observe.health import as_seen
    from decentral.observe.status import is_running, read_status

    status = as_seen(read_status(directory), time.time(), time.monotonic())
    alive = is_running(status)
    return status if alive else _with_settings(status, directory), alive


def _with_settings(status: Status, directory: Path) -> Status:
    """Add what was set since the process ended: it holds for the next one."""
    from decentral.errors import ConfigError
    from decentral.preferences.controls import read_settings
    from decentral.preferences.preferences import Preferences, spell, with_setting

    with suppress(ConfigError):  # the next start says what is wrong with the file
        kept, wanted = read_settings(directory).set_, Preferences()
        for key, text in kept.items():
            wanted = with_setting(wanted, key, text)
        before = {key: text for key, text in status.preferences.items() if key not in kept}
        return replace(status, preferences={**before, **spell(wanted)}, kept_settings=tuple(kept))
    return status
