"""Something that changes again and again, and tasks that wait for it to do so."""

from __future__ import annotations

import anyio


class Changes:
    """Each change wakes every task that waits then, and nobody that comes later."""

    def __init__(self) -> None:
        self._coming: anyio.Event | None = None  # made for the first that waits: there may be no loop before

    def tell(self) -> None:
        """There was one."""
        if self._coming is not None:
            self._coming.set()
            self._coming = None

    def coming(self) -> anyio.Event:
        """The next one. Taken before a look that takes time, so that no change meanwhile is missed."""
        self._coming = self._coming or anyio.Event()
        return self._coming

    async def next(self) -> None:
        """Wait for the next one."""
        await self.coming().wait()
