"""Where a peer beside a loop of one's own shows itself: its folder, for the commands, and lines on stderr."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Protocol

from decentral.observe.beacon import Beacon
from decentral.observe.screen.terminal import PlainDisplay
from decentral.observe.status import Status
from decentral.peer.settings import Settings


class Steered(Protocol):
    """What somebody in another terminal may ask for."""

    def leave(self) -> None:
        """End at the next step boundary."""
        ...

    def pause(self) -> None:
        """Train on without contributing."""
        ...

    def resume(self) -> None:
        """Contribute again."""
        ...


def beacon_of(settings: Settings, status: Callable[[], Status], peer: Steered) -> Beacon:
    """Tells the folder and the screen how this peer is, and the peer what was asked of it; each as far as wanted."""
    given, display = settings.options, None
    if not given.quiet:
        by_command = f"decentral leave --out {settings.out}, or " if given.commands else ""
        display = PlainDisplay(sys.stderr, stop=f"{by_command}peer.leave()", prefix="decentral: ")
    asked = {"leave": peer.leave, "pause": peer.pause, "resume": peer.resume}
    return Beacon(settings.out if given.commands else None, status, lambda request: asked[request](), display=display)
