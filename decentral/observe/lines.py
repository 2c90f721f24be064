"""Lines of JSON in files: written whole, packed, rotated, and read back."""

from __future__ import annotations

import errno
import io
import json
import logging
import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import zstandard

from decentral.errors import DiskError
from decentral.state.durable import DISK, TEMPORARY, Disk, disk_errors

# ---- the file that grows ----
#
# Append-only, one JSON object per line, safe between threads and after a crash.
#
# A line is written by a single ``write`` to a file opened for appending, so a killed process leaves at most one torn
# last line, which ``read_json_lines`` passes over. Lines are bounded, and so are files: a run of months would fill its
# disk at a kilobyte a round. A full one is put aside and packed, see `put_aside`.

MAX_FILE_NBYTES = 16 * 1024 * 1024  # some 16,000 rounds of a small swarm


class JsonLines:
    """Append mappings to ``path``, each as one line of at most ``MAX_LINE_NBYTES`` bytes.

    ``max_nbytes``: size from which a file is put aside; ``KEPT_FILES`` of those are there beside it.
    """

    def __init__(self, path: Path, *, max_nbytes: int = MAX_FILE_NBYTES, disk: Disk = DISK) -> None:
        self._path, self._max_nbytes, self._disk = path, max_nbytes, disk
        self._lock = threading.Lock()
        self._packing: threading.Thread | None = None
        self._open()

    def _open(self) -> None:
        self._torn = _ends_torn(self._path)
        try:
            self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
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
        """Put the full file aside, closed: Windows renames no open file. Where renaming fails it grows on, and loses
        nothing.
        """
        os.close(self._file)
        self._file = -1
        self._wait_for_packing()  # over long ago, unless the disk hangs: 16 MiB came since
        try:
            put_aside(self._path, self._disk)
        except OSError:
            self._open()
        else:
            self._open()
            self._begin_packing()

    def _begin_packing(self) -> None:
        """Pack in a thread: a full file takes 30 to 90 ms on two busy cores, an fsync on a slow disk any time."""
        packing = threading.Thread(target=pack_put_aside, args=(self._path, self._disk), name="pack lines")
        with suppress(RuntimeError):  # at the interpreter's end no thread starts; the next time packs this one, too
            packing.start()
            self._packing = packing

    def _wait_for_packing(self) -> None:
        if self._packing is not None:
            self._packing.join()
        self._packing = None

    def close(self) -> None:
        """Close the file; later appends are ignored. A file that was put aside lies packed."""
        with self._lock:
            if self._file >= 0:
                os.close(self._file)
            self._file = -1
            self._wait_for_packing()


