"""Values against the rules of their tables. What is wrong comes out as one line: where, what, the rule, the way out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar, get_args

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from decentral.errors import ConfigError
from decentral.manifest.table import Table
from decentral.plugins import nearest

Whole = TypeVar("Whole", bound=Table)


def checked(model: type[Whole], tables: Mapping[str, Any], source: str) -> Whole:  # Any: values of every TOML type
    """These tables as a ``model``. Raises ConfigError naming the first thing that is wrong."""
    try:
        return model.model_validate(tables)
    except ValidationError as error:
        # a misspelt name first: what it was to be is missing because of it
        found = sorted(error.errors(include_url=False), key=lambda one: one["type"] != "extra_forbidden")
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        raise ConfigError(f"{source}: {_explained(found[0], model)}{more}") from None


def _explained(error: ErrorDetails, model: type[Table]) -> str:
    """One line for one of pydantic's errors."""
    place = [str(step)[:40] for step in error["loc"]]
    where, kind = _shown(".".join(place)), error["type"]
    table = _table_of(place, model)
    names = list(table.model_fields)
    if kind == "extra_forbidden":
        what = "table" if len(place) == 1 else "key"
        return f"unknown {what} {where}; {nearest(place[-1], names)}"
    if kind == "value_error":
        inside = f"{where}: " if where else ""
        return inside + one_line(error["msg"].removeprefix("Value error, "))
    meaning = table.model_fields[place[-1]].description if place[-1] in names else None
    means = f"; {place[-1]} means: {meaning}" if meaning else ""
    if kind == "missing":
        return f"{where} is missing{means or '; add the table [' + where + ']'}"
    if kind == "string_pattern_mismatch":
        return f"{where} = {_value(error['input'])}: has characters that do not belong, or too many{means}"
    rule = one_line(error["msg"])
    return f"{where} = {_value(error['input'])}: {rule[:1].lower()}{rule[1:]}{means}"


def _table_of(place: list[str], model: type[Table]) -> type[Table]:
    """The table that holds the key at ``place``."""
    field = model.model_fields.get(place[0]) if len(place) > 1 else None
    if field is None:
        return model
    inner = [one for one in (field.annotation, *get_args(field.annotation)) if isinstance(one, type)]
    tables = [one for one in inner if issubclass(one, Table)]
    return _table_of(place[1:], tables[0]) if tables else model


def _value(found: object) -> str:
    """What a stranger wrote, on one line."""
    try:
        return _shown(repr(found))
    except (RecursionError, ValueError):  # tables 1000 deep, numbers of 5000 digits
        return f"{type(found).__name__} too large to show"


def _shown(text: str, limit: int = 60) -> str:
    """A stranger's text on one line, without control characters, cut."""
    shown = "".join(c if c.isascii() and c.isprintable() else "?" for c in text)
    return shown if len(shown) <= limit else shown[: limit - 3] + "..."


def one_line(error: object) -> str:
    """An error's text on one line, cut."""
    return _shown(" ".join(str(error).split()), 240)
