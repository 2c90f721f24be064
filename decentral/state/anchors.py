"""The anchors of a run as files, for whoever evaluates it, serves it or samples from it.

``round-000012.safetensors`` holds one anchor under the names of the model's ``state_dict``; ``latest.json`` says which
is the newest, its digest and when it was written. Both appear whole or not at all, the tensors first: the file that
``latest.json`` names is there, until as many newer ones are as are kept. ``round-000012.delta`` beside it is the exact
difference from the anchor that was written before (`state/delta`), for readers that hold that one.
"""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from decentral.state.delta import make_delta
from decentral.state.durable import DISK, TEMPORARY, Disk, disk_errors
from decentral.state.tensor_file import write_tensor_file

LATEST = "latest.json"
LATEST_VERSION = 1
_WRITTEN = re.compile(r"round-(\d{6,})\.(safetensors|delta)")


class AnchorFolder:
    """Writes anchors into ``folder`` and keeps the newest ``keep`` of them. ``wall`` tells seconds since 1970."""

    def __init__(
        self,
        folder: Path,
        keep: int,
        *,
        deltas: bool = False,
        disk: Disk = DISK,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.folder, self.keep = folder, keep
        self._deltas, self._disk, self._wall = deltas, disk, wall
        self._before: tuple[int, Mapping[str, Tensor]] | None = None  # what the next delta begins from

    def latest(self) -> dict[str, Any] | None:
        """What ``latest.json`` says, where its file is there too; None: nothing was written yet."""
        try:
            found = json.loads((self.folder / LATEST).read_text(encoding="utf-8"))
            there = isinstance(found, dict) and (self.folder / str(found["file"])).is_file()
        except (OSError, ValueError, KeyError, RecursionError):
            return None
        return found if there else None

    def write(self, round_: int, digest: str, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> Path:
        """Make one anchor durable and the newest; ``about`` goes into ``latest.json``. Raises DiskError.

        Tensors must not be written to afterwards: the next delta begins from them.
        """
        path = self.folder / f"round-{round_:06d}.safetensors"
        with disk_errors(f"writing {path}"):
            self._disk.make_folders(self.folder)
            self._sweep()
            self._replace(path, tensors, {"format": "pt", "round": str(round_), "digest": digest})
            delta = self._write_delta(round_, tensors)
            entry = {"version": LATEST_VERSION, "round": round_, "digest": digest, "file": path.name, "delta": delta}
            text = json.dumps({**entry, "time": round(self._wall(), 3), **about}, indent=1)
            self._disk.replace_file(self.folder / LATEST, [f"{text}\n".encode()])
        self._prune(round_)
        self._before = (round_, dict(tensors)) if self._deltas else None
        return path

    def _replace(self, path: Path, tensors: Mapping[str, Tensor], note: Mapping[str, str]) -> None:
        temporary = path.with_name(f"{TEMPORARY}{path.name}")
        write_tensor_file(temporary, tensors, note, self._disk)
        self._disk.rename(temporary, path)
        self._disk.sync_folder(self.folder)

    def _write_delta(self, round_: int, tensors: Mapping[str, Tensor]) -> dict[str, Any] | None:
        """What ``latest.json`` says of it; None where there is nothing to begin from."""
        if self._before is None or self._before[0] == round_:
            return None
        since, before = self._before
        path = self.folder / f"round-{round_:06d}.delta"
        self._disk.replace_file(path, [make_delta(before, tensors)])
        return {"file": path.name, "since": since}

    def _prune(self, newest: int) -> None:
        """Drop the oldest, and later rounds of a branch that was given up. A failure waits for the next time."""
        found = [(int(match[1]), path) for path in self.folder.iterdir() if (match := _WRITTEN.fullmatch(path.name))]
        rounds = sorted({number for number, _ in found if number <= newest})[-self.keep :]
        for number, path in found:
            if number not in rounds:
                with contextlib.suppress(OSError):
                    self._disk.remove(path)

    def _sweep(self) -> None:
        """Remove what a crash left half-written."""
        for path in self.folder.glob(f"{TEMPORARY}*"):
            self._disk.remove(path)
