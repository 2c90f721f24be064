"""What a peer says of itself by its logger, on the display of the command that runs it, among what that shows."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from decentral.observe.terminal import Display

LOGGER = "decentral.peer"


class _OnDisplay(logging.Handler):
    def __init__(self, display: Display) -> None:
        super().__init__(logging.WARNING)
        self._display = display

    def emit(self, record: logging.LogRecord) -> None:
        self._display.say(record.getMessage())


@contextmanager
def peer_speaks_on(display: Display) -> Iterator[None]:
    """Within the block its lines go to ``display`` and nowhere else: a live table would be torn by them."""
    logger, handler = logging.getLogger(LOGGER), _OnDisplay(display)
    before, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = before
