"""Append-only files of one JSON object per line, safe between threads and after a crash.

A line is written by a single ``write`` to a file opened for appending, so a killed process leaves at most
one torn last line, which ``read_json_lines`` passes over. Lines are bounded, and so are files: a run of months would
fill its disk at a kilobyte a round. A full one is put aside and packed, see ``rotation``.
"""

import errno
import json
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from decentral.errors import DiskError
from decentral.observe.line import to_line
from decentral.observe.rotation import opened, pack_put_aside, put_aside
from decentral.state.durable import DISK, Disk

MAX_FILE_NBYTES = 16 * 1024 * 1024  # some 16,000 rounds of a small swarm


class JsonLines:
    """Append mappings to ``path``, each as one line of at most ``MAX_LINE_NBYTES`` bytes.

    ``max_nbytes``: size from which a file is put aside; ``KEPT`` of those are there beside it.
    """

    def __init__(self, path: Path, *, max_nbytes: int = MAX_FILE_NBYTES, disk: Disk = DISK) -> None:
        self._path, self._max_nbytes, self._disk = path, max_nbytes, disk
        self._lock = threading.Lock()
        self._packing: threading.Thread | None = None
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
        self._wait_for_packing()  # over long ago, unless the disk hangs: 16 MiB came since
        try:
            put_aside(self._path, self._disk)
        except OSError:
            self._open()
        else:
            self._open()
            self._begin_packing()

    def _begin_packing(self) -> None:
        """In a thread: a full file takes 30 to 90 ms on two busy cores, an fsync on a slow disk any time."""
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
        for file in reversed(opened(path, stack)):
            for line in file.lines():
                try:
                    row = json.loads(line)
                except ValueError:
                    continue
                if isinstance(row, dict):
                    yield row
