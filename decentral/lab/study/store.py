"""The cells that are there: one file each, written whole or not at all, and never run again."""

from __future__ import annotations

import json
from pathlib import Path

from decentral.errors import UsageError
from decentral.lab.runs.cell import Cell, id_of
from decentral.lab.runs.running import Outcome
from decentral.state.durable import DISK, Disk, disk_errors

__all__ = ["Store"]

STUDY = "study.toml"


class Store:
    """``FOLDER/cells/ID.json``. To run a cell again, remove its file."""

    def __init__(self, folder: Path, disk: Disk = DISK) -> None:
        self.folder, self._cells, self._disk = folder, folder / "cells", disk

    def begin(self, study: str) -> None:
        """Keep the study's own text. UsageError for a folder of something else, DiskError where nothing can be kept."""
        if self.folder.is_dir() and any(self.folder.iterdir()) and not (self.folder / STUDY).exists():
            raise UsageError(f"{self.folder} is not empty and no study made it; name another directory with --out")
        self.write(STUDY, study)

    def known(self) -> dict[str, Outcome]:
        """What is there by id; what is no record of its name's cell is as if it was not there."""
        found = {path.stem: _read(path) for path in sorted(self._cells.glob("*.json"))}
        return {name: outcome for name, outcome in found.items() if outcome is not None}

    def keep(self, cell: Cell, outcome: Outcome) -> None:
        """Write one. DiskError where it cannot be."""
        record = {"cell": cell.to_json(), **outcome.to_json()}
        self.write(f"cells/{cell.id}.json", json.dumps(record, indent=1, allow_nan=False) + "\n")

    def write(self, name: str, text: str) -> None:
        """A file of the folder, whole. DiskError where it cannot be."""
        path = self.folder / name
        with disk_errors(f"writing {path}"):
            self._disk.make_folders(path.parent)
            self._disk.replace_file(path, [text.encode("utf-8")])


def _read(path: Path) -> Outcome | None:
    try:
        record = json.loads(path.read_bytes())
        return Outcome.from_json(record) if id_of(record["cell"]) == path.stem else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