def _ends_torn(path: Path) -> bool:
    """Tell whether a killed writer left half a line at the end."""
    try:
        with path.open("rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read(1) != b"\n"
    except OSError:  # absent or empty
        return False


def read_json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a file and of those put aside before it, oldest first, passing over torn lines."""
    with ExitStack() as stack:
        for file in reversed(open_files(path, stack)):
            for line in file.lines():
                try:
                    row = json.loads(line)
                except ValueError:
                    continue
                if isinstance(row, dict):
                    yield row


# ---- one object as one line ----
#
# Of bounded length: a runaway value is cut, never the file's shape.

MAX_LINE_NBYTES = 16 * 1024  # a record of 64 peers fits; a line stays one page of a terminal
_MAX_TEXT = 512
_MAX_ITEMS = 64


def to_line(row: Mapping[str, Any]) -> bytes:
    """Return a line of strict JSON (no NaN), ended by a newline, within ``MAX_LINE_NBYTES``."""
    line = _dump({key: json_value(value) for key, value in row.items()})
    if len(line) <= MAX_LINE_NBYTES:
        return line
    short = {key: _shorten(json_value(value)) for key, value in row.items()}
    line = _dump({**short, "truncated": True})
    while len(line) > MAX_LINE_NBYTES and short:
        short.pop(max(short, key=lambda key: len(json.dumps(short[key]))))
        line = _dump({**short, "truncated": True})
    return line


def _dump(row: Mapping[str, Any]) -> bytes:
    return json.dumps(row, separators=(",", ":"), allow_nan=False).encode() + b"\n"


def json_value(value: Any) -> Any:  # JSON has no static type
    """Return the nearest JSON value: bytes become hex, NaN and infinities null, tensors of one element numbers."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, Mapping):
        return {str(key): json_value(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [json_value(inner) for inner in value]
    item = getattr(value, "item", None)  # numpy and torch scalars, without importing either
    if callable(item) and getattr(value, "ndim", None) == 0:
        return json_value(item())
    return str(value)


def _shorten(value: Any) -> Any:  # JSON has no static type
    if isinstance(value, str):
        return value[:_MAX_TEXT]
    if isinstance(value, list):
        return [_shorten(inner) for inner in value[:_MAX_ITEMS]]
    if isinstance(value, dict):
        return {key[:_MAX_TEXT]: _shorten(inner) for key, inner in list(value.items())[:_MAX_ITEMS]}
    return value


# ---- full files beside it ----
#
# ``x.1.jsonl.zst`` was put aside last, ``x.3.jsonl.zst`` is the oldest.
#
# Each is packed after it was put aside. Until then, and where packing failed, it lies plain as ``x.1.jsonl``. A crash
# may leave both; the plain one counts, since nothing was ever done to it.

logger = logging.getLogger("decentral.observe")

KEPT_FILES = 3  # full files beside the one that grows


def put_aside(path: Path, disk: Disk = DISK) -> None:
    """Give each file the next number, the oldest first, and remove the one that had the last.

    Cut off anywhere, by a crash or an OSError, every file has its old number or the next, and no two have the same.
    """
    for number in range(1, KEPT_FILES + 1):
        plain, packed = _forms(path, number)
        if plain.exists():
            disk.remove(packed)  # left by a crash, of the same lines: moved one after the other, they would be two
    _move_up(path, 0, disk)


def _move_up(path: Path, number: int, disk: Disk) -> None:
    there = [form for form in _forms(path, number) if form.exists()]
    if there and number < KEPT_FILES:
        _move_up(path, number + 1, disk)
    for form in there:
        if number == KEPT_FILES:
            disk.remove(form)
        else:
            disk.rename(form, _forms(path, number + 1)[form.suffix == PACKED_SUFFIX])


def pack_put_aside(path: Path, disk: Disk = DISK) -> None:
    """Pack what was put aside and lies plain, as far as the disk lets it. Never while ``put_aside`` renames."""
    with suppress(OSError, DiskError):
        disk.sync_folder(path.parent)  # or a power cut may leave the new name packed, and the old one
        for left in path.parent.glob(f"{TEMPORARY}{path.stem}.*{PACKED_SUFFIX}"):
            disk.remove(left)  # half-written by a killed process
        for number in range(1, KEPT_FILES + 1):
            plain = _numbered_path(path, number)
            if plain.exists() and plain.stat().st_size <= MAX_UNPACKED_NBYTES:  # more of a packed one is not read
                pack_lines(plain, disk)


@dataclass(frozen=True)
class Opened:
    """A file of lines that is open."""

    path: Path
    file: IO[bytes]

    def lines(self) -> Iterator[bytes]:
        """Yield every line, from the first on."""
        self.file.seek(0)
        return lines_of(self.file, packed=self.path.suffix == PACKED_SUFFIX, on_damage=self._tell)

    def _tell(self, damage: Damage) -> None:
        logger.warning("%s is damaged: %s", self.path, damage)

    def first_line(self) -> bytes:
        """Return the line that tells one file from another, whatever its name and form; empty if there is none."""
        return next(self.lines(), b"")


def open_files(path: Path, stack: ExitStack) -> list[Opened]:
    """Open all files of ``path`` as they are at one moment, newest first, so that each can be read to its end.

    Renamed or packed between two looks, a file would be met twice, or never: then all are looked at anew.
    """
    while True:  # filling a file takes minutes, this takes microseconds
        with ExitStack() as attempt, suppress(FileNotFoundError):
            before = there(path)
            files = [Opened(name, attempt.enter_context(name.open("rb"))) for name in before]
            if there(path) == before:
                stack.enter_context(attempt.pop_all())
                return files


def there(path: Path) -> dict[Path, tuple[int, int]]:
    """Return the name of each file of ``path``, newest first, and its identity, which a new name does not change."""
    found: dict[Path, tuple[int, int]] = {}
    for number in range(KEPT_FILES + 1):
        for form in _forms(path, number):
            with suppress(FileNotFoundError):
                status = form.stat()
                found[form] = (status.st_dev, status.st_ino)
                break
    return found


def _forms(path: Path, number: int) -> tuple[Path, ...]:
    """Return where the ``number``-th last file may be, first the form that counts; one that grows is never packed."""
    plain = _numbered_path(path, number)
    return (plain, plain.with_name(plain.name + PACKED_SUFFIX)) if number else (plain,)


def _numbered_path(path: Path, number: int) -> Path:
    return path.with_suffix(f".{number}{path.suffix}") if number else path


# ---- packing ----
#
# Files of lines that grow no more become zstd: a quarter of the bytes or less, and ``zstd -dc FILE | grep`` reads them.
#
# A reader's memory is bounded whatever a damaged file says: by the window, by the longest line and by what all may
# expand to. Lines before the damage are read, and ``Damage`` says what was not.

PACKED_SUFFIX = ".zst"
MAX_UNPACKED_NBYTES = 64 * 2**20  # that one file may expand to: four times what a file of lines grows to
_LEVEL = 1  # 0.076 of 1.8 MB of events of 60 peers, at 1.4 GB/s; level 3 0.079, level 9 0.071 at 0.09 GB/s
_WINDOW = 2**23  # bytes; every zstd reads that without being told to
_AT_ONCE = 2**16  # bytes
_PACKED_AT_ONCE = 2**12  # bytes: how finely it is known what share was read
_CUT_SHORT = "it ends inside a line"


@dataclass(frozen=True, slots=True)
class Damage:
    """Why a packed file was not read to its end, and what was."""

    num_lines: int
    share: float  # of the packed bytes, those that were looked at
    why: str

    def __str__(self) -> str:
        return f"{self.why}; {self.num_lines:,} lines were read, of at most {self.share:.0%} of its bytes, and no more"


def pack_lines(path: Path, disk: Disk = DISK) -> Path:
    """Put ``path`` plus ``PACKED_SUFFIX`` in its place. A crash leaves the one, the other, or both with the same lines.

    Raises DiskError: ``path`` is as before.
    """
    packed = path.with_name(path.name + PACKED_SUFFIX)
    with disk_errors(f"packing {path}"):
        with path.open("rb") as file:
            disk.replace_file(packed, zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True).read_to_iter(file))
        packed.chmod(path.stat().st_mode)  # whom its owner lets read the logs still may
        disk.remove(path)
    return packed


def lines_of(
    file: IO[bytes], *, packed: bool, on_damage: Callable[[Damage], None] = lambda damage: None
) -> Iterator[bytes]:
    """Yield each line of an open file, packed or not, with its newline, but those longer than any that is written."""
    whole = True
    for piece in _unpack(file, on_damage) if packed else _pieces(file):
        ends = piece.endswith(b"\n")
        if whole and (ends or len(piece) < MAX_LINE_NBYTES):
            yield piece
        whole = ends


def _pieces(file: IO[bytes]) -> Iterator[bytes]:
    """Yield lines, the longest in parts."""
    return iter(lambda: file.readline(MAX_LINE_NBYTES), b"")


def _unpack(file: IO[bytes], on_damage: Callable[[Damage], None]) -> Iterator[bytes]:
    """Yield the lines of a packed file as far as it can be read; what was packed ends with a whole line."""
    reader = zstandard.ZstdDecompressor(max_window_size=_WINDOW).stream_reader(
        file, read_size=_PACKED_AT_ONCE, read_across_frames=True, closefd=False
    )
    num_lines, left, why = 0, MAX_UNPACKED_NBYTES, _CUT_SHORT
    try:
        for piece in _pieces(io.BufferedReader(reader, _AT_ONCE)):
            yield piece
            ends = piece.endswith(b"\n")
            num_lines, left, why = num_lines + ends, left - len(piece), "" if ends else _CUT_SHORT
            if left <= 0:
                why = f"it expands to more than {MAX_UNPACKED_NBYTES >> 20} MiB"
                break
    except (zstandard.ZstdError, EOFError) as error:
        why = str(error)
    if why:
        on_damage(Damage(num_lines, file.tell() / max(1, file.seek(0, io.SEEK_END)), why))
