"""``requests/``: how a command steers the peer that runs in a directory, without a socket.

A command leaves a file, ``requests/leave``, ``requests/pause`` or ``requests/set.max-upload``, with its values as JSON;
the peer takes it away when it acts. Files of a directory belong to whoever may write there, so no other right is
needed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from decentral.errors import DiskError, UsageError
from decentral.observe.status import ENDED, Status, is_running, read_status

REQUESTS = ("leave", "pause", "resume", "finish", "set")
FOLLOWERS_TOO = ("leave", "finish")  # what who trains nothing can do
_FOLDER = "requests"
_ANSWERS = {
    "pause": "will pause after this inner step: no training, no contributions until decentral resume",
    "resume": "trains on and contributes again",
    "finish": "trains on until its next round is committed, and leaves then",
    "leave": "leaves at its next step",
}
_MOST_NBYTES = 4096  # of one request


@dataclass(frozen=True, slots=True)
class Request:
    """A wish of a person for a peer. ``set`` has ``key`` and ``value``, ``pause`` may have ``until`` (s since 1970)."""

    name: str  # one of REQUESTS
    values: Mapping[str, Any] = field(default_factory=dict)  # Any: JSON

    @property
    def file(self) -> str:
        """Return its name in the folder: a setting replaces an older value of its own, and no other setting."""
        return f"{self.name}.{self.values['key']}" if self.name == "set" else self.name


def ask(directory: Path, request: str, **values: Any) -> None:
    """Leave a request for the peer in ``directory``."""
    if request not in REQUESTS:
        raise UsageError(f"request {request!r}: unknown; one of {', '.join(REQUESTS)}")
    try:
        folder = directory / _FOLDER
        folder.mkdir(mode=0o700, exist_ok=True)
        wanted = folder / Request(request, values).file
        begun = folder / f".{wanted.name}.{os.getpid()}"  # a peer that looks now must not read half of it
        begun.write_text(json.dumps(values), encoding="utf-8")
        begun.replace(wanted)
    except OSError as error:
        raise DiskError(
            f"{directory}: the request cannot be left ({error.strerror}); use the peer's own account"
        ) from error


def ask_running(directory: Path, request: str, **values: Any) -> Status:
    """Leave a request, and return the status of the peer that it is left for. UsageError when that has ended."""
    status = read_status(directory)
    if status.state == "following" and request not in FOLLOWERS_TOO:
        raise UsageError(only_follows(directory, request))
    if status.state in ENDED or not is_running(status):
        raise UsageError(f"{directory}: the peer that ran here has ended ({status.state}); nothing to {request}")
    ask(directory, request, **values)
    return status


def only_follows(directory: Path, request: str) -> str:
    """Return the refusal of a request that only a peer that trains can fulfil."""
    return f"{directory}: this peer only follows, and trains nothing that could {request}; decentral leave ends it"


def answer_to(request: str, status: Status, ends: str = "") -> str:
    """Say what a peer will do once it was asked to pause, resume, finish or leave; ``ends``: when a pause does."""
    if request == "finish" and (status.state in ("paused", "resting") or status.wanted_members):
        return "the peer leaves at its next step, as no round would come"
    if request == "pause" and status.trains_while_paused:
        return f"the peer will contribute nothing until decentral resume{ends}; its own loop trains on meanwhile"
    return f"the peer {_ANSWERS[request]}{ends}"


def take_requests(directory: Path) -> tuple[Request, ...]:
    """Take and return those that wait, ``leave`` first, then as they were made; what cannot be read is dropped."""
    try:
        waiting = sorted(path for path in (directory / _FOLDER).iterdir() if not path.name.startswith("."))
        made = {path: path.stat().st_mtime_ns for path in waiting}
    except OSError:
        return ()
    taken = [request for path in sorted(waiting, key=made.__getitem__) if (request := _take(path)) is not None]
    return tuple(sorted(taken, key=lambda request: request.name != "leave"))


def drop_requests(directory: Path) -> None:
    """Forget what was asked of an earlier process."""
    take_requests(directory)


def _take(path: Path) -> Request | None:
    """Take a request; a file that a person touched, empty, is one as well."""
    try:
        with path.open(encoding="utf-8") as file:
            values = json.loads(file.read(_MOST_NBYTES) or "{}")
    except (OSError, ValueError, RecursionError):
        values = None
    try:
        path.unlink()
    except OSError:
        return None
    request = Request(path.name.partition(".")[0], values if isinstance(values, dict) else {})
    known = request.name in REQUESTS and (request.name != "set" or "key" in request.values)
    return request if known and values is not None else None
