"""The machine's steps, one at a time, and what goes on beside them: sends, fetches and reduces.

What a step asks for is done, in order, before the next is taken: so what a peer says never runs ahead of what it has
made durable. What goes on beside may fail without ending the peer.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

import anyio
import anyio.abc

from decentral.consensus.round_state import Effect
from decentral.errors import DecentralError

CarryOut = Callable[[list[Effect]], Awaitable[None]]
OnEvent = Callable[[str, dict[str, object]], None]
logger = logging.getLogger("decentral.rounds")


class Steps:
    """Those of one peer's machine; whoever changes what a step reads or decides holds ``lock``."""

    def __init__(self, carry_out: CarryOut) -> None:
        self._carry_out = carry_out
        self.lock = anyio.Lock(fast_acquire=True)
        self.failure: Exception | None = None  # a full disk, say: the machine has moved on and the disk has not

    async def take(self, call: Callable[[float], list[Effect]]) -> None:
        """Call the machine, with the time, and do what it asks for."""
        async with self.lock:
            effects = call(anyio.current_time())
            if not effects:
                return
            with anyio.CancelScope(shield=True):  # a caller that goes away must not leave a commit half done
                try:
                    await self._carry_out(effects)
                except Exception as error:
                    self.failure = error
                    raise

    def check(self) -> None:
        """Raise what an earlier step failed with."""
        if self.failure is not None:
            raise self.failure


class Tasks:
    """Tasks in the group that the rounds run in."""

    def __init__(self, on_event: OnEvent) -> None:
        self._on_event = on_event
        self._group: anyio.abc.TaskGroup | None = None
        self._over = False

    @property
    def begun(self) -> bool:
        """Whether the rounds have begun."""
        return self._group is not None

    def begin(self, group: anyio.abc.TaskGroup) -> None:
        """The rounds run, in ``group``."""
        self._group = group

    def end(self) -> None:
        """They do not any more; nothing else is begun."""
        self._over = True

    def spawn(self, work: Callable[..., object], *args: object) -> bool:
        """Do ``work(*args)`` beside the rounds; False when they end, and it is not done."""
        if self._group is None or self._over or self._group.cancel_scope.cancel_called:  # messages may come meanwhile
            return False
        self._group.start_soon(self._guarded, work, *args)
        return True

    async def _guarded(self, work: Callable[..., object], *args: object) -> None:
        """A failed send or a bad answer must not end the peer; it is counted and the timers above go on."""
        what = getattr(work, "__name__", "task")
        try:
            await work(*args)  # type: ignore[misc]
        except DecentralError as error:
            self._on_event("dropped", {"what": what, "why": str(error)})
        except Exception as error:  # noqa: BLE001  told with its traceback
            tell_unexpected(self._on_event, what, error)


def tell_unexpected(on_event: OnEvent, what: str, error: Exception) -> None:
    """A mistake of this package, which a peer's bytes may have led to: as in every handler, nobody ends a peer so.

    A step that was carried out by half does all the same, see ``Steps``.
    """
    logger.exception("%s failed; rounds go on without it, and this is a bug: please report it", what)
    on_event("unexpected", {"what": what, "why": f"{type(error).__name__}: {error}"})
