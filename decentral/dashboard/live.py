"""Readers of a peer's folder for the page: of a peer that runs, or of a run that is over."""

from __future__ import annotations

import json
import math
import time
import tomllib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from decentral.dashboard.history import History
from decentral.dashboard.view import View, events_of, learning_of, now_of, rounds_of
from decentral.errors import DecentralError, UsageError
from decentral.observe.events import EVENTS_FILE, FileTail, read_events
from decentral.observe.health import as_seen, names_in
from decentral.observe.metrics import METRICS_FILE, read_metrics
from decentral.observe.status import STATUS_FILE, Status, is_running, read_status
from decentral.observe.story import number, steps_made

# ---- a folder as it grows ----
#
# Reads what is new since the last look, never a whole file twice.

MANIFEST_FILE = "run.toml"
PARTS = ("now", "rounds", "learning", "events")


class LiveFolder:
    """A reader of what the page shows of ``directory``. Not to be asked by two threads at a time."""

    def __init__(
        self,
        directory: Path,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._directory, self._clock, self._monotonic = directory, clock, monotonic
        self._of = Status()  # the status that was read last
        self._begin()

    def _begin(self) -> None:
        self.history, self._rates = History(), PeerRates()
        self._events, self._metrics = FileTail(self._directory / EVENTS_FILE), FileTail(self._directory / METRICS_FILE)
        self._what = ""
        self._made: tuple[object, int] = (None, -1)  # events, with names, and metrics that the parts below were made of
        self._parts: dict[str, View] = {}

    def look(self) -> Mapping[str, View]:
        """Return all parts as they are now; a part that has not changed is the same object as at the last look.

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
        called = names_in(self._of)
        events, metrics = (self.history.num_events, called), self.history.num_metrics
        if events != self._made[0]:
            self._parts |= {"rounds": rounds_of(self.history, called), "events": events_of(self.history, called)}
        if metrics != self._made[1]:
            self._parts |= {"learning": learning_of(self.history)}
        self._made = (events, metrics)
        self._parts |= {"now": self._now(status)}
        return dict(self._parts)

    def _read(self) -> Status | str:
        """Return the status, or why there is none."""
        try:
            return read_status(self._directory)
        except DecentralError as error:
            return str(error)

    def _now(self, status: Status | str) -> View:
        if isinstance(status, str):
            return {"health": status, "word": "nothing", "alive": False}
        alive = is_running(status)
        health = as_seen(status, self._clock(), self._monotonic()).health
        now = now_of(status, self.history, health=health, alive=alive)
        self._what = self._what or what_is_learnt(self._directory, status)
        rates = self._rates.see(status) if alive else {}
        return {**now, "what": self._what, "peers": [{**peer, **rates.get(peer["peer"], {})} for peer in now["peers"]]}

    def close(self) -> None:
        """Close the files."""
        self._events.close()
        self._metrics.close()


def _is_another(before: Status, now: Status) -> bool:
    """Tell whether a status is of another peer or run; a peer that begins does not know its name yet."""
    pairs = ((before.peer, now.peer), (before.run_id, now.run_id))
    return any(old and new and old != new for old, new in pairs)


def rows_of(lines: Iterator[bytes]) -> Iterator[dict[str, Any]]:
    """Yield the lines that are objects."""
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:  # half a line of a killed writer
            continue
        if isinstance(row, dict):
            yield row


def what_is_learnt(directory: Path, status: Status) -> str:
    """Say what a run trains, by the terms in the folder of its peer; empty where they are not there or not read."""
    try:
        terms = tomllib.loads((directory / MANIFEST_FILE).read_text(encoding="utf-8"))
        task, corpus = str(terms["model"]["task"]), str(terms["data"]["corpus"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    size = f" of {status.num_parameters:,} parameters" if status.num_parameters else ""
    if task != "causal-lm":
        return f"A script's own model{size}"
    return f"A language model{size}, on {'the standard library' if corpus == 'stdlib' else corpus}"


# ---- bytes per second with each peer ----
#
# From the counts of one status after another. Pure.

WINDOW = 10.0  # s, as the peer's own rates
_MOST_STATUSES = 64  # statuses in a window: one a second, and some more
_WAYS = (("sent_per_second", "bytes_sent"), ("received_per_second", "bytes_received"))


class PeerRates:
    """Sees every status that is read."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, dict[str, dict[str, int]]]] = deque(maxlen=_MOST_STATUSES)

    def see(self, status: Status) -> dict[str, dict[str, float]]:
        """Return by peer the rates over the last seconds; empty before there are two statuses."""
        counts = {str(member.get("peer")): _counts(member) for member in status.members}
        if self._seen and self._seen[-1][0] >= status.updated:
            self._seen.pop()  # the same again
        self._seen.append((status.updated, counts))
        while len(self._seen) > 2 and status.updated - self._seen[0][0] > WINDOW:
            self._seen.popleft()
        then, before = self._seen[0]
        elapsed = status.updated - then
        if elapsed <= 0:
            return {}
        return {
            peer: {rate: max(0, now[count] - before[peer][count]) / elapsed for rate, count in _WAYS}
            for peer, now in counts.items()
            if peer in before
        }


def _counts(member: object) -> dict[str, int]:
    get = getattr(member, "get", lambda key: None)
    return {count: int(get(count) or 0) for _, count in _WAYS}


# ---- a finished run, round by round ----
#
# What the page would have shown at each, as far as the folder kept it.
#
# Files are read anew for each round that is asked for, up to that round and no further: nothing of them is held, and a
# slider that is moved asks for few. Addresses, paths and rates of that time are in no file, so they are not known.

_SAME_ALL_ALONG = ("peer", "names", "run", "run_id", "algorithm", "rounds", "num_parameters", "library")  # all along
_NOT_KEPT = dict.fromkeys(
    ("sent_per_second", "received_per_second", "max_upload", "max_download", "uplink_bits", "reachability")
)
_MEMBER = {"presence": "member"}  # who of them was there at that moment is in no file


class Replay:
    """A reader of a run that is over, in one folder. ``span`` is read once: nothing is added."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._last = read_status(directory)
        steps = [step for row in read_events(directory) if (step := steps_made(row)) is not None]
        if not steps:
            raise UsageError(f"{directory}: its events tell of no round; a run with one can be replayed")
        self.span = (min(steps), max(steps))

    def at(self, round_: int | None = None) -> dict[str, View]:
        """Return all parts as of the end of a round; of the last one where none is named."""
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
            "now": {
                **now,
                "what": what_is_learnt(self._directory, status),
                "me": {**now["me"], **_NOT_KEPT},
                "peers": [{**peer, **_MEMBER} for peer in now["peers"]],
            },
            "rounds": rounds_of(history, names_in(status)),
            "learning": learning_of(history),
            "events": events_of(history, names_in(status)),
        }


def _as_of(last: Status, round_: int, commit: Mapping[str, Any], history: History) -> Status:
    """Return what is known of the peer then: its names, and what the newest row of metrics said."""
    outer, diagnosed = history.last_outer, history.diagnostics.columns()
    seen = [bool(row.get("contributed", row.get("contributors"))) for row in history.rounds][-100:]
    values = {name: column[-1] for name, column in diagnosed.items() if column and column[-1] is not None}
    figures = {name: float(value) for name, value in values.items() if name != "diagnosed_round"}
    members = [name for name in commit.get("members", ()) if isinstance(name, str)]
    return Status(
        state="replay",
        **{name: getattr(last, name) for name in _SAME_ALL_ALONG},
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
        health=_sentence_of_replay(round_, last, commit, history),
    )


def _newest(values: list[Any]) -> float | None:
    return next((value for value in reversed(values) if value is not None), None)


def _sentence_of_replay(round_: int, last: Status, commit: Mapping[str, Any], history: History) -> str:
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(number(commit.get("t")) or 0))
    end = "" if last.rounds is None else f" of {last.rounds}"
    if commit.get("event") == "commit" and history.rounds:
        taken, late = len(history.rounds[-1]["contributors"]), len(history.rounds[-1]["late"])
        return f"replay: round {round_}{end}, made at {at} of the updates of {taken} of {taken + late} peers"
    return f"replay: step {round_}{end}, taken at {at}"


# ---- peers' folders in a directory ----
#
# It may be one itself, or hold several side by side, as a demo's does.

MOST_FOLDERS = 64  # folders on one page


def peers_in(directory: Path) -> dict[str, Path]:
    """Return folders by the name that the page calls them, the empty name for the directory itself.

    Looked at anew every time: a demo's peers come one after the other.
    """
    if (directory / STATUS_FILE).is_file():
        return {"": directory}
    try:
        found = sorted(
            (_began(path.parent), path.parent.name, path.parent) for path in directory.glob(f"*/{STATUS_FILE}")
        )
    except OSError:
        return {}
    return {name: path for _, name, path in found[:MOST_FOLDERS]}


def _began(folder: Path) -> float:
    """Return when its peer learnt of the run: a newcomer stands behind those who were there."""
    try:
        return (folder / MANIFEST_FILE).stat().st_mtime
    except OSError:
        return math.inf


def choose_folder(folders: dict[str, Path], asked: str | None) -> str | None:
    """Return the folder that was asked for, else the first; a name that is none of them is never made a path."""
    if asked is not None and asked in folders:
        return asked
    return next(iter(folders), None)
