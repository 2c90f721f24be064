"""Rates and sizes as people write them: ``20mbit``, ``2MB/s``, ``50GB``. Decimal, as links are sold.

Pure: the command line and ``decentral.join`` read the same spellings by it.
"""

import math
import re
from collections.abc import Callable
from typing import TypeVar

from decentral.errors import ConfigError

Read = TypeVar("Read", int, float)

RATE_HINT = "write it as 20mbit or 2.5MB/s"
SIZE_HINT = "write it as 50GB or 800MB"

_SIZES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_NUMBER = r"(\d+(?:\.\d+)?|\.\d+)\s*"
_BITS = re.compile(_NUMBER + r"([kmg])bit(?:/s)?", re.IGNORECASE)
_BYTES_PER_SECOND = re.compile(_NUMBER + r"([kKMG])B/s")  # a small b is a bit to some people: refused
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
