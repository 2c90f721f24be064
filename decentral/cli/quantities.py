"""Rates and sizes as people write them: ``20mbit``, ``2MB/s``, ``50GB``. Decimal, as links are sold."""

import re

import click

_SIZES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_NUMBER = r"(\d+(?:\.\d+)?|\.\d+)\s*"
_BITS = re.compile(_NUMBER + r"([kmg])bit(?:/s)?", re.IGNORECASE)
_BYTES_PER_SECOND = re.compile(_NUMBER + r"([kKMG])B/s")  # a small b is a bit to some people: refused
_BYTES = re.compile(_NUMBER + r"([kmgt])b", re.IGNORECASE)


class Rate(click.ParamType):  # type: ignore[type-arg]  # generic in newer clicks only
    """Bytes per second."""

    name = "rate"

    def convert(self, value: object, parameter: click.Parameter | None, context: click.Context | None) -> float:
        """Read it; a usage error that shows how it is written."""
        from decentral.transport.throttle import LEAST_CAP

        text = str(value).strip()
        if isinstance(value, float):
            return value
        if found := _BITS.fullmatch(text):
            rate = float(found[1]) * _SIZES[found[2].lower()] / 8
        elif found := _BYTES_PER_SECOND.fullmatch(text):
            rate = float(found[1]) * _SIZES[found[2].lower()]
        else:
            self.fail(f"{text!r} is no rate; write it as 20mbit or 2.5MB/s", parameter, context)
        if rate < LEAST_CAP:
            self.fail(
                f"{text!r} is too little: other peers would take this one for dead; 263kbit is the least",
                parameter,
                context,
            )
        return rate


class Size(click.ParamType):  # type: ignore[type-arg]  # generic in newer clicks only
    """Bytes."""

    name = "size"

    def convert(self, value: object, parameter: click.Parameter | None, context: click.Context | None) -> int:
        """Read it; a usage error that shows how it is written."""
        text = str(value).strip()
        if isinstance(value, int):
            return value
        found = _BYTES.fullmatch(text)
        if found is None or not float(found[1]):
            self.fail(f"{text!r} is no size; write it as 50GB or 800MB", parameter, context)
        return round(float(found[1]) * _SIZES[found[2].lower()])
