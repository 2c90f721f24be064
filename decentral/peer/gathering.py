"""Waiting for other members before the first step."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from decentral.consensus.chain import Head
from decentral.errors import NoPeersError
from decentral.peer.participation import Participation
from decentral.swarm.patience import time_left
from decentral.training.live_model import LiveModel
from decentral.training.swarm_side import run_blocking

LOOK_EVERY = 0.2  # s between looks at what is waited for


@dataclass(frozen=True, slots=True)
class Gathering:
    """Waits on every process of a peer at once; ``part`` is there on the main one."""

    model: LiveModel
    part: Participation | None
    asked_to_leave: threading.Event

    def wait(self, count: int, enough: Callable[[Head], bool], give_up_at: float | None) -> None:
        """Until the chain's head has ``enough`` members: ``count``, for people. Raises NoPeersError."""
        with self.model.as_one():
            self._wait(count, enough, give_up_at)

    def _wait(self, count: int, enough: Callable[[Head], bool], give_up_at: float | None) -> None:
        while not self.model.share((), self._may_begin(count, enough), ())[0]:
            if self.part is not None and time_left(give_up_at) == 0.0:
                here = len(self.part.swarm.node.driver.head.members)
                raise NoPeersError(
                    f"{here} of {count} peers within the time given to join_timeout; start the others, then "
                    f"this one again in {self.part.settings.called}, where it goes on as the same peer, or wait for "
                    "fewer of them"
                )
            self.asked_to_leave.wait(LOOK_EVERY)

    def _may_begin(self, count: int, enough: Callable[[Head], bool]) -> bool:
        """On the main process: whether the wait is over, for whatever reason."""
        if self.part is None:
            return False
        loop, swarm = self.part.loop, self.part.swarm
        run_blocking(loop.end_if_over())
        begins = enough(swarm.node.driver.head) or loop.done or self.asked_to_leave.is_set() or not swarm.alive
        self.part.reporter.waits_for(0 if begins else count)
        swarm.node.waits = not begins
        return begins
