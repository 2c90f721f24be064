"""The cells that are there: a line each, written whole or taken for not there, and never run again.

One file, small enough to be committed with the report: a clone goes on where another machine ended. While a study runs
its process has the file locked: two that ran one study would each run every cell.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from decentral.errors import UsageError
from decentral.lab.runs.cell import Cell
from decentral.lab.runs.running import Outcome
from decentral.state.durable import DISK, Disk, disk_errors

__all__ = ["Store"]

STUDY, CELLS = "study.toml", "cells.jsonl"


class Store:
    """``FOLDER/cells.jsonl``. To run a cell again, remove its line."""

    def __init__(self, folder: Path, disk: Disk = DISK) -> None:
        self.folder, self._path, self._disk = folder, folder / CELLS, disk
        self._lock: int | None = None  # a descriptor: the kernel lets go of it, however this process ends

    def begin(self, study: str) -> None:
        """Keep the study's own text, and others out until ``end``.

        UsageError for a folder of something else or one in use, DiskError where nothing can be kept.
        """
        there = {path.name for path in self.folder.iterdir()} if self.folder.is_dir() else set()
        if there and not there & {STUDY, CELLS}:
            raise UsageError(f"{self.folder} is not empty and no study made it; name another directory with --out")
        with disk_errors(f"opening {self._path}"):
            self._disk.make_folders(self.folder)
            self._lock = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        if not _locked(self._lock):
            self.end()
            raise UsageError(
                f"{self.folder} is in use by another decentral lab; wait for its end, or name another directory with "
                "--out"
            )
        self.write(STUDY, study)

    def end(self) -> None:
        """Let others in."""
        if self._lock is not None:
            os.close(self._lock)
        self._lock = None

    def known(self) -> dict[str, Outcome]:
        """What is there by id; a line that is no record, as one that a power cut left, is as if it was not there."""
        with disk_errors(f"reading {self._path}"):
            lines = self._path.read_bytes().splitlines() if self._path.exists() else []
        return dict(found for found in map(_read, lines) if found is not None)

    def keep(self, cell: Cell, outcome: Outcome) -> None:
        """Add one. DiskError where it cannot be."""
        record = {"id": cell.id, "cell": cell.told, **outcome.to_json()}
        line = json.dumps(record, separators=(",", ":"), allow_nan=False) + "\n"
        with disk_errors(f"writing {self._path}"):
            self._disk.make_folders(self.folder)
            self._append(line.encode("ascii"))

    def _append(self, line: bytes) -> None:
        """Behind the last whole line."""
        if not self._path.exists():
            self._disk.write(self._path, [line])
            self._disk.sync_folder(self.folder)
            return
        before = self._path.read_bytes()
        torn = bool(before) and not before.endswith(b"\n")
        self._disk.write(self._path, [b"\n" + line if torn else line], at=len(before))

    def write(self, name: str, text: str) -> None:
        """A file of the folder, whole. DiskError where it cannot be."""
        path = self.folder / name
        with disk_errors(f"writing {path}"):
            self._disk.make_folders(path.parent)
            self._disk.replace_file(path, [text.encode("utf-8")])


def _read(line: bytes) -> tuple[str, Outcome] | None:
    try:
        record: dict[str, Any] = json.loads(line)
        return str(record["id"]), Outcome.from_json(record)
    except (ValueError, KeyError, TypeError):
        return None


def _locked(descriptor: int) -> bool:
    """Whether the file is this process's now."""
    try:
        import fcntl
    except ImportError:  # Windows: nobody is kept out
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
