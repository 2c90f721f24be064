"""Events as they come: a file that another process appends to, renames when it is long, and starts anew.

Only whole lines are told. What is left of a file when it is renamed is read first, then the new one from its beginning.
"""

import json
import os
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from decentral.observe.events import EVENTS_FILE


def follow_events(
    directory: Path, *, last: int, event: str | None, idle: Callable[[], None]
) -> Iterator[dict[str, Any]]:
    """Yield the ``last`` events of a run directory, then new ones as they come; only those named ``event``.

    Never ends by itself; calls ``idle`` whenever there is nothing new. The directory's file need not exist yet.
    """
    tail = _Tail(directory / EVENTS_FILE)
    rows = deque(_rows(tail.new_lines(), event), maxlen=last)
    try:
        while True:
            yield from rows
            idle()
            rows = deque(_rows(tail.new_lines(), event))
    finally:
        tail.close()


def _rows(lines: list[bytes], event: str | None) -> Iterator[dict[str, Any]]:
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:  # half a line of a killed writer, ended by the next one
            continue
        if isinstance(row, dict) and event in (None, row.get("event")):
            yield row


class _Tail:
    """The whole lines of ``path`` since the last look."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[bytes] | None = None
        self._rest = b""  # the beginning of a line that is being written

    def new_lines(self) -> list[bytes]:
        """Read on; empty when nothing came."""
        replaced = self._is_replaced()  # before reading: nothing is added to a file that has been renamed
        lines = self._read()
        if replaced:
            self.close()
            self._rest = b""
            lines += self._read()
        return lines

    def _read(self) -> list[bytes]:
        if self._file is None:
            try:
                self._file = self._path.open("rb")
            except FileNotFoundError:  # between two files, or before the first
                return []
        *lines, self._rest = (self._rest + self._file.read()).split(b"\n")
        return lines

    def _is_replaced(self) -> bool:
        if self._file is None:
            return False
        mine = os.fstat(self._file.fileno())
        try:
            there = self._path.stat()
        except FileNotFoundError:
            return False  # renamed, and the new one is not there yet
        return not os.path.samestat(mine, there) or there.st_size < self._file.tell()

    def close(self) -> None:
        """Close what is open."""
        if self._file is not None:
            self._file.close()
        self._file = None
