"""The log of committed records, and the small file of a Paxos acceptor: durable before a call returns.

Journal, on disk: entries of u32 length, blake2b-128 of (length + body), body; little-endian, nothing else.
An append that a crash cut short fails its hash and is cut off when the journal is opened again. Beyond ``2
* keep`` entries the file is rewritten with the last ``keep``, so disk use is bounded and an append costs
O(its own bytes), amortised.
"""

import contextlib
import os
import struct
from collections import deque
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from types import TracebackType

from decentral.errors import ConfigError, DiskError
from decentral.state.durable import disk_errors, make_folder, replace_file, sync_folder, write_all

MAX_ENTRY_NBYTES = 2**20  # a record of 1024 peers with its votes stays below 512 KiB
_LENGTH = struct.Struct("<I")
_SEAL_NBYTES = 16
HEAD_NBYTES = _LENGTH.size + _SEAL_NBYTES


class Journal:
    """Append-only entries of bytes; the last ``keep`` are held in memory as ``entries``, oldest first.

    Attributes:
        entries: what is durable now.
        dropped_nbytes: bytes of a torn or damaged tail that opening cut off; 0 after a clean stop.

    """

    def __init__(self, path: Path, *, keep: int = 1024) -> None:
        """Open or create. Raises DiskError when the file cannot be read or written."""
        if keep < 1:
            raise ConfigError(f"Journal(keep={keep}): must be at least 1")
        self.path, self.keep = path, keep
        with disk_errors(f"opening journal {path}"):
            make_folder(path.parent)
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o600)
            try:
                self._recover(path.read_bytes())
            except BaseException:
                os.close(self._descriptor)
                raise

    def append(self, body: bytes) -> None:
        """Store one entry; it is on the disk when this returns.

        Raises:
            DiskError: nothing was appended; the journal is as before.

        """
        if len(body) > MAX_ENTRY_NBYTES:
            raise ConfigError(f"journal entry of {len(body)} bytes: at most {MAX_ENTRY_NBYTES}")
        data = _entry(body)
        with disk_errors(f"writing journal {self.path}"):
            try:
                os.lseek(self._descriptor, self._end, os.SEEK_SET)
                write_all(self._descriptor, data)
                os.fsync(self._descriptor)
            except OSError:
                with contextlib.suppress(OSError):  # what stays is overwritten next
                    os.ftruncate(self._descriptor, self._end)
                raise
        self._end += len(data)
        self._count += 1
        self.entries.append(body)
        if self._count >= 2 * self.keep:
            self._compact()

    def close(self) -> None:
        """Give the file back; everything appended is already durable."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> "Journal":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _recover(self, data: bytes) -> None:
        bodies = list(_intact_entries(data))
        self._count = len(bodies)
        self._end = sum(HEAD_NBYTES + len(body) for body in bodies)
        self.entries: deque[bytes] = deque(bodies, maxlen=self.keep)
        self.dropped_nbytes = len(data) - self._end
        if self.dropped_nbytes:
            os.ftruncate(self._descriptor, self._end)
        os.fsync(self._descriptor)
        sync_folder(self.path.parent)  # the name of a journal just created

    def _compact(self) -> None:
        """Rewrite with the last ``keep``. A full disk is no failure: the long file is still right."""
        with contextlib.suppress(OSError):
            replace_file(self.path, [_entry(body) for body in self.entries])
            descriptor = os.open(self.path, os.O_RDWR | getattr(os, "O_BINARY", 0))
            os.close(self._descriptor)
            self._descriptor = descriptor
            self._count = len(self.entries)
            self._end = sum(HEAD_NBYTES + len(body) for body in self.entries)


class AcceptorFile:
    """One small blob, replaced atomically: what a peer promised and accepted in the round under way."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> bytes | None:
        """The last blob written, or None when there never was one.

        Raises:
            DiskError: unreadable or damaged. Going on without it could vote twice, so it is never ignored.

        """
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise DiskError(f"reading {self.path} failed ({error.strerror}); fix its permissions") from error
        bodies = list(_intact_entries(data))
        if len(bodies) != 1 or HEAD_NBYTES + len(bodies[0]) != len(data):
            raise DiskError(
                f"{self.path} is damaged, and without it this peer could vote twice in one round; "
                "move its folder away and join again as a new peer"
            )
        return bodies[0]

    def write(self, body: bytes) -> None:
        """Replace the blob; durable when this returns. Raises DiskError with the old one still in place."""
        with disk_errors(f"writing {self.path}"):
            make_folder(self.path.parent)
            replace_file(self.path, [_entry(body)])


def _entry(body: bytes) -> bytes:
    length = _LENGTH.pack(len(body))
    return length + _seal(length, body) + body


def _seal(length: bytes, body: bytes) -> bytes:
    return blake2b(length + body, digest_size=_SEAL_NBYTES).digest()


def _intact_entries(data: bytes) -> Iterator[bytes]:
    """Bodies from the front, up to the first that is cut short or altered."""
    at = 0
    while at + HEAD_NBYTES <= len(data):
        length = data[at : at + _LENGTH.size]
        start = at + HEAD_NBYTES
        body = data[start : start + int.from_bytes(length, "little")]
        whole = start + int.from_bytes(length, "little")
        if whole > len(data) or data[at + _LENGTH.size : start] != _seal(length, body):
            return
        yield body
        at = whole
