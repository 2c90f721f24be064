"""The upload that a peer may use in a day, and the reasons for which it rests."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import anyio

from decentral.errors import ConfigError, DiskError
from decentral.flow.waiting import Offload
from decentral.rounds.driver import Membership
from decentral.state.durable import DISK, Disk, disk_errors
from decentral.transport import Traffic

# ---- bytes of a day ----
#
# They are counted over restarts, anew at midnight UTC.
#
# A peer that has used them up does as if paused by its person: it says farewell, trains on, follows by what it
# receives, and asks to be let in again the next day. It does not stay as a voter that contributes nothing, because
# every round would wait for its contribution until the deadline, and a reduce would give it a part to send. The last 5
# % are for that: for what still leaves when the others have contributions of it on their way, for leases, and for
# helping those behind. When those are gone, too, no frame or chunk is sent any more; leases and farewells are, and are
# all that can exceed the limit.

UPLOAD_FILE = "upload.json"
RESERVE = 0.05  # of the limit, for what is not a contribution
SAVE_EVERY = 10.0  # s: what a crash forgets
DAY = 86_400  # s


class DailyUpload:
    """At most ``limit`` bytes a day, kept in ``folder``; None: no limit yet, and nothing is kept.

    ``wall`` tells seconds since 1970, UTC.
    """

    def __init__(
        self, folder: Path, limit: int | None, *, wall: Callable[[], float] = time.time, disk: Disk = DISK
    ) -> None:
        self.limit = check_limit(limit)
        self._path, self._wall, self._disk = folder / UPLOAD_FILE, wall, disk
        self._counted = 0  # of this process
        self._saved_at = float("-inf")
        self._day, self._sent = self._load()

    @property
    def sent(self) -> int:
        """Bytes sent today."""
        return self._sent if self._day == self._today() else 0

    @property
    def used_up(self) -> bool:
        """True where nothing should be contributed any more today."""
        return self.limit is not None and self.sent >= (1 - RESERVE) * self.limit

    @property
    def may_upload(self) -> bool:
        """True while others may still be helped."""
        return self.limit is None or self.sent < self.limit

    def count(self, total: int) -> None:
        """This process has sent ``total`` bytes so far."""
        today = self._today()
        if self._day != today:  # also when the clock was set back: the one who sets it is the one who pays
            self._day, self._sent = today, 0
        self._sent += total - self._counted
        self._counted = total

    @property
    def is_due(self) -> bool:
        """True where it should be saved now."""
        return self.limit is not None and abs(self._wall() - self._saved_at) >= SAVE_EVERY

    def save(self) -> None:
        """Make the count durable. Raises DiskError."""
        self._saved_at = self._wall()
        text = json.dumps({"version": 1, "day": self._day, "sent": self._sent})
        with disk_errors(f"writing {self._path}"):
            self._disk.make_folders(self._path.parent)
            self._disk.replace_file(self._path, [text.encode()])

    def _today(self) -> int:
        return int(self._wall() // DAY)

    def _load(self) -> tuple[int, int]:
        """Read what an earlier process counted; a damaged file counts as a day that begins."""
        try:
            found = json.loads(self._path.read_text(encoding="utf-8"))
            day, sent = found["day"], found["sent"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return self._today(), 0
        whole = isinstance(day, int) and isinstance(sent, int) and sent >= 0
        return (day, sent) if whole else (self._today(), 0)


def check_limit(limit: int | None) -> int | None:
    """A limit that can be kept. Raises ConfigError."""
    if limit is not None and limit < 1:
        raise ConfigError(f"daily_upload={limit}: at least a byte; leave it out for no limit")
    return limit


# ---- reasons to rest ----
#
# A peer contributes and votes no more for now because a person paused it, or because the day's upload is used up. It
# says farewell, so that nobody waits for it; when the last reason is gone it asks to be let in again.

PAUSED, UPLOAD = "paused", "upload"
LOOK_EVERY = 0.25  # s between looks at what was sent today


class Suspension:
    """The reasons of one peer; none: it takes part."""

    def __init__(
        self, membership: Membership, on_event: Callable[[str, dict[str, object]], None], offload: Offload
    ) -> None:
        self.reasons: set[str] = set()
        self._turn = anyio.Lock()
        self._told = False  # a farewell, since this peer was let in
        self._membership, self._on_event, self._offload = membership, on_event, offload

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
            if rests == self._told or not self._membership.state.running:
                return
            self._told = rests
            if rests:
                await self._membership.say_goodbye()
            else:
                self._membership.come_back()

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
