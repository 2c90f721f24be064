"""Disks that refuse, are slow, or see a process die: what a full, failing or killed machine does to a writer."""

from __future__ import annotations

import errno
import math
import os
import threading
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from decentral.simulate.disk import Operation, RecordingDisk
from decentral.state.durable import Disk
from tests.kit.patience import PATIENCE


def recording_disk(root: Path) -> RecordingDisk:
    """An empty one that remembers every operation."""
    root.mkdir()
    return RecordingDisk(root, keep_log=True)


class FailingDisk(RecordingDisk):
    """From operation ``first`` on, ``times`` operations fail; of a write, half arrives."""

    def __init__(self, root: Path, first: int, error: int, times: float = 1) -> None:
        super().__init__(root)
        self.count, self.first, self.times, self.error = 0, first, times, error

    def carry_out(self, operation: Operation) -> None:
        self.count += 1
        if self.first <= self.count < self.first + self.times:
            if operation.call == "write":
                super().carry_out(replace(operation, data=operation.data[: len(operation.data) // 2]))
            raise OSError(self.error, os.strerror(self.error))
        super().carry_out(operation)


class Killed(BaseException):
    """SIGKILL: no handler of an error runs."""


class KillingDisk(RecordingDisk):
    """The process dies before an operation; what it asked for before stays asked for."""

    left = math.inf  # operations until then

    def carry_out(self, operation: Operation) -> None:
        if not self.left:
            raise Killed
        self.left -= 1
        super().carry_out(operation)


class SlowDisk:
    """Of this process: files of one name are written while its gate is open; if it is full it refuses them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        self.open, self.reached, self.is_full = threading.Event(), threading.Event(), False
        self.open.set()
        write = Disk.write

        def slowly(disk: Disk, path: Path, parts: Iterable[Any], at: int | None = None) -> None:
            if path.name == name:
                self.reached.set()
                assert self.open.wait(PATIENCE)
                if self.is_full:
                    raise OSError(errno.ENOSPC, "no space left on device")
            write(disk, path, parts, at)

        monkeypatch.setattr(Disk, "write", slowly)

    def shut(self) -> None:
        self.open.clear()
        self.reached.clear()
