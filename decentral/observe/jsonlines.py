"""Append-only files of one JSON object per line, safe between threads and after a crash.

A line is written by a single ``write`` to a file opened for appending, so a killed process leaves at most
one torn last line, which ``read_json_lines`` passes over. Lines are bounded: a runaway value is cut, never
the file's shape. So are files: a run of months would fill its disk at a kilobyte a round. A full ``x.jsonl`` becomes
``x.1.jsonl``, what was there ``x.2.jsonl``, and the one before ``KEPT`` goes, as ``logging.handlers`` has it.
"""

import errno
import json
import math
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO, Any

from decentral.errors import DiskError

MAX_LINE_NBYTES = 16 * 1024  # a record of 64 peers fits; a line stays one page of a terminal
MAX_FILE_NBYTES = 16 * 1024 * 1024  # some 16,000 rounds of a small swarm
KEPT = 3  # full files beside the one that grows
_MAX_TEXT = 512
_MAX_ITEMS = 64


class JsonLines:
    """Append mappings to ``path``, each as one line of at most ``MAX_LINE_NBYTES`` bytes.

    ``max_nbytes``: size from which a file is put aside; ``KEPT`` of those are there beside it.
    """

    def __init__(self, path: Path, *, max_nbytes: int = MAX_FILE_NBYTES) -> None:
        self._path, self._max_nbytes = path, max_nbytes
        self._lock = threading.Lock()
        self._open()

    def _open(self) -> None:
        self._torn = _ends_torn(self._path)
        try:
            self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            raise DiskError(f"{self._path}: cannot be written ({error.strerror}); choose another --out") from error
        self._nbytes = os.fstat(self._file).st_size

    def append(self, row: Mapping[str, Any]) -> None:
        """Write one line; raise ``DiskError`` when the disk refuses it."""
        line = to_line(row)
        with self._lock:
            if self._file < 0:
                return  # closed: a late event of a daemon thread is not worth a crash on the way out
            if self._nbytes + len(line) > self._max_nbytes and self._nbytes:
                self._put_aside()
            if self._torn:
                line = b"\n" + line
            try:
                self._nbytes += (written := os.write(self._file, line))
                self._torn = written < len(line)  # a disk that is almost full takes a part
                if self._torn:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError as error:
                raise DiskError(
                    f"{self._path}: cannot append ({error.strerror}); free some space, then resume"
                ) from error

    def _put_aside(self) -> None:
        """Closed meanwhile: Windows renames no open file. Where renaming fails the file grows on, and loses nothing."""
        os.close(self._file)
        self._file = -1
        with suppress(OSError):
            for number in range(KEPT, 0, -1):
                if (newer := numbered(self._path, number - 1)).exists():
                    newer.replace(numbered(self._path, number))
        self._open()

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


def numbered(path: Path, number: int) -> Path:
    """The file that was put aside as the ``number``-th last; 0 is the one that grows."""
    return path.with_suffix(f".{number}{path.suffix}") if number else path


def read_json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a file and of those put aside before it, oldest first, passing over torn lines."""
    with ExitStack() as stack:
        for file in reversed(_opened(path, stack)):
            for line in file:
                try:
                    row = json.loads(line)
                except ValueError:
                    continue
                if isinstance(row, dict):
                    yield row


def _opened(path: Path, stack: ExitStack) -> list[IO[bytes]]:
    """All files that are there, newest first: one that is put aside meanwhile is met again, and none is missed."""
    files: dict[tuple[int, int], IO[bytes]] = {}
    for number in range(KEPT + 1):
        with suppress(FileNotFoundError):
            file = stack.enter_context(numbered(path, number).open("rb"))
            found = os.fstat(file.fileno())
            files.setdefault((found.st_dev, found.st_ino), file)
    return list(files.values())
