"""Hours of the day in which a machine may train: ``22:00-07:00``, several with commas between, local time."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime, time, timedelta

from decentral.errors import ConfigError

_SPAN = re.compile(r"(\d{1,2}):(\d{2})-(\d{1,2}):(\d{2})")
_HINT = "write 22:00-07:00, or 12:00-13:30,22:00-07:00, or always"
_DAY = 24 * 60  # minutes


@dataclass(frozen=True, slots=True)
class Hours:
    """Spans of minutes since midnight, each [begin, end); one that ends before it begins goes over midnight."""

    spans: tuple[tuple[int, int], ...] = ()  # none: always

    @classmethod
    def parse(cls, text: str) -> Hours:
        """Raises ConfigError, which shows how hours are written."""
        if text.strip().lower() == "always":
            return cls()
        return cls(tuple(_span(part.strip()) for part in text.split(",")))

    def __str__(self) -> str:
        return ",".join(f"{_clock(begin)}-{_clock(end)}" for begin, end in self.spans) or "always"

    def are_open(self, at: datetime) -> bool:
        """Whether ``at``, local time, lies in one of them."""
        minute = at.hour * 60 + at.minute
        return not self.spans or any((minute - begin) % _DAY < (end - begin) % _DAY for begin, end in self.spans)

    def next_opening(self, at: datetime) -> datetime:
        """When the next span begins, strictly after ``at``; ``at`` itself for ``always``."""
        if not self.spans:
            return at
        today = datetime.combine(at.date(), time(), tzinfo=at.tzinfo)
        days = (today, today + timedelta(days=1))
        return min(day + timedelta(minutes=begin) for day in days for begin, _ in self.spans if _after(day, begin, at))


ALWAYS = Hours()


def _after(day: datetime, begin: int, at: datetime) -> bool:
    return day + timedelta(minutes=begin) > at


def _span(text: str) -> tuple[int, int]:
    found = _SPAN.fullmatch(text)
    if found is None:
        raise ConfigError(f"{text[:40]!r} are no hours; {_HINT}")
    begin, end = _minute(found[1], found[2]), _minute(found[3], found[4])
    if begin == end:
        raise ConfigError(f"{text[:40]!r} begins when it ends; {_HINT}")
    return begin, end


def _minute(hour: str, minute: str) -> int:
    total = int(hour) * 60 + int(minute)
    if int(minute) >= 60 or total > _DAY:
        raise ConfigError(f"'{hour}:{minute}' is no time of day; {_HINT}")
    return total % _DAY


def _clock(minute: int) -> str:
    return f"{minute // 60:02d}:{minute % 60:02d}"
