"""The only place that makes bytes durable: write, fsync the file, rename, fsync the folder, in that order.

Without the fsyncs 4 of 10 modelled crash states of a rename-only writer were torn; with them none. A rename
may reach the disk before the data it names, and a new name is lost with its folder's last block until the
folder is synced.

Whoever writes takes a ``Disk`` as argument, so that a test or a simulator can pass one that fails, records or forgets.
"""

import contextlib
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from decentral.errors import DiskError

_BINARY = getattr(os, "O_BINARY", 0)  # Windows would translate line ends
TEMPORARY = ".tmp-"  # prefix of anything half-written; whoever finds one at start may delete it


@contextlib.contextmanager
def disk_errors(doing: str) -> Iterator[None]:
    """Turn the operating system's refusals (no space, no permission, ...) into one-line DiskErrors."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise DiskError(
            f"{doing} failed ({reason}); what was stored before is untouched: "
            "free space or fix the permissions, or choose another folder"
        ) from error


class Disk:
    """Every operation by which a run directory changes. All raise OSError; ``disk_errors`` makes one line of it.

    A subclass that overrides the six operations sees everything; what is built of them comes last.
    """

    def make_folder(self, path: Path) -> None:
        """Create one folder, for its owner alone. Its name is durable after ``sync_folder`` of its parent, as any."""
        os.mkdir(path, 0o700)

    def write(self, path: Path, parts: Iterable[bytes | memoryview], at: int | None = None) -> None:
        """Write the parts and fsync: a new file, or an existing one from byte ``at`` on."""
        creation = os.O_CREAT | os.O_EXCL if at is None else 0
        descriptor = os.open(path, os.O_WRONLY | creation | _BINARY, 0o600)
        try:
            os.lseek(descriptor, at or 0, os.SEEK_SET)
            for part in parts:
                _write_all(descriptor, part)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def truncate(self, path: Path, nbytes: int) -> None:
        """Cut a file off after ``nbytes``, durably."""
        descriptor = os.open(path, os.O_WRONLY | _BINARY)
        try:
            os.ftruncate(descriptor, nbytes)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, old: Path, new: Path) -> None:
        """Give a file or a folder another name in the same folder, at once; a file there is replaced."""
        os.replace(old, new)

    def remove(self, path: Path) -> None:
        """Remove a file, or a folder with what is in it; what is not there is no error."""
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)

    def sync_folder(self, path: Path) -> None:
        """Make the names in ``path`` durable."""
        if os.name == "nt":  # Windows cannot open folders; NTFS journals names itself
            return
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def make_folders(self, path: Path) -> None:
        """Create ``path`` and its parents where missing, durably: a name is lost unless its folder is synced."""
        if path.is_dir():
            return
        self.make_folders(path.parent)
        self.make_folder(path)
        self.sync_folder(path.parent)

    def replace_file(self, path: Path, parts: Iterable[bytes | memoryview]) -> None:
        """Put new content under ``path``: a crash leaves the old bytes or the new ones, nothing between."""
        self._put(path, parts)
        self.sync_folder(path.parent)

    def replace_files(self, folder: Path, files: Mapping[Path, bytes | memoryview]) -> None:
        """The same of several files of one folder, each by itself; it is synced once for all of them."""
        for path, data in files.items():
            self._put(path, [data])
        if files:
            self.sync_folder(folder)

    def _put(self, path: Path, parts: Iterable[bytes | memoryview]) -> None:
        temporary = path.with_name(f"{TEMPORARY}{path.name}")
        self.remove(temporary)
        try:
            self.write(temporary, parts)
            self.rename(temporary, path)
        except OSError:
            with contextlib.suppress(OSError):
                self.remove(temporary)
            raise


def make_private_folders(path: Path) -> None:
    """Create ``path`` and its parents where missing, for their owner alone; what is there stays as it is.

    Raises OSError. No name is durable by it, see ``Disk.make_folders``.
    """
    if path.is_dir():
        return
    if not path.parent.exists():
        make_private_folders(path.parent)
    path.mkdir(mode=0o700, exist_ok=True)


DISK = Disk()  # the real one, without a state of its own: the default wherever a disk is an argument


def _write_all(descriptor: int, data: bytes | memoryview) -> None:
    """Write every byte; ``os.write`` may take fewer, near a full disk or beyond 2 GiB."""
    view = memoryview(data).cast("B")
    while view.nbytes:
        view = view[os.write(descriptor, view) :]
