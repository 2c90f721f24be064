"""The machine's steps, one at a time: what one asks for is done, in order, before the next is taken.

So what a peer says never runs ahead of what it has made durable.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio

from decentral.consensus.effects import Effect
from decentral.errors import DecentralError

CarryOut = Callable[[list[Effect]], Awaitable[None]]


class Steps:
    """Those of one peer's machine; whoever changes what a step reads or decides holds ``lock``."""

    def __init__(self, carry_out: CarryOut) -> None:
        self._carry_out = carry_out
        self.lock = anyio.Lock(fast_acquire=True)
        self.failure: DecentralError | None = None  # a full disk, say: the machine has moved on and the disk has not

    async def take(self, call: Callable[[float], list[Effect]]) -> None:
        """Call the machine, with the time, and do what it asks for."""
        async with self.lock:
            effects = call(anyio.current_time())
            if not effects:
                return
            with anyio.CancelScope(shield=True):  # a caller that goes away must not leave a commit half done
                try:
                    await self._carry_out(effects)
                except DecentralError as error:
                    self.failure = error
                    raise

    def check(self) -> None:
        """Raise what an earlier step failed with."""
        if self.failure is not None:
            raise self.failure
