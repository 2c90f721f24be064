"""The log of committed records, and the small file of a Paxos acceptor: durable before a call returns.

Journal, on disk: entries of u32 length, blake2b-128 of (length + body), body; little-endian, nothing else.
An append that a crash cut short fails its hash and is cut off when the journal is opened again. Nothing is dropped
before its owner says so: only the owner knows which entries a checkpoint has made unnecessary.
"""

import contextlib
import struct
import threading
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from pathlib import Path
from types import TracebackType

from decentral.errors import ConfigError, DiskError
from decentral.state.durable import DISK, TEMPORARY, Disk, disk_errors

MAX_ENTRY_NBYTES = 2**20  # a record of 1024 peers with its votes stays below 512 KiB
_LENGTH = struct.Struct("<I")
_SEAL_NBYTES = 16
HEAD_NBYTES = _LENGTH.size + _SEAL_NBYTES


class Journal:
    """Append-only entries of bytes, held in memory, too, as ``entries``, oldest first.

    Attributes:
        entries: what is durable now.
        dropped_nbytes: bytes of a torn or damaged tail that opening cut off; 0 after a clean stop.

    """

    def __init__(self, path: Path, disk: Disk = DISK) -> None:
        """Open or create. Raises DiskError when the file cannot be read or written."""
        self.path, self._disk, self._closed = path, disk, False
        self.entries: list[bytes] = []
        self._lock = threading.Lock()  # one thread appends commits while another has written a checkpoint
        with disk_errors(f"opening journal {path}"):
            disk.make_folders(path.parent)
            if not path.exists():
                disk.write(path, [])
            self._recover(path.read_bytes())

    def append(self, body: bytes) -> None:
        """Store one entry; it is on the disk when this returns.

        Raises:
            DiskError: nothing was appended; the journal is as before.

        """
        if self._closed:  # another journal may own the file by now
            raise ConfigError(f"journal {self.path} was closed; open it again")
        if len(body) > MAX_ENTRY_NBYTES:
            raise ConfigError(f"journal entry of {len(body)} bytes: at most {MAX_ENTRY_NBYTES}")
        data = _entry(body)
        with self._lock, disk_errors(f"writing journal {self.path}"):
            self._sync_name()
            try:
                self._disk.write(self.path, [data], self._end)
            except OSError:
                with contextlib.suppress(OSError):  # what stays is overwritten next
                    self._disk.truncate(self.path, self._end)
                raise
            self._end += len(data)
            self.entries.append(body)

    def forget(self, count: int) -> int:
        """Drop the ``count`` oldest entries, but only when they are half of all: O(1) per entry, amortised.

        Returns how many went. Never raises: on a full disk the long file is still right, and it is tried again.
        """
        with self._lock:
            if not 0 < len(self.entries) <= 2 * count:
                return 0
            kept = self.entries[count:]
            rewritten = self.path.with_name(f"{TEMPORARY}{self.path.name}")
            try:
                self._disk.remove(rewritten)
                self._disk.write(rewritten, [_entry(body) for body in kept])
                self._disk.rename(rewritten, self.path)
            except OSError:
                return 0
            self.entries, self._end = kept, _nbytes(kept)
            self._name_is_durable = False
            with contextlib.suppress(OSError):  # then the next append sees to it, or is refused
                self._sync_name()
            return count

    def close(self) -> None:
        """Take no more appends; everything appended is already durable."""
        self._closed = True

    def __enter__(self) -> "Journal":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _recover(self, data: bytes) -> None:
        self.entries = list(_intact_entries(data))
        self._end = _nbytes(self.entries)
        self.dropped_nbytes = len(data) - self._end
        # Synced even if nothing is cut: a killed process may have left whole entries in the page cache only.
        self._disk.truncate(self.path, self._end)
        self._name_is_durable = False  # a journal just created, or replaced right before a crash
        self._sync_name()

    def _sync_name(self) -> None:
        """An fsync of the file is worth nothing while its name may still lead to an older one."""
        if not self._name_is_durable:
            self._disk.sync_folder(self.path.parent)
            self._name_is_durable = True


class AcceptorFile:
    """A small blob, replaced atomically: what a peer promised and accepted in the round under way."""

    def __init__(self, path: Path, disk: Disk = DISK) -> None:
        self.path, self._disk = path, disk

    def read(self) -> bytes | None:
        """The last blob written, or None when there never was one. What it says is durable when this returns.

        Raises:
            DiskError: unreadable or damaged. Going on without it could vote twice, so it is never ignored.

        """
        try:
            data = self.path.read_bytes()
            # A process killed right after its rename left a name that a power cut may still take back, and what is
            # read here is acted upon: an accepted record is voted for again.
            self._disk.sync_folder(self.path.parent)
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
            self._disk.make_folders(self.path.parent)
            self._disk.replace_file(self.path, [_entry(body)])


def _entry(body: bytes) -> bytes:
    length = _LENGTH.pack(len(body))
    return length + _seal(length, body) + body


def _nbytes(bodies: Iterable[bytes]) -> int:
    """Count the bytes that these entries take in the file."""
    return sum(HEAD_NBYTES + len(body) for body in bodies)


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
