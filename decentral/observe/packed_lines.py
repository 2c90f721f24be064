"""Files of lines that grow no more, as zstd: a quarter of the bytes or less, and ``zstd -dc FILE | grep`` reads them.

A reader's memory is bounded whatever a damaged file says: by the window, by the longest line and by what all may expand
to. Lines before the damage are read.
"""

import io
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO

import zstandard

from decentral.observe.line import MAX_LINE_NBYTES
from decentral.state.durable import DISK, Disk, disk_errors

SUFFIX = ".zst"
MAX_NBYTES = 64 * 2**20  # that one file may expand to: four times what a file of lines grows to
_LEVEL = 1  # 0.076 of 1.8 MB of events of 60 peers, at 1.4 GB/s; level 3 0.079, level 9 0.071 at 0.09 GB/s
_WINDOW = 2**23  # bytes; every zstd reads that without being told to
_AT_ONCE = 2**16  # bytes


def pack_lines(path: Path, disk: Disk = DISK) -> Path:
    """Put ``path`` plus ``SUFFIX`` in its place. A crash leaves the one, the other, or both with the same lines.

    Raises DiskError: ``path`` is as before.
    """
    packed = path.with_name(path.name + SUFFIX)
    with disk_errors(f"packing {path}"):
        with path.open("rb") as file:
            disk.replace_file(packed, zstandard.ZstdCompressor(level=_LEVEL).read_to_iter(file))
        packed.chmod(path.stat().st_mode)  # who may read the logs still may
        disk.remove(path)
    return packed


def lines_of(file: IO[bytes], *, packed: bool) -> Iterator[bytes]:
    """Every line of an open file, packed or not, with its newline; longer ones than are ever written are left out."""
    if packed:
        reader = zstandard.ZstdDecompressor(max_window_size=_WINDOW)
        file = io.BufferedReader(reader.stream_reader(file, read_across_frames=True, closefd=False), _AT_ONCE)
    left, whole = MAX_NBYTES if packed else None, True
    with suppress(zstandard.ZstdError, EOFError):
        while (left is None or left > 0) and (piece := file.readline(MAX_LINE_NBYTES)):
            left = None if left is None else left - len(piece)
            ends = piece.endswith(b"\n")
            if whole and (ends or len(piece) < MAX_LINE_NBYTES):
                yield piece
            whole = ends
