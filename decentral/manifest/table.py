"""Tables of a manifest: their base, kinds and checks of values, the spelling that is hashed, and the commented file."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from typing import Annotated, Any, TypeVar, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, ValidationError
from pydantic_core import ErrorDetails

from decentral.errors import ConfigError
from decentral.plugins import nearest

__all__ = [
    "Count",
    "Decay",
    "Label",
    "NotNegative",
    "PartShare",
    "Positive",
    "Salt",
    "Seconds",
    "Share",
    "Size",
    "Spelling",
    "Steps",
    "Table",
    "TextDigest",
    "Url",
    "Word",
    "canonical",
    "check_model",
    "check_tables",
    "explain",
    "inside",
    "keys",
    "one_line",
    "plain",
    "to_toml",
    "toml_value",
]

# ---- the base of every table, and its one spelling ----


class Table(BaseModel):
    """Strict and frozen: an unknown key is an error, a string is never taken for a number.

    A key that may be unset is unset by default: TOML has no word for it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    def __setattr__(self, name: str, value: object) -> None:
        if name in self.__private_attributes__:  # no part of what peers agree on
            super().__setattr__(name, value)
            return
        raise ConfigError(
            f"{name} = {_value(value)}: a manifest is frozen, as all peers of a run have the same; make another one: "
            "manifest.changed(run={'rounds': 10})"
        )

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


# ---- kinds of values ----
#
# Their bounds are checked before anything is made of them.


def _canonical_spaces(spelling: str) -> str:
    """Write chains that differ in spaces only alike: as ``str(compressor)`` does."""
    return re.sub(r"\s", "", spelling).replace(">>", " >> ").replace(",", ", ")


Word = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]  # safe as a folder's name
Salt = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9-]{0,64}$")]
Label = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9 ._:/-]{0,127}$")]
TextDigest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Url = Annotated[str, StringConstraints(pattern=r"^https://[A-Za-z0-9][A-Za-z0-9._~:/?#!$&()*+,;=%-]{2,1000}$")]
Spelling = Annotated[
    str,
    StringConstraints(pattern=r"^[A-Za-z0-9_(),.=>+ -]{1,256}$"),
    AfterValidator(_canonical_spaces),
]
Count = Annotated[int, Field(ge=1, lt=2**31)]
Size = Annotated[int, Field(ge=1, le=2**20)]
Steps = Annotated[int, Field(ge=0, lt=2**31)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
PartShare = Annotated[float, Field(gt=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
Seconds = Annotated[float, Field(gt=0, le=30 * 86400)]


# ---- values against their tables' rules ----
#
# An error comes out as one line: where, what, the rule, the way out.

Whole = TypeVar("Whole", bound=Table)


def check_model(model: type[Whole], tables: Mapping[str, object], source: str) -> Whole:
    """These tables as a ``model``. Raises ConfigError naming the first thing that is wrong."""
    check_tables({source: tables}, "its tables by their names")
    try:
        return model.model_validate(tables, context={"source": source})
    except ValidationError as error:
        raise explain(error, model, source) from None


def check_tables(given: Mapping[str, object], wanted: str) -> None:
    """ConfigError, by its name, for what is given in the place of a mapping."""
    for name, value in given.items():
        if not isinstance(value, Mapping):
            raise ConfigError(f"{name} = {_value(value)}: a {type(value).__name__}; give {wanted}, as a dict")


def explain(error: ValidationError, model: type[Table], source: str) -> ConfigError:
    """An error of pydantic in one line: where, what, the rule."""
    # a misspelt name first: what it was to be is missing because of it
    found = sorted(error.errors(include_url=False), key=lambda one: one["type"] != "extra_forbidden")
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    return ConfigError(f"{source}: {_explain(found[0], model)}{more}")


def _explain(error: ErrorDetails, model: type[Table]) -> str:
    """Turn an error of pydantic's into one line."""
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
    """Show what a stranger wrote, on one line."""
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


# ---- the commented file ----
#
# One line per key, its description beside it.

_COMMENT_COLUMN = 32


def to_toml(whole: Table, without: Collection[tuple[str, str]] = ()) -> str:
    """Write one table after the other, a comment per key; unset keys are commented out with an example. ``without``:
    keys that are left out, each with its table.
    """
    head = "# The terms of one run. All peers must have the same: the digest of these values is the run's id.\n"
    left_out = {name: {key for table, key in without if table == name} for name in type(whole).model_fields}
    return head + "".join(_table(name, getattr(whole, name), left_out[name]) for name in type(whole).model_fields)


def toml_value(value: object) -> str:
    """As TOML writes it; every string here is ASCII without control characters, so JSON's quotes serve."""
    return "unset" if value is None else json.dumps(value)


def _table(name: str, part: Table, left_out: Collection[str] = ()) -> str:
    lines, tables = [f"\n[{name}]  # {_first_sentence(part)}"], inside(part)
    for key, field in type(part).model_fields.items():
        if key not in tables and key not in left_out:
            lines.append(_line(key, plain(part, key), field.examples, field.description or ""))
    mine = "\n".join(lines + _own_lines(part)) + "\n"
    return mine + "".join(_table(f"{name}.{key}", table) for key, table in tables.items())


def _own_lines(part: Table) -> list[str]:
    """Keys beside the declared ones, set or not: what is unset has its default. What nobody explains comes last."""
    given, told = part.model_extra or {}, part.own_keys()
    lines = [_line(key, given.get(key), [default], meaning) for key, default, meaning in told]
    rest = sorted(given.keys() - {key for key, _, _ in told})
    return lines + [_line(key, given[key], None, "the method's own") for key in rest]


def _line(key: str, value: object, examples: list[Any] | None, meaning: str) -> str:  # Any: values of every TOML type
    example = examples[0] if value is None and examples else None
    if isinstance(example, dict):  # a table inside that is unset: its first key
        ((first, example),) = example.items()
        key = f"{key}.{first}"
    shown = value if example is None else example
    line = f"{'# ' if value is None else ''}{key} = {toml_value(shown)}"
    return f"{line:<{_COMMENT_COLUMN}}  # {meaning}"


def _first_sentence(part: Table) -> str:
    return (type(part).__doc__ or "").split(".")[0].strip().lower()
