"""Where a peer beside a loop of one's own shows itself: its folder, for the commands, and lines on stderr."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from decentral.observe.beacon import Beacon
from decentral.observe.screen import PlainDisplay, log_shown_on
from decentral.observe.status import Status
from decentral.peer.settings import Settings
from decentral.preferences.controls import Controls, Steered
from decentral.preferences.preferences import Preferences


@contextmanager
def shown(settings: Settings, status: Callable[[], Status], peer: Steered) -> Iterator[None]:
    """Tells the folder and the screen how this peer is, and the peer what was asked of it; each as far as wanted.

    What is logged goes to the screen as well, in a process that has configured no logging: Python would print it bare.
    """
    given, out, display = settings.options, settings.out, None
    if not given.quiet:
        by_command = f"decentral leave --out {settings.called}, or " if given.commands else ""
        display = PlainDisplay(sys.stderr, stop=f"{by_command}peer.leave()", prefix="decentral: ")
    caps = settings.caps
    wanted = Preferences(max_upload=caps.up, max_download=caps.down, daily_upload=settings.daily_upload)
    controls = Controls(peer, wanted, folder=out if given.commands else None)
    folder = out if given.commands else None
    with ExitStack() as stack:
        if display is not None and not _logging_is_configured():
            stack.enter_context(log_shown_on(display))
        stack.enter_context(Beacon(folder, lambda: controls.look(status()), controls.obey, display=display))
        yield


def _logging_is_configured() -> bool:
    """Whether what ``decentral`` logs has a handler, its own or one above it."""
    log: logging.Logger | None = logging.getLogger("decentral")
    while log is not None:
        if any(not isinstance(handler, logging.NullHandler) for handler in log.handlers):
            return True
        log = log.parent if log.propagate else None
    return False
