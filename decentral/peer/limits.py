"""What a peer sends, receives and computes with at most, while that changes."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from decentral.node.upload import DailyUpload, checked
from decentral.peer.participation import Participation
from decentral.peer.settings import Settings
from decentral.preferences.preferences import Duty, Preferences
from decentral.tensors.threads import ThreadsWanted
from decentral.transport.throttle import Caps


class PeerLimits:
    """One peer's: as ``join`` was told at first. Any thread may change them."""

    def __init__(self, settings: Settings) -> None:
        self.daily_upload = DailyUpload(settings.out, settings.daily_upload)
        self.caps = settings.caps
        self._duty = Duty(time.monotonic, settle_device)
        self._threads = ThreadsWanted()

    def change(self, wanted: Preferences, part: Participation | None) -> None:
        """Hold to other ones. Raises ConfigError for a rate that is too little; nothing is changed then.

        ``part`` is what takes part, once there is a swarm side.
        """
        caps, limit = Caps(up=wanted.max_upload, down=wanted.max_download), checked(wanted.daily_upload)
        self.caps, self.daily_upload.limit = caps, limit
        self._threads.want(wanted.threads)
        self._duty.share = wanted.max_compute or 1.0
        self.hold(part)

    def hold(self, part: Participation | None) -> None:
        """Make the transport keep to them."""
        if part is not None:
            part.swarm.tell(part.links.cap, self.caps)

    def worked(self) -> float:
        """Seconds to rest for, once an inner step is over; before anything else is waited for."""
        return self._duty.worked()

    def rest(self, seconds: float, wait: Callable[[float], object]) -> None:
        """``wait`` so long, if at all; the next step begins then."""
        if seconds:
            wait(seconds)
        self._duty.goes_on()


def settle_device() -> None:
    """Wait until an accelerator has done what it was given; a processor has."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
