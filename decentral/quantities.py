"""Rates, sizes, times, counts, shares as people write them: ``20mbit``, ``2MB/s``, ``50GB``, ``0.4s``, ``30M``, ``7%``.

Pure: the command line and ``decentral.join`` read the same spellings by it.
"""

import math
import re
import time
from collections.abc import Callable
from typing import TypeVar

from decentral.errors import ConfigError

Read = TypeVar("Read", int, float)

RATE_HINT = "write it as 20mbit or 2.5MB/s, or as 900kbit or 1gbit"
SIZE_HINT = "write it as 50GB or 800MB"
SECONDS_HINT = "write it as 0.4s or 400ms, 30min or 2h"
SHARE_HINT = "write it as 70%, from 5% to 100%"
COUNT_HINT = "write it as 30M, 1.5B or 635776"

_SIZES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_NUMBER = r"(\d+(?:\.\d+)?|\.\d+)\s*"
_BITS = re.compile(_NUMBER + r"([kmg])bit(?:/s)?", re.IGNORECASE)
_BYTES_PER_SECOND = re.compile(_NUMBER + r"([kKMG])B/s")  # a small b is a bit to some people: refused
_SECONDS = re.compile(_NUMBER + r"(ms|s|min|h)")
_SHARE = re.compile(_NUMBER + "%")
_LEAST_SHARE = 0.05
_COUNT = re.compile(_NUMBER + r"([kKMBG]?)")  # a small m may be a thousandth: refused
_UNITS = {"ms": 0.001, "s": 1.0, "min": 60.0, "h": 3600.0}
_COUNTS = {"": 1, "k": 10**3, "M": 10**6, "B": 10**9, "G": 10**9}
_BYTES = re.compile(_NUMBER + r"([kmgt])b", re.IGNORECASE)


def parse_rate(text: str) -> float:
    """Bytes per second of ``5mbit`` or ``2.5MB/s``. Raises ConfigError, which shows how a rate is written."""
    text = text.strip()
    if found := _BITS.fullmatch(text):
        return float(found[1]) * _SIZES[found[2].lower()] / 8
    if found := _BYTES_PER_SECOND.fullmatch(text):
        return float(found[1]) * _SIZES[found[2].lower()]
    raise ConfigError(f"{text[:40]!r} is no rate; {RATE_HINT}")


def parse_size(text: str) -> int:
    """Bytes of ``50GB`` or ``800MB``. Raises ConfigError, which shows how a size is written."""
    text = text.strip()
    found = _BYTES.fullmatch(text)
    if found is None or not float(found[1]):
        raise ConfigError(f"{text[:40]!r} is no size; {SIZE_HINT}")
    return round(float(found[1]) * _SIZES[found[2].lower()])


def parse_seconds(text: str) -> float:
    """Seconds of ``0.4s``, ``400ms``, ``2min`` or ``2h``. Raises ConfigError, which shows how a time is written."""
    found = _SECONDS.fullmatch(text.strip())
    if found is None or not float(found[1]):
        raise ConfigError(f"{text.strip()[:40]!r} is no time; {SECONDS_HINT}")
    return float(found[1]) * _UNITS[found[2]]


def parse_share(text: str) -> float:
    """0.7 of ``70%``. Raises ConfigError, which shows how a share is written."""
    found = _SHARE.fullmatch(text.strip())
    if found is None or not _LEAST_SHARE <= float(found[1]) / 100 <= 1:
        raise ConfigError(f"{text.strip()[:40]!r} is no share; {SHARE_HINT}")
    return float(found[1]) / 100


def parse_count(text: str) -> int:
    """How many ``30M`` or ``1.5B`` are. Raises ConfigError, which shows how a number is written."""
    found = _COUNT.fullmatch(text.strip())
    if found is None or not float(found[1]):
        raise ConfigError(f"{text.strip()[:40]!r} is no number of parameters; {COUNT_HINT}")
    return round(float(found[1]) * _COUNTS[found[2].replace("K", "k")])


def rate_of(given: object, argument: str) -> float | None:
    """Bytes per second of what a caller of ``join`` passed: a spelling, a number, or None. Raises ConfigError."""
    if given is None:
        return None
    way_out = f"give bytes per second as a number, or {RATE_HINT}"
    return _in_call(parse_rate, given, argument) if isinstance(given, str) else _number(given, argument, way_out)


def size_of(given: object, argument: str) -> int | None:
    """Bytes of what a caller of ``join`` passed: a spelling, a number, or None. Raises ConfigError."""
    if given is None:
        return None
    way_out = f"give bytes as a number, or {SIZE_HINT}"
    return _in_call(parse_size, given, argument) if isinstance(given, str) else int(_number(given, argument, way_out))


def _in_call(parse: Callable[[str], Read], given: str, argument: str) -> Read:
    try:
        return parse(given)
    except ConfigError as error:
        raise ConfigError(f"join({argument}={given[:40]!r}): {error}") from None


def _number(given: object, argument: str, way_out: str) -> float:
    """A positive number; a bool is none, and neither is NaN: what compares with nothing caps nothing."""
    if isinstance(given, int | float) and not isinstance(given, bool) and math.isfinite(given) and given > 0:
        return given
    raise ConfigError(f"join({argument}={given!r:.40}): {way_out}; leave it out for no limit")


# ---- moments on the monotonic clock ----
#
# Until when somebody waits who said for how long.


def moment_in(seconds: float | None) -> float | None:
    """The moment ``seconds`` from now; None: never."""
    return None if seconds is None else time.monotonic() + seconds


def time_left(until: float | None) -> float | None:
    """Seconds until a moment, 0 when it has passed; None: for ever."""
    return None if until is None else max(0.0, until - time.monotonic())
