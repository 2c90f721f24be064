"""What a peer shows that joins a run which is over: nothing but its end, as there is nothing to get ready for."""

import time
from collections.abc import Callable
from typing import IO

from decentral.observe.screen.terminal import Display, write_out
from decentral.observe.status import Status

PATIENCE = 15.0  # s until somebody that waits is told for what
_FETCHING = "the run is over: fetching its last state ..."
_OF_THE_END = ("starting", "syncing", "done")  # what such a peer goes through


class LateDisplay:
    """Keeps still; the display of a peer that trains opens when anything else comes, for others' word may be wrong."""

    def __init__(
        self, stream: IO[str], open_: Callable[[], Display], *, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._stream, self._open, self._monotonic = stream, open_, monotonic
        self._began = monotonic()
        self._told = False
        self._display: Display | None = None

    def show(self, status: Status) -> None:
        """Nothing of an end as it should be, but a line when that takes long."""
        if self._display is None and (status.problem or status.state not in _OF_THE_END):
            self._display = self._open()
        if self._display is not None:
            self._display.show(status)
        elif status.state != "done" and not self._told and self._monotonic() - self._began >= PATIENCE:
            self._told = True
            self.say(_FETCHING)

    def say(self, text: str) -> None:
        """One line that stays."""
        if self._display is not None:
            self._display.say(text)
        else:
            print(text, file=self._stream, flush=True)

    def result(self, text: str) -> None:
        """One line on stdout."""
        if self._display is not None:
            self._display.result(text)
        else:
            write_out(text)

    def close(self) -> None:
        """Close what was opened."""
        if self._display is not None:
            self._display.close()
