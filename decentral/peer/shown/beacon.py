"""Where a peer beside a loop of one's own shows itself: its folder, for the commands, and lines on stderr."""

from __future__ import annotations

import sys
from collections.abc import Callable

from decentral.observe.beacon import Beacon
from decentral.observe.screen.terminal import PlainDisplay
from decentral.observe.status import Status
from decentral.peer.settings import Settings
from decentral.preferences.controls import Controls, Steered
from decentral.preferences.preferences import Preferences


def beacon_of(settings: Settings, status: Callable[[], Status], peer: Steered) -> Beacon:
    """Tells the folder and the screen how this peer is, and the peer what was asked of it; each as far as wanted."""
    given, out, display = settings.options, settings.out, None
    if not given.quiet:
        by_command = f"decentral leave --out {out}, or " if given.commands else ""
        display = PlainDisplay(sys.stderr, stop=f"{by_command}peer.leave()", prefix="decentral: ")
    caps = settings.caps
    wanted = Preferences(max_upload=caps.up, max_download=caps.down, daily_upload=settings.daily_upload)
    controls = Controls(peer, wanted, folder=out if given.commands else None)
    return Beacon(out if given.commands else None, lambda: controls.look(status()), controls.obey, display=display)
