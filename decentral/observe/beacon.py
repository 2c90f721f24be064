"""A thread that tells the directory and the screen how the peer is, and hears what commands ask of it.

Once per period: read the status, write ``status.json``, show it, take the requests. It never touches the
model, so a training step is never slowed by a slow disk; a full disk is said on the screen and does not end
the training.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

from decentral.errors import DiskError
from decentral.observe.health import health_sentence
from decentral.observe.requests import Request, drop_requests, take_requests
from decentral.observe.screen import Display
from decentral.observe.status import ENDED, ProcessInfo, Status, write_status

# A paused peer that wrote once a second would wear a disk by 1.4 GB a day, most of them the file system's own, to say
# that nothing happens. What a person asks of it is written at once all the same.
SLOWEST = 10.0  # s between two files of a peer that rests
_AT_ONCE = (
    *("state", "problem", "paused_because", "finishing", "preferences", "kept_settings", "max_upload", "max_download"),
    *("daily_upload", "max_writes", "invite"),
)


class Beacon:
    """Publish ``read()`` every ``period`` seconds until closed; give each request to ``on_request``. While the peer is
    paused or rests, the file is written as often only as it says something else.

    Without a directory it only shows, and hears nothing. What was asked before it began was meant for an earlier
    process, and is dropped, unless this one has ``begun`` to hear before (`decentral.node.folder.begun`).
    """

    def __init__(
        self,
        directory: Path | None,
        read: Callable[[], Status],
        on_request: Callable[[Request], None],
        *,
        display: Display | None = None,
        period: float = 1.0,
        begun: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._directory = directory
        self._read = read
        self._on_request = on_request
        self._display = display
        self._period = period
        self._begun, self._clock = begun, clock
        self._kept: tuple[Status, float] | None = None  # the newest that was written, and when
        self._process = ProcessInfo()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="beacon", daemon=True)
        self._disk_problem = self._unheard = self._said = ""

    def __enter__(self) -> Self:
        if self._directory is not None and not self._begun:
            drop_requests(self._directory)
        self.publish()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join()
        self._hear()  # what was asked in the last moment: some of it holds for the next process
        self.publish()

    def _run(self) -> None:
        while not self._stop.wait(self._period):
            self._hear()
            self.publish()

    def _hear(self) -> None:
        for request in take_requests(self._directory) if self._directory is not None else ():
            self._obey(request)

    def _obey(self, request: Request) -> None:
        try:
            self._on_request(request)
            self._unheard = ""
        except Exception as error:  # noqa: BLE001  a request that fails must not end what tells how the peer is
            self._unheard = f"the request to {request.name} was not obeyed ({type(error).__name__}: {error})"

    def publish(self) -> None:
        """Write and show the status now."""
        try:
            status = self._read()
        except Exception as error:  # noqa: BLE001  a status that cannot be told must not end the training beside it
            status = Status(problem=f"the status cannot be read ({type(error).__name__}: {error}); training goes on")
        if not status.problem and status.state not in ENDED and (problem := self._disk_problem or self._unheard):
            status = replace(status, problem=problem)
        self._said = health_sentence(replace(status, health=self._said))
        status = replace(status, health=self._said)
        if self._directory is not None and self._is_due(status):
            self._keep(self._directory, status)
        if self._display is not None:
            self._display.show(status)

    def _is_due(self, status: Status) -> bool:
        """Tell whether this status is worth a file."""
        if self._kept is None or not _rests(status):
            return True
        before, at = self._kept
        return self._clock() - at >= SLOWEST or any(getattr(before, one) != getattr(status, one) for one in _AT_ONCE)

    def _keep(self, directory: Path, status: Status) -> None:
        every = max(self._period, SLOWEST) if _rests(status) else self._period
        try:
            write_status(directory, status, self._process, every=every)
            self._disk_problem, self._kept = "", (status, self._clock())
        except DiskError as error:
            self._disk_problem = str(error)


def _rests(status: Status) -> bool:
    return status.state in ("paused", "resting")
