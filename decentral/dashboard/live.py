"""One peer's folder as it grows: reads what is new since the last look, never a whole file twice."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from decentral.dashboard.history import History
from decentral.dashboard.rates import PeerRates
from decentral.dashboard.view import View, events_of, learning_of, now_of, rounds_of
from decentral.errors import DecentralError
from decentral.observe.events import EVENTS_FILE, FileTail
from decentral.observe.health import lost_sentence
from decentral.observe.metrics import METRICS_FILE
from decentral.observe.status import Status, is_lost, is_running, read_status

PARTS = ("now", "rounds", "learning", "events")


class LiveFolder:
    """What the page shows of ``directory``. Not to be asked by two threads at a time."""

    def __init__(self, directory: Path, clock: Callable[[], float] = time.time) -> None:
        self._directory, self._clock = directory, clock
        self._of = Status()  # the status that was read last
        self._begin()

    def _begin(self) -> None:
        self.history, self._rates = History(), PeerRates()
        self._events, self._metrics = FileTail(self._directory / EVENTS_FILE), FileTail(self._directory / METRICS_FILE)
        self._made = (-1, -1)  # events and metrics that the parts below were made of
        self._parts: dict[str, View] = {}

    def look(self) -> Mapping[str, View]:
        """All parts as they are now; one that has not changed is the same object as at the last look.

        Another peer or run in the folder, as after a second demo, begins anew.
        """
        status = self._read()
        if isinstance(status, Status):
            if _is_another(self._of, status):
                self.close()
                self._begin()
            self._of = status
        for row in rows_of(self._events.new_lines()):
            self.history.event(row)
        for row in rows_of(self._metrics.new_lines()):
            self.history.metric(row)
        events, metrics = self.history.num_events, self.history.num_metrics
        if events != self._made[0]:
            self._parts |= {"rounds": rounds_of(self.history), "events": events_of(self.history)}
        if metrics != self._made[1]:
            self._parts |= {"learning": learning_of(self.history)}
        self._made = (events, metrics)
        self._parts |= {"now": self._now(status)}
        return dict(self._parts)

    def _read(self) -> Status | str:
        """The status, or why there is none."""
        try:
            return read_status(self._directory)
        except DecentralError as error:
            return str(error)

    def _now(self, status: Status | str) -> View:
        if isinstance(status, str):
            return {"health": status, "word": "nothing", "alive": False}
        alive = is_running(status)
        now = now_of(status, self.history, health=health_now(status, self._clock()), alive=alive)
        rates = self._rates.see(status) if alive else {}
        return {**now, "peers": [{**peer, **rates.get(peer["peer"], {})} for peer in now["peers"]]}

    def close(self) -> None:
        """Close the files."""
        self._events.close()
        self._metrics.close()


def _is_another(before: Status, now: Status) -> bool:
    """Of another peer or run; who begins does not know its name yet."""
    pairs = ((before.peer, now.peer), (before.run_id, now.run_id))
    return any(old and new and old != new for old, new in pairs)


def health_now(status: Status, now: float) -> str:
    """The sentence that the peer wrote, or the one of its loss."""
    return lost_sentence(status, now) if is_lost(status) else status.health


def rows_of(lines: Iterator[bytes]) -> Iterator[dict[str, Any]]:
    """Those lines that are objects."""
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:  # half a line of a killed writer
            continue
        if isinstance(row, dict):
            yield row
