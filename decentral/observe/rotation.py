"""Full files of lines beside the one that grows: ``x.1.jsonl.zst`` was put aside last, ``x.3.jsonl.zst`` is the oldest.

Each is packed after it was put aside. Until then, and where packing failed, it lies plain as ``x.1.jsonl``. A crash may
leave both; the plain one counts, since nothing was ever done to it.
"""

import logging
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from decentral.errors import DiskError
from decentral.observe.packed_lines import MAX_NBYTES, SUFFIX, Damage, lines_of, pack_lines
from decentral.state.durable import DISK, TEMPORARY, Disk

logger = logging.getLogger("decentral.observe")

KEPT = 3  # full files beside the one that grows


def put_aside(path: Path, disk: Disk = DISK) -> None:
    """Give each file the next number, the oldest first, and remove the one that had the last.

    Cut off anywhere, by a crash or an OSError, every file has its old number or the next, and no two have the same.
    """
    for number in range(1, KEPT + 1):
        plain, packed = _forms(path, number)
        if plain.exists():
            disk.remove(packed)  # left by a crash, of the same lines: moved one after the other, they would be two
    _move_up(path, 0, disk)


def _move_up(path: Path, number: int, disk: Disk) -> None:
    there = [form for form in _forms(path, number) if form.exists()]
    if there and number < KEPT:
        _move_up(path, number + 1, disk)
    for form in there:
        if number == KEPT:
            disk.remove(form)
        else:
            disk.rename(form, _forms(path, number + 1)[form.suffix == SUFFIX])


def pack_put_aside(path: Path, disk: Disk = DISK) -> None:
    """Pack what was put aside and lies plain, as far as the disk lets it. Never while ``put_aside`` renames."""
    with suppress(OSError, DiskError):
        disk.sync_folder(path.parent)  # or a power cut may leave the new name packed, and the old one
        for left in path.parent.glob(f"{TEMPORARY}{path.stem}.*{SUFFIX}"):
            disk.remove(left)  # half-written by a killed process
        for number in range(1, KEPT + 1):
            plain = _numbered(path, number)
            if plain.exists() and plain.stat().st_size <= MAX_NBYTES:  # more of a packed one is not read
                pack_lines(plain, disk)


@dataclass(frozen=True)
class Opened:
    """One open file of lines."""

    path: Path
    file: IO[bytes]

    def lines(self) -> Iterator[bytes]:
        """Every line, from the first on."""
        self.file.seek(0)
        return lines_of(self.file, packed=self.path.suffix == SUFFIX, on_damage=self._tell)

    def _tell(self, damage: Damage) -> None:
        logger.warning("%s is damaged: %s", self.path, damage)

    def first_line(self) -> bytes:
        """Tells one file from another, whatever its name and form; empty if there is none."""
        return next(self.lines(), b"")


def opened(path: Path, stack: ExitStack) -> list[Opened]:
    """All files of ``path`` as they are at one moment, newest first; open, they are read to their end whatever comes.

    Renamed or packed between two looks, a file would be met twice, or never: then all are looked at anew.
    """
    while True:  # filling a file takes minutes, this takes microseconds
        with ExitStack() as attempt, suppress(FileNotFoundError):
            before = there(path)
            files = [Opened(name, attempt.enter_context(name.open("rb"))) for name in before]
            if there(path) == before:
                stack.enter_context(attempt.pop_all())
                return files


def there(path: Path) -> dict[Path, tuple[int, int]]:
    """The name of each file of ``path``, newest first, and what stays of it when it is renamed."""
    found: dict[Path, tuple[int, int]] = {}
    for number in range(KEPT + 1):
        for form in _forms(path, number):
            with suppress(FileNotFoundError):
                status = form.stat()
                found[form] = (status.st_dev, status.st_ino)
                break
    return found


def _forms(path: Path, number: int) -> tuple[Path, ...]:
    """Where the ``number``-th last file may lie, first the form that counts; the one that grows is never packed."""
    plain = _numbered(path, number)
    return (plain, plain.with_name(plain.name + SUFFIX)) if number else (plain,)


def _numbered(path: Path, number: int) -> Path:
    return path.with_suffix(f".{number}{path.suffix}") if number else path
