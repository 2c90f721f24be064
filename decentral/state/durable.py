"""The only place that makes bytes durable: write, fsync the file, rename, fsync the folder, in that order.

Without the fsyncs 4 of 10 modelled crash states of a rename-only writer were torn; with them none. A rename
may reach the disk before the data it names, and a new name is lost with its folder's last block until the
folder is synced.
"""

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from decentral.errors import DiskError

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
            "free space or fix the permissions, or choose another folder with --out"
        ) from error


def write_new_file(path: Path, parts: Iterable[bytes | memoryview]) -> None:
    """Create ``path``, write the parts and fsync it. The name itself is durable after ``sync_folder``."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o600)
    try:
        for part in parts:
            write_all(descriptor, part)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_all(descriptor: int, data: bytes | memoryview) -> None:
    """Write every byte; ``os.write`` may take fewer, near a full disk or beyond 2 GiB."""
    view = memoryview(data).cast("B")
    while view.nbytes:
        view = view[os.write(descriptor, view) :]


def make_folder(path: Path) -> None:
    """Create ``path`` and its parents where missing, durably: a name is lost unless its folder is synced."""
    if path.is_dir():
        return
    make_folder(path.parent)
    os.mkdir(path)
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Make the names in ``path`` durable."""
    if os.name == "nt":  # Windows cannot open folders; NTFS journals names itself
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_file(path: Path, parts: Iterable[bytes | memoryview]) -> None:
    """Put new content under ``path``: a crash leaves the old bytes or the new ones, nothing between."""
    temporary = path.with_name(f"{TEMPORARY}{path.name}")
    with contextlib.suppress(FileNotFoundError):
        os.unlink(temporary)
    try:
        write_new_file(temporary, parts)
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    sync_folder(path.parent)
