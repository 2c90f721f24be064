"""The trackers of an ``Accelerator``: whatever ``log_with`` names hears after every round how the swarm is."""

from __future__ import annotations

from typing import Any, Protocol

from decentral.observe.metrics import swarm_numbers
from decentral.observe.status import Status


class Tracked(Protocol):
    """A peer, as far as trackers are told of it."""

    @property
    def round(self) -> int:
        """Outer steps that its anchor has behind it."""
        ...

    @property
    def inner_steps(self) -> int:
        """Of this peer, over all its lives."""
        ...

    def status(self) -> Status:
        """What it is doing now."""
        ...


class Trackers:
    """Those that are there when a round ends: ``init_trackers`` may come before ``join`` or after."""

    def __init__(self, accelerator: Any | None) -> None:  # Any: accelerate is untyped
        self._accelerator, self._told = accelerator, 0

    def after_step(self, peer: Tracked) -> None:
        """Log the numbers of a round that ended in this step, at the count of inner steps."""
        if getattr(self._accelerator, "trackers", ()) and peer.round != self._told:
            assert self._accelerator is not None
            self._told = peer.round
            self._accelerator.log(swarm_numbers(peer.status()), step=peer.inner_steps)
