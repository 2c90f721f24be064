"""Why a peer contributes and votes no more for now: a person paused it, or the day's upload is used up.

It says farewell, so that nobody waits for it, trains on and follows by what it receives; when the last reason is gone
it asks to be let in again.
"""

from __future__ import annotations

from collections.abc import Callable

import anyio

from decentral.errors import DiskError
from decentral.flow.offload import Offload
from decentral.node.daily_upload import DailyUpload
from decentral.rounds.driver import Driver
from decentral.transport import Traffic

PAUSED, UPLOAD = "paused", "upload"
LOOK_EVERY = 0.25  # s between looks at what was sent today


class Suspension:
    """The reasons of one peer; none: it takes part."""

    def __init__(self, driver: Driver, on_event: Callable[[str, dict[str, object]], None], offload: Offload) -> None:
        self.reasons: set[str] = set()
        self._turn = anyio.Lock()
        self._told = False  # a farewell, since this peer was let in
        self._driver, self._on_event, self._offload = driver, on_event, offload

    def __bool__(self) -> bool:
        return bool(self.reasons)

    async def begin(self, why: str) -> None:
        """Rest."""
        self.reasons.add(why)
        await self._tell()

    async def end(self, why: str) -> None:
        """Take part again, unless there is another reason not to."""
        self.reasons.discard(why)
        await self._tell()

    async def _tell(self) -> None:
        """Say farewell, or ask to be let in again: in turns, since a farewell waits for a step that is being made.

        Before the rounds run there is nobody to tell; whoever starts them, or looks at what was sent, asks again.
        """
        async with self._turn:
            rests = bool(self.reasons)
            if rests == self._told or not self._driver.state.running:
                return
            self._told = rests
            await (self._driver.goodbye() if rests else self._driver.come_back())

    async def keep_to(self, daily: DailyUpload, traffic: Traffic) -> None:
        """Rest while the day's upload is used up, and have the count survive this process. Runs until cancelled."""
        try:
            while True:
                daily.count(traffic.total.sent)
                if daily.used_up != (UPLOAD in self.reasons):
                    fields: dict[str, object] = {"sent": daily.sent, "limit": daily.limit}
                    self._on_event("upload_used_up" if daily.used_up else "upload_goes_on", fields)
                    await (self.begin if daily.used_up else self.end)(UPLOAD)
                await self._tell()
                if daily.is_due:
                    await self._offload(self._save, daily)
                await anyio.sleep(LOOK_EVERY)
        finally:
            daily.count(traffic.total.sent)
            if daily.limit is not None:
                self._save(daily)

    def _save(self, daily: DailyUpload) -> None:
        try:
            daily.save()
        except DiskError as error:  # the count goes on in memory; whoever commits fails on the same disk
            self._on_event("upload_not_saved", {"why": str(error)})
