"""A thread that tells the directory and the screen how the peer is, and hears what commands ask of it.

Once per period: read the status, write ``status.json``, show it, take the requests. It never touches the
model, so a training step is never slowed by a slow disk; a full disk is said on the screen and does not end
the training.
"""

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

from decentral.errors import DiskError
from decentral.observe.health import health_sentence
from decentral.observe.requests import Request, drop_requests, take_requests
from decentral.observe.screen import Display
from decentral.observe.status import ProcessInfo, Status, write_status


class Beacon:
    """Publish ``read()`` every ``period`` seconds until closed; give each request to ``on_request``.

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
    ) -> None:
        self._directory = directory
        self._read = read
        self._on_request = on_request
        self._display = display
        self._period = period
        self._begun = begun
        self._process = ProcessInfo()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="beacon", daemon=True)
        self._disk_problem = self._unheard = ""

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
        if not status.problem and (problem := self._disk_problem or self._unheard):
            status = replace(status, problem=problem)
        status = replace(status, health=health_sentence(status))
        if self._directory is not None:
            self._keep(self._directory, status)
        if self._display is not None:
            self._display.show(status)

    def _keep(self, directory: Path, status: Status) -> None:
        try:
            write_status(directory, status, self._process, every=self._period)
            self._disk_problem = ""
        except DiskError as error:
            self._disk_problem = str(error)
