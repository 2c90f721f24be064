"""A peer's folder is one process's at a time: two with one key might vote twice in a ballot, and its journal has one
writer.

What `check_free` reads is written once a process has begun: until then, up to 20 s on a slow machine, a second start
saw nobody, and both trained there. The kernel's lock is there from the beginning, and gone with its process.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import BaseFileLock, FileLock, Timeout

from decentral.errors import FolderInUse
from decentral.node.folder import make_folder
from decentral.observe.status import check_free
from decentral.state.durable import disk_errors

LOCK_FILE = "lock"
_DYING = 1.0  # s that the kernel may take to end what was killed just now

logger = logging.getLogger("decentral.peer")


@contextmanager
def occupied(folder: Path) -> Iterator[None]:
    """This process's, while it lasts; what this process does in it already may go on. Raises FolderInUse, DiskError."""
    check_free(folder, own=os.getpid())
    make_folder(folder)
    lock = FileLock(folder.absolute() / LOCK_FILE, thread_local=False, is_singleton=True)
    _take(lock, folder)
    try:
        yield
    finally:
        lock.release()


def _take(lock: BaseFileLock, folder: Path) -> None:
    with disk_errors(f"locking {folder}"):
        try:
            lock.acquire(timeout=_DYING)
        except Timeout:
            raise FolderInUse(f"{folder}: a peer begins here just now; choose another --out") from None
        except NotImplementedError:  # some network file systems
            logger.warning("%s: this file system has no locks; see that no second process uses the folder", folder)
