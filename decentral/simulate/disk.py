"""A disk that remembers what it was asked and forgets what it never promised to keep.

``RecordingDisk`` works in a real folder, without a single real fsync: what a power cut may leave is known from its
record, so a test lists those states and a simulator puts one of them into the folder (``crash``) and starts the peer
again. A killed process loses nothing: keep the disk as it is. Memory: what lies in the folder, once more.
"""

from __future__ import annotations

import itertools
import math
import os
import random
import shutil
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias

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
            materialise(tree, self.root, self._model.all_kept())
            self.base, self._model, self.log = tree, all_durable(tree), []

    def all_kept(self) -> Names:
        """Return what lies in the folder as long as the power stays on."""
        return self._model.all_kept()

    def make_folder(self, path: Path) -> None:
        """Do what ``Disk.make_folder`` says."""
        self.carry_out(Operation("make folder", self._parts(path)))

    def write(self, path: Path, parts: Iterable[bytes | memoryview], at: int | None = None) -> None:
        """Do what ``Disk.write`` says; creating, each part and the fsync are operations of their own."""
        name, end = self._parts(path), at or 0
        if at is None:
            self.carry_out(Operation("create", name))
        for part in parts:
            data = bytes(memoryview(part).cast("B"))
            self.carry_out(Operation("write", name, at=end, data=data))
            end += len(data)
        self.carry_out(Operation("sync file", name))

    def truncate(self, path: Path, nbytes: int) -> None:
        """Do what ``Disk.truncate`` says."""
        self.carry_out(Operation("truncate", self._parts(path), at=nbytes))
        self.carry_out(Operation("sync file", self._parts(path)))

    def rename(self, old: Path, new: Path) -> None:
        """Do what ``Disk.rename`` says."""
        self.carry_out(Operation("rename", self._parts(old), self._parts(new)))

    def remove(self, path: Path) -> None:
        """Do what ``Disk.remove`` says; what is in a folder goes first, file by file."""
        if path.is_dir():
            for inner in sorted(path.iterdir()):
                self.remove(inner)
        if path.exists():
            self.carry_out(Operation("remove", self._parts(path)))

    def sync_folder(self, path: Path) -> None:
        """Do what ``Disk.sync_folder`` says."""
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
            os.mkdir(path, 0o700)
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


# ---- the state after a power cut ----
#
# The promises of POSIX, and nothing that one file system adds to them.
#
# Data that no fsync of the file followed may be lost, cut at any byte, or arrive sector by sector with zeros in the
# gaps. Names (created, renamed, removed) that no fsync of their folder followed may be lost, each by itself; a rename
# happens or does not. An fsync of a file makes no promise about its name, one of a folder none about what its files
# hold.
#
# Source: Pillai et al., "All File Systems Are Not Created Equal: On the Complexity of Crafting Crash-Consistent
# Applications" (ALICE), OSDI 2014, section 4.

SECTOR = 512  # bytes that a drive writes whole or not at all
MANY_NAMES = 8  # unsynced names of one folder beyond which subsets are drawn instead of listed

Parts: TypeAlias = tuple[str, ...]  # a path below the recorded folder
Names: TypeAlias = "tuple[tuple[str, bytes | Names], ...]"  # what lies in a folder, sorted; a folder's are Names again
Call = Literal["make folder", "create", "write", "truncate", "sync file", "rename", "remove", "sync folder"]


@dataclass(frozen=True, slots=True)
class Operation:
    """A thing asked of the system; the power may fail after each."""

    call: Call
    path: Parts
    to: Parts = ()  # the new name of a rename
    at: int = 0  # first byte of a write; length after a truncate
    data: bytes = b""


