"""Keeping a baseline in step with the peer it is compared to: never ahead of it, ended where it ended."""

import threading
from pathlib import Path

from decentral.errors import DecentralError, UsageError
from decentral.observe.status import Status, is_running, read_status

_LOOK_SECONDS = 0.25


class BaselinePace:
    """How many inner steps a baseline may do, read from the status of the peer that runs in ``directory``."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._limit = 0
        self._over = False

    def may_step(self, num_steps: int, halted: threading.Event) -> bool:
        """Wait until the peer is ahead of ``num_steps``; False once it has ended there, or when ``halted`` is set.

        Raises DecentralError when the peer died on the way: there is nothing to compare to then.
        """
        while num_steps >= self._limit and not self._over:
            self._look()
            if num_steps >= self._limit and not self._over and halted.wait(_LOOK_SECONDS):
                return False
        return num_steps < self._limit

    def _look(self) -> None:
        try:
            status = read_status(self._directory)
        except UsageError:  # it has not written one yet
            return
        self._limit = status.inner_steps
        self._over = status.state == "done"
        if not self._over and not is_running(status) and not self._ended_well(status):
            raise DecentralError(f"{self._directory}: the peer to keep pace with has died; see its stderr and events")

    def _ended_well(self, before: Status) -> bool:
        """Whether it wrote its last word between our reading the file and looking for its process."""
        last = read_status(self._directory)
        self._limit = last.inner_steps
        self._over = last.state == "done"
        return self._over or last.pid != before.pid
