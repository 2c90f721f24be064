"""The sides that a peer shows while it runs: events, the status in its folder and on the screen, trackers."""

from __future__ import annotations

import logging
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

from decentral.observe.beacon import Beacon
from decentral.observe.events import EventLog
from decentral.observe.health import Notices, alone_sentence
from decentral.observe.metrics import swarm_numbers
from decentral.observe.screen import PlainDisplay, log_shown_by
from decentral.observe.status import Status
from decentral.peer.settings import Observer, Settings
from decentral.preferences.controls import Controls, Steered
from decentral.preferences.preferences import Preferences

# ---- events as they happen ----
#
# They go to its event log, its notices, the log, and whoever observes it.

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
        """Tell everybody of an event."""
        if self._log is not None:
            self._log(event, **fields)
        if (sentence := self.notices.hear(event, fields, self._name)) is not None:
            level, plain = (logging.INFO, True) if event == "back_in_band" else (logging.WARNING, False)
            logging.getLogger("decentral").log(level, sentence, extra={"plain": plain})
        if event == "alone" and isinstance(names := fields["peers"], list):
            logger.warning("%s", alone_sentence(names, left=bool(fields["left"])))
        if self._observer is not None:
            self._observer({"event": event, **fields})


# ---- the folder and the screen ----
#
# Beside a loop of one's own: a status for the commands, and lines on stderr.


@contextmanager
def shown(settings: Settings, status: Callable[[], Status], peer: Steered) -> Iterator[None]:
    """Tell the folder and the screen how this peer is, and the peer what was asked of it; each as far as wanted.

    What is logged goes to the screen as well, in a process that has configured no logging: Python would print it bare.
    """
    given, out, display = settings.options, settings.out, None
    if not given["quiet"]:
        by_command = f"decentral leave --out {shlex.quote(str(settings.called))}, or " if given["commands"] else ""
        display = PlainDisplay(sys.stderr, stop=f"{by_command}peer.leave()", prefix="decentral: ")
    caps, daily, writes = settings.caps, settings.daily_upload, settings.max_writes
    wanted = Preferences(max_upload=caps.up, max_download=caps.down, daily_upload=daily, max_writes=writes)
    controls = Controls(peer, wanted, folder=out if given["commands"] else None)
    folder = out if given["commands"] else None
    with ExitStack() as stack:
        if display is not None and not _logging_is_configured():
            stack.enter_context(log_shown_by(display.say))
        stack.enter_context(Beacon(folder, lambda: controls.look(status()), controls.obey, display=display))
        yield


def _logging_is_configured() -> bool:
    """Tell whether what ``decentral`` logs has a handler, its own or one above it."""
    log: logging.Logger | None = logging.getLogger("decentral")
    while log is not None:
        if any(not isinstance(handler, logging.NullHandler) for handler in log.handlers):
            return True
        log = log.parent if log.propagate else None
    return False


# ---- the trackers of an Accelerator ----
#
# Whatever ``log_with`` names hears after every round how the swarm is.


class Tracked(Protocol):
    """A peer, as far as trackers are told of it."""

    @property
    def round(self) -> int:
        """Return the outer steps that its anchor has behind it."""
        ...

    @property
    def inner_steps(self) -> int:
        """Return the inner steps of this peer, over all its lives."""
        ...

    def status(self) -> Status:
        """Return what it is doing now."""
        ...


class Trackers:
    """The trackers that are there when a round ends: ``init_trackers`` may come before ``join`` or after."""

    def __init__(self, accelerator: Any | None) -> None:  # Any: accelerate is untyped
        self._accelerator, self._told = accelerator, 0

    def after_step(self, peer: Tracked) -> None:
        """Log the numbers of a round that ended in this step, at the count of inner steps."""
        if getattr(self._accelerator, "trackers", ()) and peer.round != self._told:
            assert self._accelerator is not None
            self._told = peer.round
            self._accelerator.log(swarm_numbers(peer.status()), step=peer.inner_steps)