@dataclass(slots=True)
class File:
    """A file's bytes at its last fsync, and what was asked of it since."""

    durable: bytes = b""
    pending: list[Operation] = field(default_factory=list)

    @property
    def live(self) -> bytes:
        """Return what a reader sees as long as the power stays on."""
        return _write(self.durable, self.pending)

    def all_kept(self) -> bytes:
        """Return what is there when nothing is lost."""
        return self.live

    def all_lost(self) -> bytes:
        """Return what is there when all is lost that may be."""
        return self.durable

    def possible(self, cuts: int) -> list[bytes]:
        """Contents after a power cut: old, new, tears, zeros instead of data, and any one sector missing."""
        if not self.pending:
            return [self.durable]
        found = [self.durable]
        for done, last in enumerate(self.pending):
            before = _write(self.durable, self.pending[:done])
            found += [_write(before, [_cut(last, nbytes)]) for nbytes in _cuts(last, cuts)]
        live = self.live
        found.append(self.durable + bytes(max(0, len(live) - len(self.durable))))
        found += [_without_sector(live, self.durable, start) for start in range(0, len(live), SECTOR)]
        return list(dict.fromkeys([*found, live]))

    def drawn(self, rng: random.Random) -> bytes:
        """Draw a content after a power cut: sectors old or new as they fall, perhaps cut at some new byte."""
        live, lost = self.live, bytes(max(len(self.durable), len(self.live)))
        if not self.pending or rng.random() < 0.25:
            return live if rng.random() < 0.5 else self.durable
        old = self.durable + lost[len(self.durable) :]
        new = live + lost[len(live) :]
        starts = range(0, len(lost), SECTOR)
        mixed = b"".join((old if rng.random() < 0.5 else new)[start : start + SECTOR] for start in starts)
        return mixed[: rng.randint(min(len(self.durable), len(live)), len(mixed))]


@dataclass(slots=True)
class Folder:
    """A folder's names at its last fsync, and the changes since, each a set of names that change at once."""

    durable: dict[str, File | Folder] = field(default_factory=dict)
    pending: list[dict[str, File | Folder | None]] = field(default_factory=list)
    live: dict[str, File | Folder] = field(init=False)  # the names as long as the power stays on

    def __post_init__(self) -> None:
        self.live = dict(self.durable)

    def change(self, names: dict[str, File | Folder | None]) -> None:
        """Names that change at once; None: there is none any more."""
        self.pending.append(names)
        for name, node in names.items():
            if node is None:
                self.live.pop(name, None)
            else:
                self.live[name] = node

    def sync(self) -> None:
        """The names are durable."""
        self.durable, self.pending = dict(self.live), []

    def all_kept(self) -> Names:
        """Return what is there when nothing is lost."""
        return tuple(sorted((name, node.all_kept()) for name, node in self.live.items()))

    def all_lost(self) -> Names:
        """Return what is there when all is lost that may be."""
        return tuple(sorted((name, node.all_lost()) for name, node in self.durable.items()))

    def possible(self, cuts: int) -> Iterator[Names]:
        """Every subset of the unsynced changes of names, times everything that may be under those names."""
        for kept in itertools.product((False, True), repeat=len(self.pending)):
            names = self._names_after([change for change, keep in zip(self.pending, kept, strict=True) if keep])
            contents: list[Iterable[bytes | Names]] = [node.possible(cuts) for node in names.values()]
            for inner in itertools.product(*contents):
                yield tuple(sorted(zip(names, inner, strict=True)))

    def count(self, cuts: int) -> float:
        """How many ``possible`` yields at most."""
        if len(self.pending) > MANY_NAMES:
            return math.inf
        named = itertools.chain(self.durable.values(), *(change.values() for change in self.pending))
        nodes = {id(node): node for node in named if node is not None}
        sizes = (len(node.possible(cuts)) if isinstance(node, File) else node.count(cuts) for node in nodes.values())
        return 2.0 ** len(self.pending) * math.prod(sizes)

    def drawn(self, rng: random.Random) -> Names:
        """Draw a state after a power cut."""
        keep = rng.random()
        names = self._names_after([change for change in self.pending if rng.random() < keep])
        return tuple(sorted((name, node.drawn(rng)) for name, node in names.items()))

    def _names_after(self, changes: Sequence[dict[str, File | Folder | None]]) -> dict[str, File | Folder]:
        names: dict[str, File | Folder | None] = dict(self.durable)
        for change in changes:
            names |= change
        return {name: node for name, node in names.items() if node is not None}


