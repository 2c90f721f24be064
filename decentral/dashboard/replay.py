"""A finished run, round by round: what the page would have shown at each, as far as the folder kept it.

Files are read anew for each round that is asked for, up to that round and no further: nothing of them is held, and a
slider that is moved asks for few. Addresses, paths and rates of that time are in no file, so they are not known.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from decentral.dashboard.history import History, number, steps_made
from decentral.dashboard.view import View, events_of, learning_of, now_of, rounds_of
from decentral.errors import UsageError
from decentral.observe.events import read_events
from decentral.observe.metrics import read_metrics
from decentral.observe.status import Status, read_status

_SAME = ("peer", "run", "run_id", "algorithm", "rounds", "num_parameters", "library")  # all along
_NOT_KEPT = dict.fromkeys(
    ("sent_per_second", "received_per_second", "max_upload", "max_download", "uplink_bits", "reachability")
)
_MEMBER = {"presence": "member"}  # who of them was there at that moment is in no file


class Replay:
    """One folder. ``span`` is read once: nothing is added to a run that is over."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._last = read_status(directory)
        steps = [step for row in read_events(directory) if (step := steps_made(row)) is not None]
        if not steps:
            raise UsageError(f"{directory}: its events tell of no round; a run with one can be replayed")
        self.span = (min(steps), max(steps))

    def at(self, round_: int | None = None) -> dict[str, View]:
        """All parts as of the end of a round; of the last one where none is named."""
        first, last = self.span
        wanted = last if round_ is None else min(max(round_, first), last)
        history = History()
        commit: Mapping[str, Any] = {}
        for row in read_events(self._directory):
            if (steps_made(row) or 0) > wanted:
                break
            commit = row if steps_made(row) is not None else commit
            history.event(row)
        for row in read_metrics(self._directory):
            if row.get("scope") == "outer" and (number(row.get("round")) or 0) > wanted:
                break
            history.metric(row)
        status = _as_of(self._last, wanted, commit, history)
        now = now_of(status, history, health=status.health, alive=False)
        return {
            "now": {**now, "me": {**now["me"], **_NOT_KEPT}, "peers": [{**peer, **_MEMBER} for peer in now["peers"]]},
            "rounds": rounds_of(history),
            "learning": learning_of(history),
            "events": events_of(history),
        }


def _as_of(last: Status, round_: int, commit: Mapping[str, Any], history: History) -> Status:
    """What is known of the peer then: who it is, and what the newest row of metrics said."""
    outer, diagnosed = history.last_outer, history.diagnostics.columns()
    seen = [bool(row.get("contributed", row.get("contributors"))) for row in history.rounds][-100:]
    values = {name: column[-1] for name, column in diagnosed.items() if column and column[-1] is not None}
    figures = {name: float(value) for name, value in values.items() if name != "diagnosed_round"}
    members = [name for name in commit.get("members", ()) if isinstance(name, str)]
    return Status(
        state="replay",
        **{name: getattr(last, name) for name in _SAME},
        round=round_,
        epoch=int(number(commit.get("epoch")) or 0),
        inner_steps=int(number(outer.get("step")) or 0),
        members=tuple({"peer": name, "self": name == last.peer} for name in members),
        rounds_seen=len(seen),
        rounds_contributed=sum(seen),
        bytes_sent=int(number(outer.get("bytes_sent")) or 0),
        bytes_received=int(number(outer.get("bytes_received")) or 0),
        loss=_newest(history.training.columns()["loss"]),
        diagnostics=figures,
        updated=number(commit.get("t")) or 0.0,
        health=_sentence(round_, last, commit, history),
    )


def _newest(values: list[Any]) -> float | None:
    return next((value for value in reversed(values) if value is not None), None)


def _sentence(round_: int, last: Status, commit: Mapping[str, Any], history: History) -> str:
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(number(commit.get("t")) or 0))
    end = "" if last.rounds is None else f" of {last.rounds}"
    if commit.get("event") == "commit" and history.rounds:
        taken, late = len(history.rounds[-1]["contributors"]), len(history.rounds[-1]["late"])
        return f"replay: round {round_}{end}, made at {at} of the updates of {taken} of {taken + late} peers"
    return f"replay: step {round_}{end}, taken at {at}"
