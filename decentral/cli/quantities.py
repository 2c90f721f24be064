"""Rates, sizes, times and counts as options of commands; how they are written is in ``decentral.quantities``."""

import click

from decentral.errors import ConfigError
from decentral.preferences.preferences import Hours
from decentral.quantities import parse_count, parse_rate, parse_seconds, parse_share, parse_size


class Rate(click.ParamType):  # type: ignore[type-arg]  # generic in newer clicks only
    """Bytes per second."""

    name = "rate"

    def convert(self, value: object, parameter: click.Parameter | None, context: click.Context | None) -> float:
        """Read it; a usage error that shows how it is written."""
        from decentral.transport.throttle import LEAST_CAP

        if isinstance(value, float):
            return value
        try:
            rate = parse_rate(str(value))
        except ConfigError as error:
            self.fail(str(error), parameter, context)
        if rate < LEAST_CAP:
            self.fail(
                f"{str(value).strip()!r} is too little: other peers would take this one for dead; 263kbit is the least",
                parameter,
                context,
            )
        return rate


class Size(click.ParamType):  # type: ignore[type-arg]  # generic in newer clicks only
    """Bytes."""

    name = "size"

    def __init__(self, *, least: int = 0) -> None:
        self._least = least

    def convert(self, value: object, parameter: click.Parameter | None, context: click.Context | None) -> int:
        """Read it; a usage error that shows how it is written."""
        if isinstance(value, int):
            return value
        try:
            found = parse_size(str(value))
        except ConfigError as error:
            self.fail(str(error), parameter, context)
        if found < self._least:
            self.fail(f"{value!r} is less than a peer holds; write {self._least / 1e6:g}MB or more", parameter, context)
        return found


class Duration(click.ParamType):  # type: ignore[type-arg]  # as above
    """Seconds."""

    name = "time"

    def convert(self, value: object, parameter: click.Parameter | None, context: click.Context | None) -> float:
        """Read it; a usage error that shows how it is written."""
        if isinstance(value, float):
            return value
        try:
            return parse_seconds(str(value))
        except ConfigError as error:
            self.fail(str(error), parameter, context)


class Share(click.ParamType):  # type: ignore[type-arg]  # as above
    """A share of one."""

    name = "share"

    def convert(self, value: object, parameter: click.Parameter | None, context: click.Context | None) -> float:
        """Read it; a usage error that shows how it is written."""
        if isinstance(value, float):
            return value
        try:
            return parse_share(str(value))
        except ConfigError as error:
            self.fail(str(error), parameter, context)


class HoursOfDay(click.ParamType):  # type: ignore[type-arg]  # as above
    """Hours in which a machine may train."""

    name = "hours"

    def convert(self, value: object, parameter: click.Parameter | None, context: click.Context | None) -> Hours:
        """Read them; a usage error that shows how they are written."""
        if isinstance(value, Hours):
            return value
        try:
            return Hours.parse(str(value))
        except ConfigError as error:
            self.fail(str(error), parameter, context)


class ModelSize(click.ParamType):  # type: ignore[type-arg]  # as above
    """How many parameters a model has."""

    name = "count"

    def convert(self, value: object, parameter: click.Parameter | None, context: click.Context | None) -> int:
        """Read it; a usage error that shows how it is written."""
        if isinstance(value, int):
            return value
        try:
            return parse_count(str(value))
        except ConfigError as error:
            self.fail(str(error), parameter, context)
