"""Disks that refuse, and disks on which a process dies: what a full, failing or killed machine does to a writer."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from pathlib import Path

from decentral.simulate.disk import Operation, RecordingDisk


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
