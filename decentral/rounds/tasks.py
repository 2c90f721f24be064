"""What goes on beside the rounds of one peer: sends, fetches and reduces, none of which may end it by failing."""

from __future__ import annotations

from collections.abc import Callable

import anyio.abc

from decentral.errors import DecentralError


class Tasks:
    """Tasks in the group that the rounds run in."""

    def __init__(self, on_event: Callable[[str, dict[str, object]], None]) -> None:
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

    def spawn(self, work: Callable[..., object], *args: object) -> None:
        """Do ``work(*args)`` beside the rounds."""
        if self._group is not None and not self._over:  # a message may come while the others' handlers are ended
            self._group.start_soon(self._guarded, work, *args)

    async def _guarded(self, work: Callable[..., object], *args: object) -> None:
        """A failed send or a bad answer must not end the peer; it is counted and the timers above go on."""
        try:
            await work(*args)  # type: ignore[misc]
        except DecentralError as error:
            self._on_event("dropped", {"what": getattr(work, "__name__", "task"), "why": str(error)})
