"""A peer's folder is one process's at a time: two with one key might vote twice in a ballot, and its journal has one
writer.

What `check_free` reads is written once a process has begun: until then, up to 20 s on a slow machine, a second start
saw nobody, and both trained there. The kernel's lock is there from the beginning, and gone with its process.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from filelock import BaseFileLock, FileLock, Timeout

from decentral.errors import ConfigError, DiskError, FolderInUse
from decentral.observe.health import health_sentence
from decentral.observe.requests import drop_requests
from decentral.observe.status import STATUS_FILE, ProcessInfo, Status, check_free, read_status, write_status
from decentral.state.durable import disk_errors

LOCK_FILE = "lock"
_BEGUN = set[Path]()  # folders that a command of this process has, whose peer comes later
_DYING = 1.0  # s that the kernel may take to end what was killed just now

_STILL_TRUE = (  # of what the last life said; not its invite and members: nobody can be reached there yet
    *("peer", "run", "run_id", "algorithm", "round", "rounds", "epoch", "inner_steps", "loss", "held_out_loss"),
    *("own_loop", "num_parameters", "preferences", "kept_settings"),
)
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)  # some network file systems

logger = logging.getLogger("decentral.peer")


@contextmanager
def occupied(folder: Path) -> Iterator[None]:
    """One peer's, while it lasts, be it of a command that has ``begun``. Raises FolderInUse, DiskError."""
    check_free(folder, own=os.getpid())
    made = _make(folder)
    lock = FileLock(folder.absolute() / LOCK_FILE, thread_local=False, is_singleton=True, fallback_to_soft=False)
    if lock.is_locked and folder.absolute() not in _BEGUN:
        raise FolderInUse(
            f"{folder}: another peer of this process lives here; leave its with block, or choose another out"
        )
    try:
        _take(lock, folder)
        yield
    finally:
        _unmake(folder, made, held=lock.is_locked)
        lock.release()


@contextmanager
def begun(folder: Path) -> Iterator[None]:
    """The same, and ``decentral status`` says so from now on, and requests are this process's: loading torch takes
    seconds, in which it told of the last life. What it said comes back when nothing comes of this one.
    """
    with occupied(folder), _known(folder.absolute()):
        drop_requests(folder)
        path = folder / STATUS_FILE
        before = path.read_bytes() if path.exists() else None
        said = _say(folder)
        try:
            yield
        except BaseException:
            with suppress(OSError):
                if path.read_bytes() == said:
                    path.unlink() if before is None else path.write_bytes(before)
            raise


def has_begun(folder: Path) -> bool:
    """Whether a command of this process has, and hears what is asked there."""
    return folder.absolute() in _BEGUN


@contextmanager
def _known(folder: Path) -> Iterator[None]:
    _BEGUN.add(folder)
    try:
        yield
    finally:
        _BEGUN.discard(folder)


def _say(folder: Path) -> bytes:
    """That a peer begins, with what the one before knew of the run."""
    status = Status()
    with suppress(ConfigError):  # none, or another version's
        last = read_status(folder)
        status = Status(**{name: getattr(last, name) for name in _STILL_TRUE})
    write_status(folder, replace(status, health=health_sentence(status)), ProcessInfo())
    return (folder / STATUS_FILE).read_bytes()


def _make(folder: Path) -> list[Path]:
    """The folder, and those that it is in; which were not there, the innermost first."""
    made = [path for path in (folder, *folder.absolute().parents) if not path.exists()]
    if folder.exists() and not folder.is_dir():
        raise DiskError(f"{folder} is a file, and a peer needs a folder of its own; choose another --out")
    with disk_errors(f"making the folder {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
    return made


def _unmake(folder: Path, made: list[Path], *, held: bool) -> None:
    """Where nothing came of it: no more is in what was ``made`` than the lock, if that is ``held``."""
    with suppress(OSError):  # or something did
        if made and held and os.listdir(folder) == [LOCK_FILE]:
            (folder / LOCK_FILE).unlink()
        for path in made:
            path.rmdir()


def _take(lock: BaseFileLock, folder: Path) -> None:
    with disk_errors(f"locking {folder}"):
        try:
            lock.acquire(timeout=_DYING)
        except Timeout:
            raise FolderInUse(f"{folder}: a peer begins here just now; choose another --out") from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            logger.warning("%s: this file system has no locks; see that no second process uses the folder", folder)
