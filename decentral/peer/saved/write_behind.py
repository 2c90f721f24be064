"""One thing at a time written on a thread of its own, while training goes on: a slow disk holds nobody."""

from __future__ import annotations

import threading
from collections.abc import Callable

LOOK_EVERY = 0.2  # s: Ctrl-C must get through to who waits, on every platform


class WriteBehind:
    """Its methods are called on the training thread."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def busy(self) -> bool:
        """Whether what was begun last is not written yet."""
        return self._thread is not None and self._thread.is_alive()

    def begin(self, work: Callable[[], object]) -> None:
        """Start it; nothing may be in progress."""
        assert not self.busy, "one write at a time"
        self.check()
        self._thread = threading.Thread(target=self._run, args=(work,), name="checkpoint", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise what ended the last write, once."""
        if not self.busy and self._error is not None:
            error, self._error = self._error, None
            raise error

    def wait(self) -> None:
        """Return when it is written. Raises what ended it."""
        while self._thread is not None and self._thread.is_alive():
            self._thread.join(LOOK_EVERY)
        self.check()

    def _run(self, work: Callable[[], object]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - raised on the thread that asked for it
            self._error = error
