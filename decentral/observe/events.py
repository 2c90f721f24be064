"""``events.jsonl``: what happened to one peer, one JSON object per event.

Every line has ``v`` (version of this format), ``t`` (seconds since the epoch, for people), ``mono``
(seconds on the monotonic clock, for differences), ``event`` (a word) and the event's own fields.
"""

import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

from decentral.observe.jsonlines import JsonLines, read_json_lines

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
        if is_asked_for(row, event, without) and float(row.get("t") or 0) >= since
    )
    yield from rows if last is None else deque(rows, maxlen=last)


def is_asked_for(row: dict[str, Any], event: str | None, without: Collection[str]) -> bool:
    """Whether an event is one of those named ``event``, of all where that is None, and none of ``without``."""
    name = row.get("event")
    return event in (None, name) and name not in without


def event_line(row: dict[str, Any]) -> str:
    """One event as a line for people: local time, the word, the fields."""
    stamp = time.strftime("%H:%M:%S", time.localtime(float(row.get("t") or 0)))
    fields = " ".join(f"{key}={_short(value)}" for key, value in row.items() if key not in _STAMPS)
    return f"{stamp} {row.get('event', '?'):<12} {fields}".rstrip()


def _short(value: object) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 64 else text[:61] + "..."
