"""How far a study is, on stderr: a line that is refreshed on a terminal, a line for each cell anywhere else."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import IO

__all__ = ["StudyLine"]

_CLEAR = "\r\x1b[2K"  # to the beginning of the line, and empty it


class StudyLine:
    """Call it with what is done, of how many, and what is told of the last one. The time left is as it went so far."""

    def __init__(self, stream: IO[str], there: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream, self._clock, self._there = stream, clock, there
        self._began, self._is_terminal = clock(), stream.isatty()

    def __call__(self, done: int, of: int, told: str) -> None:
        """One more cell."""
        line = f"{done} of {of} cells, {self._left(done, of)} left; {told}"
        self._stream.write(f"{_CLEAR}{line}" if self._is_terminal else f"{line}\n")
        self._stream.flush()

    def end(self) -> None:
        """Clear what a terminal shows."""
        if self._is_terminal:
            self._stream.write(_CLEAR)
            self._stream.flush()

    def _left(self, done: int, of: int) -> str:
        made = done - self._there
        if made < 1:
            return "no telling how long"
        seconds = round((self._clock() - self._began) / made * (of - done))
        return f"about {seconds} s" if seconds < 120 else f"about {seconds // 60} min"
