"""A disk that remembers what it was asked and forgets what it never promised to keep.

``RecordingDisk`` works in a real folder, without a single real fsync: what a power cut may leave is known from its
record, so a test lists those states and a simulator puts one of them into the folder (``crash``) and starts the peer
again. A killed process loses nothing: keep the disk as it is. Memory: what lies in the folder, once more.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterable
from pathlib import Path

from decentral.simulate.machine.durability import Names, Operation, Parts, all_durable, apply, materialise, scan
from decentral.state.durable import Disk


class RecordingDisk(Disk):
    """Everything below ``root``, a folder that exists; what lies there at first is taken for durable.

    Attributes:
        base: what lay in the folder before the first operation of ``log``.
        log: operations in order when ``keep_log``, else empty.

    """

    def __init__(self, root: Path, *, keep_log: bool = False) -> None:
        self.root, self._keep_log, self._lock = root, keep_log, threading.RLock()  # peers write from several threads
        self._base = len(root.parts)
        self.base = scan(root)
        self._model = all_durable(self.base)
        self.log: list[Operation] = []

    def carry_out(self, operation: Operation) -> None:
        """Everything passes here: override it to fail an operation, or to cut the power before one."""
        with self._lock:
            _perform(operation, str(self.root))
            apply(self._model, operation)
            if self._keep_log:
                self.log.append(operation)

    def crash(self, rng: random.Random) -> None:
        """Cut the power: the folder holds one of the states that this may leave, and all of it is durable now."""
        self.become(self._model.drawn(rng))

    def become(self, tree: Names) -> None:
        """Put a state into the folder, in place of all that came through this disk, and begin a new log."""
        with self._lock:
            materialise(tree, self.root, self._model.settled())
            self.base, self._model, self.log = tree, all_durable(tree), []

    def settled(self) -> Names:
        """What lies in the folder as long as the power stays on."""
        return self._model.settled()

    def make_folder(self, path: Path) -> None:
        """See ``Disk``."""
        self.carry_out(Operation("make folder", self._parts(path)))

    def write(self, path: Path, parts: Iterable[bytes | memoryview], at: int | None = None) -> None:
        """See ``Disk``; creating, each part and the fsync are operations of their own."""
        name, end = self._parts(path), at or 0
        if at is None:
            self.carry_out(Operation("create", name))
        for part in parts:
            data = bytes(memoryview(part).cast("B"))
            self.carry_out(Operation("write", name, at=end, data=data))
            end += len(data)
        self.carry_out(Operation("sync file", name))

    def truncate(self, path: Path, nbytes: int) -> None:
        """See ``Disk``."""
        self.carry_out(Operation("truncate", self._parts(path), at=nbytes))
        self.carry_out(Operation("sync file", self._parts(path)))

    def rename(self, old: Path, new: Path) -> None:
        """See ``Disk``."""
        self.carry_out(Operation("rename", self._parts(old), self._parts(new)))

    def remove(self, path: Path) -> None:
        """See ``Disk``; what is in a folder goes first, file by file."""
        if path.is_dir():
            for inner in sorted(path.iterdir()):
                self.remove(inner)
        if path.exists():
            self.carry_out(Operation("remove", self._parts(path)))

    def sync_folder(self, path: Path) -> None:
        """See ``Disk``."""
        self.carry_out(Operation("sync folder", self._parts(path)))

    def _parts(self, path: Path) -> Parts:
        parts = path.parts
        if parts[: self._base] != self.root.parts:
            raise ValueError(f"{path} is not below {self.root}")
        return parts[self._base :]


def _perform(operation: Operation, root: str) -> None:
    """The operation on the real folder; a sync is only remembered."""
    path = os.path.join(root, *operation.path)
    match operation.call:
        case "make folder":
            os.mkdir(path)
        case "create":
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        case "write":
            with open(path, "r+b") as file:
                file.seek(operation.at)
                file.write(operation.data)
        case "truncate":
            os.truncate(path, operation.at)
        case "rename":
            os.replace(path, os.path.join(root, *operation.to))
        case "remove":
            os.rmdir(path) if os.path.isdir(path) else os.unlink(path)
