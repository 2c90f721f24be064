"""Append-only files of one JSON object per line, safe between threads and after a crash.

A line is written by a single ``write`` to a file opened for appending, so a killed process leaves at most
one torn last line, which ``read_json_lines`` passes over. Lines are bounded: a runaway value is cut, never
the file's shape.
"""

import errno
import json
import math
import os
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from decentral.errors import DiskError

MAX_LINE_NBYTES = 16 * 1024  # a record of 64 peers fits; a line stays one page of a terminal
_MAX_TEXT = 512
_MAX_ITEMS = 64


class JsonLines:
    """Append mappings to ``path``, each as one line of at most ``MAX_LINE_NBYTES`` bytes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._torn = _ends_torn(path)
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            raise DiskError(f"{path}: cannot be written ({error.strerror}); choose another --out") from error

    def append(self, row: Mapping[str, Any]) -> None:
        """Write one line; raise ``DiskError`` when the disk refuses it."""
        line = to_line(row)
        with self._lock:
            if self._file < 0:
                return  # closed: a late event of a daemon thread is not worth a crash on the way out
            if self._torn:
                line = b"\n" + line
            try:
                self._torn = os.write(self._file, line) < len(line)  # a disk that is almost full takes a part
                if self._torn:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError as error:
                raise DiskError(
                    f"{self._path}: cannot append ({error.strerror}); free some space, then resume"
                ) from error

    def close(self) -> None:
        """Close the file; later appends are ignored."""
        with self._lock:
            if self._file >= 0:
                os.close(self._file)
            self._file = -1


def _ends_torn(path: Path) -> bool:
    """Tell whether a killed writer left half a line at the end."""
    try:
        with path.open("rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read(1) != b"\n"
    except OSError:  # absent or empty
        return False


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


def read_json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a file, passing over torn lines; nothing if it is absent."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if isinstance(row, dict):
                yield row
