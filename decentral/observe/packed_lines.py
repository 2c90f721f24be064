"""Files of lines that grow no more, as zstd: a quarter of the bytes or less, and ``zstd -dc FILE | grep`` reads them.

A reader's memory is bounded whatever a damaged file says: by the window, by the longest line and by what all may expand
to. Lines before the damage are read, and ``Damage`` says what was not.
"""

import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
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
_PACKED_AT_ONCE = 2**12  # bytes: how finely it is known what share was read
_CUT_SHORT = "it ends inside a line"


@dataclass(frozen=True, slots=True)
class Damage:
    """Why a packed file was not read to its end, and what was."""

    num_lines: int
    share: float  # of the packed bytes, those that were looked at
    why: str

    def __str__(self) -> str:
        return f"{self.why}; {self.num_lines:,} lines were read, of at most {self.share:.0%} of its bytes, and no more"


def pack_lines(path: Path, disk: Disk = DISK) -> Path:
    """Put ``path`` plus ``SUFFIX`` in its place. A crash leaves the one, the other, or both with the same lines.

    Raises DiskError: ``path`` is as before.
    """
    packed = path.with_name(path.name + SUFFIX)
    with disk_errors(f"packing {path}"):
        with path.open("rb") as file:
            disk.replace_file(packed, zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True).read_to_iter(file))
        packed.chmod(path.stat().st_mode)  # who may read the logs still may
        disk.remove(path)
    return packed


def lines_of(
    file: IO[bytes], *, packed: bool, on_damage: Callable[[Damage], None] = lambda damage: None
) -> Iterator[bytes]:
    """Every line of an open file, packed or not, with its newline; longer ones than are ever written are left out."""
    whole = True
    for piece in _unpacked(file, on_damage) if packed else _pieces(file):
        ends = piece.endswith(b"\n")
        if whole and (ends or len(piece) < MAX_LINE_NBYTES):
            yield piece
        whole = ends


def _pieces(file: IO[bytes]) -> Iterator[bytes]:
    """Lines, the longest in parts."""
    return iter(lambda: file.readline(MAX_LINE_NBYTES), b"")


def _unpacked(file: IO[bytes], on_damage: Callable[[Damage], None]) -> Iterator[bytes]:
    """The same of a packed file, as far as it goes; what was packed ends with a whole line."""
    reader = zstandard.ZstdDecompressor(max_window_size=_WINDOW).stream_reader(
        file, read_size=_PACKED_AT_ONCE, read_across_frames=True, closefd=False
    )
    num_lines, left, why = 0, MAX_NBYTES, _CUT_SHORT
    try:
        for piece in _pieces(io.BufferedReader(reader, _AT_ONCE)):
            yield piece
            ends = piece.endswith(b"\n")
            num_lines, left, why = num_lines + ends, left - len(piece), "" if ends else _CUT_SHORT
            if left <= 0:
                why = f"it expands to more than {MAX_NBYTES >> 20} MiB"
                break
    except (zstandard.ZstdError, EOFError) as error:
        why = str(error)
    if why:
        on_damage(Damage(num_lines, file.tell() / max(1, file.seek(0, io.SEEK_END)), why))
