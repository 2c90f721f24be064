"""The history of a peer and its swarm, folded row by row from events and metrics: rounds, learning, and what is worth a
sentence.

Pure: rows in, plain data out, and no row is looked at twice. Rows come from files that others may have written, so what
does not have the shape that it should is passed over.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

from decentral.observe.diagnostics import NAMES
from decentral.observe.story import LONGEST, Story, number, steps_made, str_list, without

ROUNDS = 300  # on the strip
SENTENCES = 60
_HELD_OUT = ("round", "tokens", "bytes_sent", "seconds", "bits_per_byte")
_TRAINING = ("step", "tokens", "seconds", "loss")
_TOLD = ("waited", "ballot", "votes", "sending", "applying")
_COPIED = ("round", "epoch", "fragment", "contributed", "final", "truncated")  # the last: lists were cut


class History:
    """Takes rows in the order of the files. ``rounds`` of them are kept; None: all."""

    def __init__(self, rounds: int | None = ROUNDS) -> None:
        self.rounds: deque[dict[str, Any]] = deque(maxlen=rounds)
        self.sentences: deque[dict[str, Any]] = deque(maxlen=SENTENCES)
        self.held_out = Series("round", _HELD_OUT)
        self.training = Series("step", _TRAINING)
        self.diagnostics = Series("diagnosed_round", ("diagnosed_round", *NAMES))
        self.last_outer: dict[str, Any] = {}
        self.num_events = self.num_metrics = 0
        self._last_mono: float | None = None
        self._story = Story()
        self._seconds = _Clock()

    def event(self, row: Mapping[str, Any]) -> None:
        """Take a row of ``events.jsonl``."""
        self.num_events += 1
        if row.get("event") == "commit":
            self._round(row, str_list(row.get("contributors")), self._story.expect(row))
        elif row.get("event") == "pair":
            partner = row.get("partner")
            self._round(row, [partner] if isinstance(partner, str) else [], [])  # who else met is not told
        for said in self._story.tell_beside(row):
            self._say(row, said)
        if row.get("event") == "healed" and isinstance(parted := row.get("parted"), int):
            self._drop_after(parted)

    def metric(self, row: Mapping[str, Any]) -> None:
        """Take a row of ``metrics.jsonl``."""
        self.num_metrics += 1
        row = {**row, "seconds": self._seconds.over_restarts(number(row.get("seconds")))}
        if row.get("scope") == "inner":
            self.training.add(row)
        elif row.get("scope") == "outer":
            self.last_outer = row
            if number(row.get("bits_per_byte")) is not None:
                self.held_out.add(row)
            self.diagnostics.add(row)

    def _round(self, row: Mapping[str, Any], contributors: list[str], members: list[str]) -> None:
        if (step := steps_made(row)) is None:
            return
        self._drop_after(step - 1)  # made anew, on another branch
        mono = number(row.get("mono"))
        self.rounds.append(
            {
                "step": step,
                "t": number(row.get("t")),
                "seconds": number(row.get("seconds")) or self._since_last(mono),
                "contributors": contributors,
                "late": [] if row.get("truncated") else without(members, contributors),
                **{key: row.get(key) for key in _COPIED if key in row},
                **({"disagreement": number(row.get("disagreement"))} if "disagreement" in row else {}),
                **_details(row),
            }
        )
        self._last_mono = mono

    def _drop_after(self, step: int) -> None:
        """Drop the rounds after so many outer steps: they are none of the run's any more."""
        while self.rounds and self.rounds[-1]["step"] > step:
            self.rounds.pop()

    def _say(self, row: Mapping[str, Any], text: str) -> None:
        short = text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"
        self.sentences.append({"t": number(row.get("t")), "event": str(row.get("event")), "text": short})

    def _since_last(self, mono: float | None) -> float | None:
        """Return the seconds between two rounds; None over a restart, which may have begun the clock anew."""
        if mono is None or self._last_mono is None or not 0 < mono - self._last_mono < 86_400:
            return None
        return round(mono - self._last_mono, 3)


class _Clock:
    """Seconds of all processes of a peer together: each begins at 0."""

    def __init__(self) -> None:
        self._before = self._last = 0.0

    def over_restarts(self, seconds: float | None) -> float | None:
        if seconds is None:
            return None
        if seconds < self._last:
            self._before += self._last
        self._last = seconds
        return round(self._before + seconds, 3)


def _details(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return who led, the number of votes, and how this peer spent the time, as far as the event tells."""
    found: dict[str, Any] = {name: value for name in _TOLD if (value := number(row.get(name))) is not None}
    if isinstance(record := row.get("record"), str):
        found["record"] = record[:12]  # enough to compare two peers' by eye
    if isinstance(leader := row.get("leader"), str):
        found["leader"] = leader
    seconds, waited = number(row.get("seconds")), found.get("waited")
    if seconds is not None and waited is not None:
        found["split"] = split_of(seconds, waited, found.get("sending") or 0.0, found.get("applying") or 0.0)
    return found


def split_of(seconds: float, waited: float, sending: float, applying: float) -> dict[str, float]:
    """Split a round by what training did. Of the time in which it stood still, sending and the outer step account for
    their own; where it goes on meanwhile, they hold up nothing.
    """
    waited = min(max(0.0, waited), seconds)
    sends = min(sending, waited)
    applies = min(applying, waited - sends)
    parts = {"computing": seconds - waited, "sending": sends, "waiting": waited - sends - applies, "applying": applies}
    return {name: round(part, 3) for name, part in parts.items()}


# ---- columns of numbers, of bounded length ----
#
# A run of months has as many points on the screen as one of an hour.

MOST_POINTS = 800  # points: more than a chart has pixels to tell apart on a phone, about as many as on a desk


class Series:
    """Rows by ascending ``key``. When there are too many, every second one is dropped, and then only every second one
    is taken. The newest is always there.
    """

    def __init__(self, key: str, columns: tuple[str, ...], limit: int = MOST_POINTS) -> None:
        self._key, self._columns, self._limit = key, columns, limit
        self._rows: list[tuple[Any, ...]] = []  # of strings and numbers as the file has them
        self._newest: tuple[Any, ...] | None = None
        self._stride, self._seen = 1, 0

    def add(self, row: Mapping[str, Any]) -> None:
        """Add a row. If it is at or before the last, it takes the place of all that it repeats, as after a restart."""
        if not isinstance(row.get(self._key), int | float):
            return
        taken = tuple(row.get(column) for column in self._columns)
        at = self._columns.index(self._key)
        if self._newest is not None and self._newest[at] >= taken[at]:
            self._rows = [kept for kept in self._rows if kept[at] < taken[at]]
        self._newest = taken
        if self._seen % self._stride == 0:
            self._rows.append(taken)
        self._seen += 1
        if len(self._rows) > self._limit:
            self._rows = self._rows[::2]
            self._stride *= 2

    def columns(self) -> dict[str, list[Any]]:
        """Return the columns by name, from the oldest value to the newest."""
        rows = [*self._rows]
        if self._newest is not None and (not rows or rows[-1] != self._newest):
            rows.append(self._newest)
        return {name: [row[at] for row in rows] for at, name in enumerate(self._columns)}
