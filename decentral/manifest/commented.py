"""From tables to the commented file: one line per key, its description beside it."""

from __future__ import annotations

import json
from typing import Any

from decentral.manifest.table import Table, inside, plain

_COMMENT_COLUMN = 32


def to_toml(whole: Table) -> str:
    """One table after the other, one comment per key; unset keys are commented out with an example."""
    head = "# The terms of one run. All peers must have the same: the digest of these values is the run's id.\n"
    return head + "".join(_table(name, getattr(whole, name)) for name in type(whole).model_fields)


def toml_value(value: object) -> str:
    """As TOML writes it; every string here is ASCII without control characters, so JSON's quotes serve."""
    return "unset" if value is None else json.dumps(value)


def _table(name: str, part: Table) -> str:
    lines, tables = [f"\n[{name}]  # {_first_sentence(part)}"], inside(part)
    for key, field in type(part).model_fields.items():
        if key not in tables:
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
