"""From text to a checked manifest. Whatever is wrong comes out as one line: where, what, the rule, the way out."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from decentral.errors import ConfigError
from decentral.manifest.terms import Manifest, Table

MAX_NBYTES = 64 * 1024  # ours take 3 kB; the text may come from a peer
MAX_DOTS = 64  # in a line: the parser's time grows with the square of a dotted key, 20 s for one of 30,000 words


def load_manifest(path: str | Path) -> Manifest:
    """The manifest in a file, with its method and compressor checked (imports torch). Raises ConfigError."""
    from decentral.manifest.presets import check_methods  # presets needs this module

    path = Path(path)
    try:
        with path.open("rb") as file:
            data = file.read(MAX_NBYTES + 1)
        text = data.decode("utf-8-sig")
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(f"{path}: cannot be read ({reason}); write one with: decentral init {path}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text (byte {error.start}); a manifest is a TOML file") from error
    manifest = parse_manifest(text, source=str(path))
    try:
        check_methods(manifest)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    return manifest


def parse_manifest(text: str, source: str = "manifest") -> Manifest:
    """The manifest of a text; method and compressor are checked by ``check_methods``. Raises ConfigError."""
    if len(text) > MAX_NBYTES:
        raise ConfigError(f"{source}: longer than {MAX_NBYTES} bytes; a manifest is a short TOML file")
    if any(line.count(".") > MAX_DOTS for line in text.split("\n")):
        raise ConfigError(f"{source}: a line has more than {MAX_DOTS} dots; no key of ours is nested that deep")
    try:
        tables = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # ValueError: its syntax error, and numbers of 5000 digits
        reason = _one_line(error) if isinstance(error, ValueError) else "nested too deeply"
        raise ConfigError(f"{source}: not TOML: {reason}; correct that place") from None
    return checked(tables, source)


def checked(tables: Mapping[str, Any], source: str) -> Manifest:  # Any: values of every TOML type
    """The manifest of these tables. Raises ConfigError naming the first thing that is wrong."""
    try:
        return Manifest.model_validate(tables)
    except ValidationError as error:
        found = error.errors(include_url=False)
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        raise ConfigError(f"{source}: {_explained(found[0])}{more}") from None


def nearest(word: str, names: list[str]) -> str:
    """A hint for a name that does not exist: the nearest one, or all."""
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.5)
    return f"did you mean {close[0]}?" if close else f"known: {', '.join(names)}"


def _explained(error: ErrorDetails) -> str:
    """One line for one of pydantic's errors."""
    place = [str(step)[:40] for step in error["loc"]]
    where, kind = _shown(".".join(place)), error["type"]
    table = _table_of(place)
    names = list(table.model_fields)
    if kind == "extra_forbidden":
        what = "table" if len(place) == 1 else "key"
        return f"unknown {what} {where}; {nearest(place[-1], names)}"
    if kind == "value_error":
        inside = f"{where}: " if where else ""
        return inside + _one_line(error["msg"].removeprefix("Value error, "))
    meaning = table.model_fields[place[-1]].description if place[-1] in names else None
    means = f"; {place[-1]} means: {meaning}" if meaning else ""
    if kind == "missing":
        return f"{where} is missing{means or '; add the table [' + where + ']'}"
    if kind == "string_pattern_mismatch":
        return f"{where} = {_value(error['input'])}: has characters that do not belong, or too many{means}"
    rule = _one_line(error["msg"])
    return f"{where} = {_value(error['input'])}: {rule[:1].lower()}{rule[1:]}{means}"


def _table_of(place: list[str]) -> type[Table]:
    """The table that holds the key at ``place``."""
    field = Manifest.model_fields.get(place[0]) if len(place) > 1 else None
    inner = field.annotation if field is not None else None
    return inner if isinstance(inner, type) and issubclass(inner, Table) else Manifest


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


def _one_line(error: object) -> str:
    return _shown(" ".join(str(error).split()), 240)
