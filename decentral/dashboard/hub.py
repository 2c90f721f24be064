"""All viewers of one folder share one reader, which reads only while somebody looks.

A viewer is told what has changed since it was last told: one that is slow skips what is old, and nothing queues up.
"""

from __future__ import annotations

import json
import math
from collections.abc import AsyncGenerator, Mapping
from typing import Any, Protocol

import anyio
import anyio.to_thread

from decentral.observe.lines import plain

PERIOD = 1.0  # s between two looks: as often as a peer writes its status


class Reader(Protocol):
    """Where a folder's parts come from."""

    def look(self) -> Mapping[str, Any]:
        """All parts; blocks while it reads."""
        ...

    def close(self) -> None:
        """Nobody will ask any more."""
        ...


class Hub:
    """The viewers of one folder, all on one event loop.

    Between two viewers the reader is kept: it goes on where it was, and its memory is bounded.
    """

    def __init__(self, reader: Reader, period: float = PERIOD) -> None:
        self._reader, self._period = reader, period
        self._looking = anyio.Lock()
        self._looked_at = -math.inf
        self._seen: dict[str, Any] = {}
        self._told: dict[str, tuple[int, str]] = {}  # by part: its number, its text
        self._number = 0

    async def changes(self) -> AsyncGenerator[dict[str, str], None]:
        """What has changed, as JSON by part: at first all of it, then what is new; empty when nothing is."""
        known: dict[str, int] = {}
        while True:
            await self._look()
            fresh = {part: told for part, told in self._told.items() if known.get(part) != told[0]}
            known |= {part: number for part, (number, _) in fresh.items()}
            yield {part: text for part, (_, text) in fresh.items()}
            await anyio.sleep(self._period)

    async def now(self) -> dict[str, str]:
        """All parts as they are."""
        await self._look()
        return {part: text for part, (_, text) in self._told.items()}

    def close(self) -> None:
        """Close the reader."""
        self._reader.close()

    async def _look(self) -> None:
        """Read, if nobody has for a period."""
        async with self._looking:
            if anyio.current_time() - self._looked_at < 0.9 * self._period:
                return
            parts = await anyio.to_thread.run_sync(self._reader.look)
            self._looked_at = anyio.current_time()
            for part, value in parts.items():
                if self._seen.get(part) is not value:
                    self._take(part, value)

    def _take(self, part: str, value: Any) -> None:
        self._seen[part] = value
        text = as_json(value)
        if part not in self._told or self._told[part][1] != text:
            self._number += 1
            self._told[part] = (self._number, text)


def as_json(value: Any) -> str:
    """Strict JSON on one line, whatever the files had."""
    return json.dumps(plain(value), separators=(",", ":"), allow_nan=False)
