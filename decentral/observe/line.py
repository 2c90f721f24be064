"""One JSON object as one line of bounded length: a runaway value is cut, never the file's shape."""

import json
import math
from collections.abc import Mapping
from typing import Any

MAX_LINE_NBYTES = 16 * 1024  # a record of 64 peers fits; a line stays one page of a terminal
_MAX_TEXT = 512
_MAX_ITEMS = 64


def to_line(row: Mapping[str, Any]) -> bytes:
    """One line of strict JSON (no NaN), ended by a newline, within ``MAX_LINE_NBYTES``."""
    line = _dump({key: plain(value) for key, value in row.items()})
    if len(line) <= MAX_LINE_NBYTES:
        return line
    short = {key: _shorten(plain(value)) for key, value in row.items()}
    line = _dump({**short, "truncated": True})
    while len(line) > MAX_LINE_NBYTES and short:
        short.pop(max(short, key=lambda key: len(json.dumps(short[key]))))
        line = _dump({**short, "truncated": True})
    return line


def _dump(row: Mapping[str, Any]) -> bytes:
    return json.dumps(row, separators=(",", ":"), allow_nan=False).encode() + b"\n"


def plain(value: Any) -> Any:  # JSON has no static type
    """The nearest JSON value: bytes become hex, NaN and infinities null, tensors of one element numbers."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(inner) for inner in value]
    item = getattr(value, "item", None)  # numpy and torch scalars, without importing either
    if callable(item) and getattr(value, "ndim", None) == 0:
        return plain(item())
    return str(value)


def _shorten(value: Any) -> Any:  # JSON has no static type
    if isinstance(value, str):
        return value[:_MAX_TEXT]
    if isinstance(value, list):
        return [_shorten(inner) for inner in value[:_MAX_ITEMS]]
    if isinstance(value, dict):
        return {key[:_MAX_TEXT]: _shorten(inner) for key, inner in list(value.items())[:_MAX_ITEMS]}
    return value
