"""The library's own log, ``logging.getLogger("decentral...")``, as lines of a display.

A handler that wrote to stderr by itself would tear the live view, and be wiped off by it.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from decentral.observe.screen.terminal import Display


@contextmanager
def log_shown_on(display: Display) -> Iterator[None]:
    """Inside the block warnings and errors that are logged are said on ``display``, too, and what is logged for it."""
    log, handler = logging.getLogger("decentral"), _Lines(display)
    handler.addFilter(lambda record: record.levelno >= logging.WARNING or _is_plain(record))
    level = log.level
    log.setLevel(logging.INFO)
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)


class _Lines(logging.Handler):
    def __init__(self, display: Display) -> None:
        super().__init__()
        self._display = display

    def emit(self, record: logging.LogRecord) -> None:
        """Say it; a message that cannot be formatted is logging's own business."""
        try:
            for line in f"{_word(record)}{self.format(record)}".splitlines():
                self._display.say(_printable(line))
        except Exception:  # noqa: BLE001  as every handler does: what is logged must never end what logs it
            self.handleError(record)


def _word(record: logging.LogRecord) -> str:
    """What stands before a line; nothing before what is no complaint (``extra={"plain": True}``)."""
    if _is_plain(record):
        return ""
    return "error: " if record.levelno >= logging.ERROR else "warning: "  # hivemind gives the levels other names


def _is_plain(record: logging.LogRecord) -> bool:
    return bool(getattr(record, "plain", False))


def _printable(line: str) -> str:
    """Without what could steer a terminal: a peer may have chosen a part of the words."""
    return "".join(c if c.isprintable() else "?" for c in line)
