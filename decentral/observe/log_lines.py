"""The library's own log, ``logging.getLogger("decentral...")``, as lines of a display.

A handler that wrote to stderr by itself would tear the live view, and be wiped off by it.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from decentral.observe.terminal import Display


@contextmanager
def log_shown_on(display: Display) -> Iterator[None]:
    """Inside the block warnings and errors that are logged are said on ``display``, too."""
    log, handler = logging.getLogger("decentral"), _Lines(display)
    handler.setLevel(logging.WARNING)
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)


class _Lines(logging.Handler):
    def __init__(self, display: Display) -> None:
        super().__init__()
        self._display = display

    def emit(self, record: logging.LogRecord) -> None:
        """Say it; a message that cannot be formatted is logging's own business."""
        try:
            word = "error" if record.levelno >= logging.ERROR else "warning"  # hivemind gives the levels other names
            for line in f"{word}: {self.format(record)}".splitlines():
                self._display.say(_printable(line))
        except Exception:  # noqa: BLE001  as every handler does: what is logged must never end what logs it
            self.handleError(record)


def _printable(line: str) -> str:
    """Without what could steer a terminal: a peer may have chosen a part of the words."""
    return "".join(c if c.isprintable() else "?" for c in line)