def apply(root: Folder, operation: Operation) -> None:
    """Carry an operation out on the model. It must have succeeded on the disk, so its path is there."""
    *parents, name = operation.path or ("",)
    folder = _folder(root, parents)
    if operation.call == "make folder":
        folder.change({name: Folder()})
    elif operation.call == "create":
        folder.change({name: File()})
    elif operation.call == "rename":
        assert list(operation.to[:-1]) == parents, "only a rename within one folder is atomic on every file system"
        folder.change({name: None, operation.to[-1]: folder.live[name]})
    elif operation.call == "remove":
        folder.change({name: None})
    elif operation.call == "sync folder":
        _folder(root, operation.path).sync()
    else:
        file = folder.live[name]
        assert isinstance(file, File)
        if operation.call == "sync file":
            file.durable, file.pending = file.live, []
        else:
            file.pending.append(operation)


@dataclass(frozen=True, slots=True)
class CrashState:
    """A state that a power cut after ``done`` operations may leave."""

    done: int
    tree: Names


def crash_states(
    operations: Sequence[Operation], base: Names = (), *, limit: int = 256, cuts: int = 24, seed: int = 0
) -> Iterator[CrashState]:
    """Every state that a power cut before, between or after the operations may leave, each once for one point.

    One write is cut at ``cuts`` places, evenly spread, and at the sectors; a shorter one at every byte. Beyond
    ``limit`` states at one point, ``limit`` are drawn (the same for the same seed), and the two ends are among them:
    nothing since the last fsync, and everything.
    """
    root, rng = all_durable(base), random.Random(seed)
    for done in range(len(operations) + 1):
        if done:
            apply(root, operations[done - 1])
        if root.count(cuts) <= limit:
            trees = set(root.possible(cuts))
        else:
            trees = {root.drawn(rng) for _ in range(limit)} | {root.all_kept(), root.all_lost()}
        yield from (CrashState(done, tree) for tree in sorted(trees, key=repr))


def materialise(tree: Names, folder: Path, old: Names = ()) -> None:
    """Write a state into a folder that holds ``old``, touching only what differs."""
    wanted, there = dict(tree), dict(old)
    for name, inner in there.items():
        if type(wanted.get(name)) is not type(inner):
            _remove(folder / name)
    for name, inner in wanted.items():
        before = there.get(name)
        if isinstance(inner, bytes):
            (folder / name).write_bytes(inner) if inner != before else None
            continue
        (folder / name).mkdir(exist_ok=True)
        materialise(inner, folder / name, before if isinstance(before, tuple) else ())


def scan(folder: Path) -> Names:
    """Return what lies in a folder now."""
    inner = ((path.name, scan(path) if path.is_dir() else path.read_bytes()) for path in folder.iterdir())
    return tuple(sorted(inner))


def all_durable(tree: Names) -> Folder:
    """The model of a folder of which nothing can be lost."""
    return Folder({name: File(inner) if isinstance(inner, bytes) else all_durable(inner) for name, inner in tree})


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


def _folder(root: Folder, parts: Sequence[str]) -> Folder:
    for part in parts:
        found = root.live[part]
        assert isinstance(found, Folder)
        root = found
    return root


def _write(data: bytes, operations: Sequence[Operation]) -> bytes:
    result = bytearray(data)
    for operation in operations:
        if operation.call == "truncate":
            del result[operation.at :]
            result.extend(bytes(operation.at - len(result)))
        else:
            result.extend(bytes(max(0, operation.at - len(result))))
            result[operation.at : operation.at + len(operation.data)] = operation.data
    return bytes(result)


def _cuts(operation: Operation, cuts: int) -> list[int]:
    """How many bytes of a write arrive; a truncate happens or does not."""
    nbytes = len(operation.data)
    sectors = range(-operation.at % SECTOR, nbytes, SECTOR)
    return sorted({*range(0, nbytes, max(1, nbytes // cuts)), *sectors, max(0, nbytes - 1), nbytes})


def _cut(operation: Operation, nbytes: int) -> Operation:
    return Operation(operation.call, operation.path, at=operation.at, data=operation.data[:nbytes])


def _without_sector(live: bytes, durable: bytes, start: int) -> bytes:
    end = min(start + SECTOR, len(live))
    return live[:start] + durable[start:end].ljust(end - start, b"\0") + live[end:]
