"""Tells what happens to a peer: its event log, its notices, the log, and whoever observes it."""

from __future__ import annotations

import logging
from pathlib import Path

from decentral.observe.events import EventLog
from decentral.observe.health import Notices, alone_sentence
from decentral.peer.settings import Observer

logger = logging.getLogger("decentral.peer")


class Announcer:
    """Call it with an event, on any thread, between ``open`` and ``close``."""

    def __init__(self, observer: Observer | None) -> None:
        self._observer = observer
        self.notices = Notices()
        self._log: EventLog | None = None
        self._name = ""

    def open(self, folder: Path, name: str) -> None:
        """Write to ``folder`` from now on, as the peer ``name``."""
        self._log, self._name = EventLog(folder), name

    def close(self) -> None:
        """Close the log."""
        if self._log is not None:
            self._log.close()

    def __call__(self, event: str, fields: dict[str, object]) -> None:
        """One event."""
        if self._log is not None:
            self._log(event, **fields)
        if (sentence := self.notices.hear(event, fields, self._name)) is not None:
            level, plain = (logging.INFO, True) if event == "back_in_band" else (logging.WARNING, False)
            logging.getLogger("decentral").log(level, sentence, extra={"plain": plain})
        if event == "alone" and isinstance(names := fields["peers"], list):
            logger.warning("%s", alone_sentence(names, left=bool(fields["left"])))
        if self._observer is not None:
            self._observer({"event": event, **fields})
