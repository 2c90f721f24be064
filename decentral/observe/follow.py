"""Events as they come: a file that another process appends to, renames when it is long, and starts anew.

Only whole lines are told. What is left of a file when it is put aside is read first, then those that were put aside
after it, then the new one from its beginning. A file that was packed meanwhile is known by its first line, which is
stamped.
"""

import json
import os
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack
from itertools import takewhile
from pathlib import Path
from typing import IO, Any

from decentral.observe.events import EVENTS_FILE, is_asked_for, read_events
from decentral.observe.rotation import Opened, opened


def follow_events(
    directory: Path,
    *,
    last: int,
    event: str | None,
    idle: Callable[[], None],
    ended: Callable[[], bool],
    without: Collection[str] = (),
) -> Iterator[dict[str, Any]]:
    """Yield the ``last`` events of a run directory, then new ones as they come: those that `read_events` would.

    Calls ``idle`` whenever there is nothing new, until ``ended`` says that nobody writes any more. The directory's file
    need not exist yet.
    """
    tail = FileTail(directory / EVENTS_FILE)
    over = ended()  # before reading, here and below: what was written last is told, too
    if over and not (directory / EVENTS_FILE).exists():  # killed when it had put one aside and begun no other
        yield from read_events(directory, last=last, event=event, without=without)
        return
    try:
        yield from deque(_rows(tail.new_lines(), event, without), maxlen=last)
        while not over:
            idle()
            over = ended()
            yield from _rows(tail.new_lines(), event, without)
    finally:
        tail.close()


def _rows(lines: Iterable[bytes], event: str | None, without: Collection[str]) -> Iterator[dict[str, Any]]:
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:  # half a line of a killed writer, ended by the next one
            continue
        if isinstance(row, dict) and is_asked_for(row, event, without):
            yield row


class FileTail:
    """The whole lines of ``path`` since the last look."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[bytes] | None = None
        self._rest = b""  # the beginning of a line that is being written

    def new_lines(self) -> Iterator[bytes]:
        """Read on; empty when nothing came. At first all that is there."""
        replaced = self._is_replaced()  # before reading: nothing is added to a file that has been put aside
        yield from self._read()
        if replaced:
            yield from self._catch_up()

    def _read(self) -> list[bytes]:
        if self._file is None:
            return []
        if os.fstat(self._file.fileno()).st_size < self._file.tell():  # emptied
            self._file.seek(0)
            self._rest = b""
        *lines, self._rest = (self._rest + self._file.read()).split(b"\n")
        return lines

    def _catch_up(self) -> Iterator[bytes]:
        """Read what was put aside after our file, then go over to the one that grows: who reads slowly misses none."""
        mine = self._first_line()
        with ExitStack() as stack:
            files = opened(self._path, stack)
            if not files or files[0].path != self._path:
                return  # the next one is not there yet
            newer = [*takewhile(lambda file: file.first_line() != mine, files)]
            for file in reversed(newer[1:]):
                yield from file.lines()
            self.close()
            self._file = os.fdopen(os.dup(files[0].file.fileno()), "rb")
            self._file.seek(0)
        self._rest = b""
        yield from self._read()

    def _first_line(self) -> bytes | None:
        if self._file is None:
            return None
        at = self._file.tell()
        line = Opened(self._path, self._file).first_line()
        self._file.seek(at)
        return line

    def _is_replaced(self) -> bool:
        if self._file is None:
            return self._path.exists()
        try:
            return not os.path.samestat(os.fstat(self._file.fileno()), self._path.stat())
        except FileNotFoundError:
            return False  # renamed, and the new one is not there yet

    def close(self) -> None:
        """Close what is open."""
        if self._file is not None:
            self._file.close()
        self._file = None
