"""Put a snapshot together from chunks that come in any order, from any donors, over any number of restarts.

A chunk is accepted only if its hash is the one the index names, so one lying donor costs one chunk's bytes.
With a folder, chunks are also written to ``DIGEST.partial``; on restart its chunks are hashed again and
only the missing ones are fetched. No fsync is needed there: what a crash lost fails its hash and is fetched
again.
"""

import contextlib
import os
from pathlib import Path

import torch
from torch import Tensor

from decentral.errors import ConfigError, PayloadError
from decentral.state.durable import disk_errors
from decentral.state.snapshot import CHUNK_NBYTES, SnapshotIndex, chunk_hash


class Assembler:
    """Collects the chunks of one index. Memory: the snapshot once; its size comes from the local layout."""

    def __init__(self, index: SnapshotIndex, folder: Path | None = None) -> None:
        """Start, or resume from ``folder``; partial files of other snapshots there are removed."""
        self.index = index
        self._row = bytearray(index.layout.nbytes)
        self._have: set[int] = set()
        self._file: Path | None = None
        if folder is not None:
            with disk_errors(f"preparing the download folder {folder}"):
                self._file = self._open(folder)

    @property
    def nbytes(self) -> tuple[int, int]:
        """Bytes that are here, and of the whole."""
        layout = self.index.layout
        return min(layout.nbytes, CHUNK_NBYTES * len(self._have)), layout.nbytes

    def missing(self) -> list[int]:
        """Numbers of the chunks still to fetch, in order."""
        return [number for number in range(self.index.layout.num_chunks) if number not in self._have]

    def add(self, number: int, data: bytes) -> None:
        """Take a chunk a donor sent; one that is already there changes nothing.

        Raises:
            PayloadError: no such chunk, or not its bytes; nothing was kept.
            DiskError: the partial file could not be written; the chunk is kept in memory.

        """
        layout = self.index.layout
        if not 0 <= number < layout.num_chunks:
            raise PayloadError(f"chunk {number} of a snapshot with {layout.num_chunks}; drop the donor")
        if len(data) != layout.chunk_nbytes(number) or chunk_hash(data) != self.index.hashes[number]:
            raise PayloadError(f"chunk {number} is not what the index names; fetch it from another donor")
        if number in self._have:
            return
        self._row[number * CHUNK_NBYTES : number * CHUNK_NBYTES + len(data)] = data
        self._have.add(number)
        if self._file is not None:
            with disk_errors(f"writing {self._file}"), self._file.open("r+b") as file:
                file.seek(number * CHUNK_NBYTES)
                file.write(data)

    def tensors(self) -> dict[str, Tensor]:
        """All tensors, float32 (numel,), by name; the partial file is removed.

        Raises:
            ConfigError: chunks are missing.

        """
        if len(self._have) < self.index.layout.num_chunks:
            raise ConfigError(f"{len(self.missing())} chunks are missing; add them first")
        row = torch.frombuffer(self._row, dtype=torch.float32) if self._row else torch.empty(0)
        result, at = {}, 0
        for name, numel in self.index.layout.entries:
            result[name] = row[at : at + numel].clone()
            at += numel
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.unlink()
        return result

    def _open(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        mine = folder / f"{self.index.digest.hex()}.partial"
        for other in folder.glob("*.partial"):
            if other != mine:
                other.unlink()
        if mine.exists():
            self._resume(mine.read_bytes() if mine.stat().st_size <= len(self._row) else b"")
        with mine.open("ab") as file:
            os.ftruncate(file.fileno(), len(self._row))  # sparse: reserves the name, not the space
        return mine

    def _resume(self, stored: bytes) -> None:
        layout = self.index.layout
        for number in range(layout.num_chunks):
            begin = number * CHUNK_NBYTES
            data = stored[begin : begin + layout.chunk_nbytes(number)]
            if chunk_hash(data) == self.index.hashes[number]:
                self._row[begin : begin + len(data)] = data
                self._have.add(number)
