"""Where those who send or receive wait for their turn at a cap."""

from __future__ import annotations

import anyio

from decentral.flow.schedule import Schedule, Turn
from decentral.wire.keys import PeerId

_FREE = 1e15  # bytes/s: for those who wait at a cap that was lifted


class Gate:
    """One direction's schedule, and those who wait for it. Whose turn is next keeps the time for all."""

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self._schedule: Schedule | None = None  # made when the loop's clock is there
        self._waiting: dict[Turn, anyio.Event] = {}

    def change(self, rate: float) -> None:
        """Go on at another rate, for those who wait already, too."""
        self.rate = rate
        if self._schedule is not None:
            self._schedule.change(rate, anyio.current_time())
            self._wake(self._schedule.head)  # it keeps the time, by the old rate

    @property
    def schedule(self) -> Schedule:
        """Who may move when."""
        if self._schedule is None:
            self._schedule = Schedule(self.rate, anyio.current_time())
        return self._schedule

    def ask(self, peer: PeerId, nbytes: int, *, urgent: bool) -> Turn:
        """See Schedule; ``wait`` for it unless it is granted."""
        return self.schedule.ask(peer, nbytes, anyio.current_time(), urgent=urgent)

    async def wait(self, turn: Turn) -> None:
        """Until it is granted."""
        event = self._waiting[turn] = anyio.Event()
        try:
            while not turn.granted:
                deadline = self.schedule.next_at() if self.schedule.head is turn else float("inf")
                with anyio.CancelScope(deadline=deadline):
                    await event.wait()
                    event = self._waiting[turn] = anyio.Event()
                self._grant()
        finally:
            del self._waiting[turn]
            if not turn.granted:
                self.schedule.drop(turn)
            self._wake(self.schedule.head)  # it keeps the time from now on

    def _grant(self) -> None:
        for turn in self.schedule.due(anyio.current_time()):
            self._wake(turn)

    def _wake(self, turn: Turn | None) -> None:
        if turn in self._waiting:
            self._waiting[turn].set()


def changed(gate: Gate | None, rate: float | None) -> Gate | None:
    """The gate for ``rate``: the same one while there is a cap, because some wait at it."""
    if gate is None:
        return None if rate is None else Gate(rate)
    gate.change(_FREE if rate is None else rate)
    return None if rate is None else gate
