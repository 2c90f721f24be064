"""One Ctrl-C leaves gracefully, a second one at once; SIGTERM alike. Exit codes as shells count: 128 +
signal.
"""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from decentral.cli.failure import INTERRUPTED, TERMINATED

_CODES = {signal.SIGINT: INTERRUPTED, signal.SIGTERM: TERMINATED}


class Stop:
    """What a signal asked for: ``code`` is None until one came, then the exit code it means."""

    def __init__(self) -> None:
        self.code: int | None = None
        self._on_first: Callable[[], None] | None = None

    def gently(self, on_first: Callable[[], None] | None) -> None:
        """From now on the first signal calls ``on_first``; with None a signal ends the process at once."""
        self._on_first = on_first

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """The signal handler."""
        again, self.code = self.code is not None, _CODES[signal.Signals(number)]
        if again or self._on_first is None:
            raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(self.code)
        self._on_first()


@contextmanager
def stop_signals() -> Iterator[Stop]:
    """Handle SIGINT and SIGTERM inside the block; handlers are as before afterwards."""
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop  # only the main thread may set handlers; a caller on another one has its own
        return
    before = {number: signal.signal(number, stop) for number in _CODES}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
