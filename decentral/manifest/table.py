"""What every table of a manifest is, and the one spelling of its values that is hashed."""

from __future__ import annotations

import json
from typing import Any

from pydantic import BaseModel, ConfigDict


class Table(BaseModel):
    """Strict and frozen: an unknown key is an error, a string is never taken for a number.

    A key that may be unset is unset by default: TOML has no word for it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    def own_keys(self) -> list[tuple[str, Any, str]]:  # Any: values of every TOML type
        """Keys beside the declared ones that such a table may have: name, default, meaning."""
        return []


def canonical(whole: Table) -> bytes:
    """The one spelling that is hashed: sorted keys, unset keys left out, every float as its shortest decimal."""
    tables = {name: _values(getattr(whole, name)) for name in type(whole).model_fields}
    return json.dumps(tables, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")


def _values(part: Table) -> dict[str, object]:
    """The keys that are set, a table inside as one of its own."""
    found: dict[str, object] = {key: plain(part, key) for key in keys(part) if plain(part, key) is not None}
    return found | {key: _values(table) for key, table in inside(part).items()}


def inside(part: Table) -> dict[str, Table]:
    """The tables inside a table, by key, those that are set."""
    found = {key: getattr(part, key) for key in type(part).model_fields}
    return {key: value for key, value in found.items() if isinstance(value, Table)}


def keys(part: Table) -> list[str]:
    """The keys of a table: the declared ones, then those of the method that it names. Without the tables inside."""
    declared = [key for key in type(part).model_fields if key not in inside(part)]
    return [*declared, *sorted(part.model_extra or {})]


def plain(part: Table, key: str) -> str | int | float | None:
    """A key's value; a whole number where a float belongs, and a minus zero, get the float's one spelling."""
    field = type(part).model_fields.get(key)  # None: a method's own; a number is a float there
    value: str | int | float | None  # not by getattr: such a key may be called as an attribute of every table
    value = (part.model_extra or {})[key] if field is None else getattr(part, key)
    if isinstance(value, int) and (field is None or "float" in str(field.annotation)):
        value = float(value)
    return value + 0.0 if isinstance(value, float) else value
