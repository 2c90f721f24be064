"""The preferences of a volunteer, and which of them stand against training now.

Pure: the machine is looked at elsewhere.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, time, timedelta
from typing import Any, Literal

from decentral.errors import ConfigError, UsageError
from decentral.quantities import parse_rate, parse_share, parse_size

# ---- hours of the day ----
#
# In which a machine may train: ``22:00-07:00``, several with commas between, local time.

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
        """Tell whether ``at``, local time, lies in one of them."""
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


# ---- the preferences of one peer ----

IN_USE = 180.0  # s since a key was pressed for which a machine is in use; BOINC's default
LEAST_MEMORY = 100_000_000  # bytes: Python with torch takes more before there is a model
BUSY = 0.25  # share of the processors that other programs may take before the machine is in use; BOINC's default


@dataclass(frozen=True, slots=True, kw_only=True)
class Preferences:
    """The preferences of a peer; the defaults let it train at all times. Sizes in bytes, rates in bytes per second."""

    schedule: Hours = ALWAYS
    on_battery: Literal["train", "pause"] = "train"
    only_when_idle: bool = False
    max_memory: int | None = None  # of this process; a peer that holds more leaves
    threads: int | None = None  # that torch computes with; None: as torch chooses
    max_compute: float | None = None  # share of the time that it computes, in (0, 1]; it rests after each step
    max_upload: float | None = None
    max_download: float | None = None
    daily_upload: int | None = None
    max_writes: int | None = None  # a day, to the disk


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """The machine as it is now; None where this system does not tell."""

    on_battery: bool | None = None
    unused_seconds: float | None = None  # since a person last typed at it
    others_share: float | None = None  # of all its processors, taken by other programs


def reasons_to_wait(wanted: Preferences, seen: Seen, now: datetime) -> tuple[str, ...]:
    """Why a peer with these preferences does not train at ``now``, in words; none: it may."""
    reasons = []
    if not wanted.schedule.are_open(now):
        reasons.append(f"outside its hours until {wanted.schedule.next_opening(now):%H:%M}")
    if wanted.on_battery == "pause" and seen.on_battery:
        reasons.append("on battery until there is mains power")
    if wanted.only_when_idle and seen.unused_seconds is not None and seen.unused_seconds < IN_USE:
        reasons.append(f"somebody uses this machine; until nobody has for {IN_USE / 60:.0f} min")
    elif wanted.only_when_idle and seen.others_share is not None and seen.others_share > BUSY:
        reasons.append(f"other programs take {seen.others_share:.0%} of the processors; until it is {BUSY:.0%} at most")
    return tuple(reasons)


def with_setting(before: Preferences, key: str, text: str) -> Preferences:
    """``before`` with one setting as a person writes it: ``max-upload``, ``5mbit``; ``none`` lifts a limit.

    Raises UsageError for a setting that there is not, ConfigError for a value that cannot be read.
    """
    name, read = setting(key)
    return replace(before, **{name: read(text)})


def spell(wanted: Preferences) -> dict[str, str]:
    """Write what differs from the defaults as a person does; rates and a day's bytes have fields of their own."""
    said = {
        "schedule": str(wanted.schedule),
        "on-battery": wanted.on_battery,
        "only-when-idle": "on" if wanted.only_when_idle else "off",
        "max-memory": "none" if wanted.max_memory is None else f"{wanted.max_memory / 1e6:g}MB",
        "threads": "none" if wanted.threads is None else str(wanted.threads),
        "max-compute": "none" if wanted.max_compute is None else f"{wanted.max_compute:.0%}",
    }
    usual = {"schedule": "always", "on-battery": "train", "only-when-idle": "off"}
    return {key: value for key, value in said.items() if value != usual.get(key, "none")}


def setting(key: str) -> tuple[str, Callable[[str], Any]]:
    """The field that ``key`` names, and what reads its value. Raises UsageError, which names the known ones."""
    if key not in _READ:
        raise UsageError(f"setting {key!r}: unknown; one of {', '.join(_READ)}")
    return key.replace("-", "_"), _READ[key]


def _or_none(read: Callable[[str], Any]) -> Callable[[str], Any]:
    return lambda text: None if text.strip().lower() == "none" else read(text)


def _choice(**known: Any) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        if text.strip().lower() not in known:
            raise ConfigError(f"{text[:40]!r}: one of {', '.join(known)}")
        return known[text.strip().lower()]

    return read


def _threads(text: str) -> int:
    if not text.strip().isdecimal() or not 1 <= int(text) <= 1024:
        raise ConfigError(f"{text[:40]!r} is no number of threads; write 1 or more, or none for torch's choice")
    return int(text)


def _memory(text: str) -> int:
    if (nbytes := parse_size(text)) < LEAST_MEMORY:
        raise ConfigError(
            f"{text[:40]!r} is less than a peer holds before its model; write {LEAST_MEMORY / 1e6:g}MB or more"
        )
    return nbytes


_READ: Mapping[str, Callable[[str], Any]] = {
    "max-upload": _or_none(parse_rate),
    "max-download": _or_none(parse_rate),
    "daily-upload": _or_none(parse_size),
    "max-writes": _or_none(parse_size),
    "threads": _or_none(_threads),
    "max-memory": _or_none(_memory),
    "max-compute": _or_none(parse_share),
    "schedule": lambda text: ALWAYS if text.strip().lower() == "none" else Hours.parse(text),
    "on-battery": _choice(train="train", pause="pause", none="train"),
    "only-when-idle": _choice(on=True, off=False, none=False),
}
SETTINGS = tuple(_READ)


# ---- rest after each inner step ----
#
# So that a machine computes for a share of the time only: less power, heat and noise.
#
# BOINC's "use at most so much of the CPU time". A limit in watts is the driver's, for all programs of a machine, and
# asks for an administrator (``nvidia-smi -pl``); this one is a peer's own, on every device.

_LONG = 3.0  # times the usual step: what takes longer was a pause, or an evaluation, and earns no longer rest
_FORGET = 0.2  # weight of the newest step in what is usual


class Duty:
    """``share`` of the time is computed; 1: no rest. Any thread may set it, the training thread rests."""

    def __init__(self, clock: Callable[[], float], settle: Callable[[], None]) -> None:
        """``settle`` returns once the device has done all that it was given: its work is no rest."""
        self.share = 1.0
        self._clock, self._settle = clock, settle
        self._began: float | None = None  # when it last went on computing
        self._usual: float | None = None  # s of a step

    def seconds_to_rest(self) -> float:
        """Return for how long to rest, now that a step is over."""
        if self.share >= 1.0 or self._began is None:
            return 0.0
        self._settle()
        took = self._clock() - self._began
        if self._usual is not None:
            took = min(took, _LONG * self._usual)
        self._usual = took if self._usual is None else self._usual + _FORGET * (took - self._usual)
        return took * (1.0 / self.share - 1.0)

    def goes_on(self) -> None:
        """The next step begins now."""
        self._began = self._clock()
