"""``events.jsonl``: what happened to one peer, one JSON object per event.

Every line has ``v`` (version of this format), ``t`` (seconds since the epoch, for people), ``mono``
(seconds on the monotonic clock, for differences), ``event`` (a word) and the event's own fields.
"""

import json
import os
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack
from itertools import takewhile
from pathlib import Path
from typing import IO, Any

from decentral.observe.lines import JsonLines, Opened, open_files, read_json_lines

EVENTS_FILE = "events.jsonl"
EVENT_VERSION = 1
_STAMPS = ("v", "t", "mono", "event")


class EventLog:
    """Append events to ``directory/events.jsonl``; safe to call from any thread."""

    def __init__(
        self,
        directory: Path,
        *,
        wall: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._lines = JsonLines(directory / EVENTS_FILE)
        self._wall = wall
        self._monotonic = monotonic

    def __call__(self, event: str, /, **fields: object) -> None:
        """Write one event; fields named like the stamps get a trailing underscore."""
        row: dict[str, object] = {
            "v": EVENT_VERSION,
            "t": round(self._wall(), 3),
            "mono": round(self._monotonic(), 6),
            "event": event,
        }
        row.update({f"{key}_" if key in _STAMPS else key: value for key, value in fields.items()})
        self._lines.append(row)

    def observe(self, event: dict[str, Any]) -> None:
        """Write an event given as a mapping whose ``event`` (or ``kind``) names it."""
        fields = {str(key): value for key, value in event.items()}
        name = fields.pop("event", None) or fields.pop("kind", None) or "event"
        self(str(name), **fields)

    def close(self) -> None:
        """Close the file; later events are ignored."""
        self._lines.close()


def read_events(
    directory: Path,
    *,
    last: int | None = None,
    event: str | None = None,
    since: float = 0.0,
    without: Collection[str] = (),
) -> Iterator[dict[str, Any]]:
    """Yield the events of a run directory in order: only those named ``event``, and none of ``without``, only those of
    ``since`` (s since 1970) or later, and of these the ``last`` ones.
    """
    rows = (
        row
        for row in read_json_lines(directory / EVENTS_FILE)
        if is_asked_for(row, event, without) and time_of(row) >= since
    )
    yield from rows if last is None else deque(rows, maxlen=last)


def time_of(row: Mapping[str, Any]) -> float:
    """Return when it happened; 0 where the row does not say so in a number."""
    told = row.get("t")
    return told if isinstance(told, int | float) else 0.0


def is_asked_for(row: dict[str, Any], event: str | None, without: Collection[str]) -> bool:
    """Tell whether an event is named ``event`` (None: any name will do), and not in ``without``."""
    name = row.get("event")
    return event in (None, name) and name not in without


def plain_words(row: Mapping[str, Any]) -> str:
    """Return an event's word and fields, for people where no sentence tells it."""
    fields = [f"{key}={_short(value)}" for key, value in row.items() if key not in _STAMPS]
    return " ".join([str(row.get("event", "?")), *fields])


def printable(line: str) -> str:
    """Return the line without signs that could steer a terminal: a peer may have chosen a part of the words."""
    return "".join(sign if sign.isprintable() else "?" for sign in line)


def _short(value: object) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 64 else text[:61] + "..."


# ---- events as they come ----
#
# From a file that another process appends to, renames when it is long, and starts anew.
#
# Only whole lines are told. What is left of a file when it is put aside is read first, then those that were put aside
# after it, then the new one from its beginning. A file that was packed meanwhile is known by its first line, which is
# stamped.


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
            files = open_files(self._path, stack)
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
