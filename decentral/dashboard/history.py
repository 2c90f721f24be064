"""What happened so far, folded row by row from events and metrics: rounds, learning, and what is worth a sentence.

Pure: rows in, plain data out, and no row is looked at twice. Rows come from files that others may have written, so
what does not have the shape that it should is passed over.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from decentral.dashboard.series import Series
from decentral.dashboard.words import members_sentence, sentence_of
from decentral.replica.figures import NAMES

ROUNDS = 300  # on the strip
SENTENCES = 60
LONGEST = 400  # characters of a sentence: others choose what is in it
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
        self._members: list[str] = []  # of the round in progress: a commit names those of the next
        self._seconds = _Clock()

    def event(self, row: Mapping[str, Any]) -> None:
        """One row of ``events.jsonl``."""
        self.num_events += 1
        if row.get("event") == "commit":
            self._round(row, str_list(row.get("contributors")), self._members or str_list(row.get("members")))
        if row.get("event") in ("commit", "membership"):
            self._next_members(row, str_list(row.get("members")))
        elif row.get("event") == "pair":
            partner = row.get("partner")
            self._round(row, [partner] if isinstance(partner, str) else [], [])  # who else met is not told
        elif (said := sentence_of(row)) is not None:
            self._say(row, said)

    def metric(self, row: Mapping[str, Any]) -> None:
        """One row of ``metrics.jsonl``."""
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
        while self.rounds and self.rounds[-1]["step"] >= step:  # made anew, on another branch
            self.rounds.pop()
        mono = number(row.get("mono"))
        self.rounds.append(
            {
                "step": step,
                "t": number(row.get("t")),
                "seconds": number(row.get("seconds")) or self._since_last(mono),
                "contributors": contributors,
                "late": [] if row.get("truncated") else _without(members, contributors),
                **{key: row.get(key) for key in _COPIED if key in row},
                **({"disagreement": number(row.get("disagreement"))} if "disagreement" in row else {}),
                **_details(row),
            }
        )
        self._last_mono = mono

    def _next_members(self, row: Mapping[str, Any], members: list[str]) -> None:
        """Who is a member of the next round, and who came or went with that."""
        before, self._members = self._members, members
        said = members_sentence(_without(members, before), _without(before, members))
        if before and said and not row.get("truncated"):
            self._say(row, said)

    def _say(self, row: Mapping[str, Any], text: str) -> None:
        short = text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"
        self.sentences.append({"t": number(row.get("t")), "event": str(row.get("event")), "text": short})

    def _since_last(self, mono: float | None) -> float | None:
        """Seconds between two rounds; not known over a restart, which may have begun the clock anew."""
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
    """Who led, how many votes, and how this peer spent the time, as far as the event tells."""
    found: dict[str, Any] = {name: value for name in _TOLD if (value := number(row.get(name))) is not None}
    if isinstance(record := row.get("record"), str):
        found["record"] = record[:12]  # enough to compare two peers' by eye
    if isinstance(leader := row.get("leader"), str):
        found["leader"] = leader
    seconds, waited = number(row.get("seconds")), found.get("waited")
    if seconds is not None and waited is not None:
        found["split"] = split_of(seconds, waited, found.get("sending") or 0.0, found.get("applying") or 0.0)
    return found


def steps_made(row: Mapping[str, Any]) -> int | None:
    """Outer steps made with an event: gossip steps are counted from 0. None where it is of no round."""
    if row.get("event") == "commit" and isinstance(row.get("outer_step"), int):
        return int(row["outer_step"])
    if row.get("event") == "pair" and isinstance(row.get("step"), int):
        return int(row["step"]) + 1
    return None


def split_of(seconds: float, waited: float, sending: float, applying: float) -> dict[str, float]:
    """What training did in a round. Of the time in which it stood still the sending and the outer step explain their
    own; where it goes on meanwhile, they held up nothing.
    """
    waited = min(max(0.0, waited), seconds)
    sends = min(sending, waited)
    applies = min(applying, waited - sends)
    parts = {"computing": seconds - waited, "sending": sends, "waiting": waited - sends - applies, "applying": applies}
    return {name: round(part, 3) for name, part in parts.items()}


def _without(names: Sequence[str], others: Collection[str]) -> list[str]:
    known = set(others)
    return [name for name in names if name not in known]


def number(value: object) -> float | None:
    """A finite number, or None for what is none."""
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def str_list(value: object) -> list[str]:
    """The strings of a list."""
    return [one for one in value if isinstance(one, str)] if isinstance(value, list) else []
