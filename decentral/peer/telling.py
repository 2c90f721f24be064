"""Where a peer beside a loop of one's own shows itself: its folder, for the commands, and lines on stderr."""

from __future__ import annotations

import sys
from collections.abc import Callable

from decentral.observe.beacon import Beacon
from decentral.observe.screen.terminal import PlainDisplay
from decentral.observe.status import Status
from decentral.peer.settings import Settings


def beacon_of(settings: Settings, status: Callable[[], Status], obey: Callable[[str], None]) -> Beacon:
    """Tells the folder and the screen how this peer is, as far as either is wanted."""
    given, display = settings.options, None
    if not given.quiet:
        by_command = f"decentral leave --out {settings.out}, or " if given.commands else ""
        display = PlainDisplay(sys.stderr, stop=f"{by_command}peer.leave()", prefix="decentral: ")
    return Beacon(settings.out if given.commands else None, status, obey, display=display)
