"""A disk that forgets: it records what a writer asks of the system, and enumerates what a crash may leave."""

import copy
import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

Choose = Callable[["Node"], Any]


class Node:
    """A file or folder: what is certainly on the disk, and what was only asked for since the last fsync."""

    def __init__(self, folder: bool) -> None:
        self.folder = folder
        self.names: dict[str, Node] = {}  # as the process sees it
        self.durable_names: dict[str, Node] = {}
        self.pending: list[tuple[tuple[str, Node | None], ...]] = []  # one item per name operation
        self.data, self.durable_data = b"", b""

    def sync(self) -> None:
        self.durable_names, self.pending, self.durable_data = dict(self.names), [], self.data

    def change(self, *changes: tuple[str, "Node | None"]) -> None:
        _apply(self.names, changes)
        self.pending.append(changes)


def _apply(names: dict[str, Node], changes: tuple[tuple[str, Node | None], ...]) -> None:
    for name, node in changes:
        if node is None:
            names.pop(name, None)
        else:
            names[name] = node


def _name_choices(node: Node) -> list[dict[str, Node]]:
    """Nothing since the last fsync; everything; or only one of the operations, out of order."""
    chosen = [[], node.pending, *([one] for one in node.pending)]
    results = []
    for operations in chosen:
        names = dict(node.durable_names)
        for changes in operations:
            _apply(names, changes)
        results.append(names)
    return results


def _data_choices(node: Node) -> list[bytes]:
    """Old data; half of the new; all of it; the new length filled with zeros."""
    old, new = node.durable_data, node.data
    return list(dict.fromkeys([old, new[: (len(old) + len(new)) // 2], new, old + b"\0" * (len(new) - len(old))]))


class RecordedDisk:
    """Patches ``os`` below ``root``; after each operation it keeps what a crash right then could leave."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch, *, honour_fsync: bool = True) -> None:
        self.root, self.honour_fsync = root, honour_fsync
        self.tree = Node(folder=True)
        self.history: list[tuple[str, Node]] = [("start", copy.deepcopy(self.tree))]
        self.open_files: dict[int, list[Any]] = {}  # descriptor -> [node, position]
        for name in (
            "open",
            "write",
            "fsync",
            "close",
            "lseek",
            "ftruncate",
            "mkdir",
            "rename",
            "replace",
            "unlink",
        ):
            monkeypatch.setattr(os, name, self._recording(name, getattr(os, name)))

    def _recording(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            result = real(*args, **kwargs)
            if not kwargs.get("dir_fd") and getattr(self, f"_{name}")(result, *args):
                self.history.append((name, copy.deepcopy(self.tree)))
            return result

        return call

    def _find(self, path: Any) -> tuple[Node, str] | None:
        try:
            parts = Path(path).relative_to(self.root).parts
        except (TypeError, ValueError):
            return None
        node = self.tree
        for part in parts[:-1]:
            node = node.names[part]
        return node, parts[-1] if parts else ""

    def _open(self, descriptor: int, path: Any, flags: int = 0, *_: Any) -> bool:
        if (place := self._find(path)) is None:
            return False
        parent, name = place
        node = parent.names.get(name) if name else self.tree
        created = node is None
        if node is None:
            node = Node(folder=False)
            parent.change((name, node))
        self.open_files[descriptor] = [node, 0]
        return created

    def _write(self, written: int, descriptor: int, data: Any) -> bool:
        if descriptor not in self.open_files:
            return False
        node, at = self.open_files[descriptor]
        node.data = node.data[:at] + bytes(data)[:written] + node.data[at + written :]
        self.open_files[descriptor][1] += written
        return True

    def _fsync(self, _: None, descriptor: int) -> bool:
        if self.honour_fsync and descriptor in self.open_files:
            self.open_files[descriptor][0].sync()
        return descriptor in self.open_files

    def _close(self, _: None, descriptor: int) -> bool:
        self.open_files.pop(descriptor, None)
        return False

    def _lseek(self, position: int, descriptor: int, *_: Any) -> bool:
        if descriptor in self.open_files:
            self.open_files[descriptor][1] = position
        return False

    def _ftruncate(self, _: None, descriptor: int, length: int) -> bool:
        node = self.open_files[descriptor][0]
        node.data = node.data[:length]
        return True

    def _mkdir(self, _: None, path: Any, *__: Any) -> bool:
        if place := self._find(path):
            place[0].change((place[1], Node(folder=True)))
        return place is not None

    def _rename(self, _: None, old: Any, new: Any) -> bool:
        if (source := self._find(old)) and (target := self._find(new)):
            assert source[0] is target[0], "only renames within one folder are atomic on every file system"
            target[0].change((source[1], None), (target[1], source[0].names[source[1]]))
            return True
        return False

    _replace = _rename

    def _unlink(self, _: None, path: Any, **__: Any) -> bool:
        if place := self._find(path):
            place[0].change((place[1], None))
        return place is not None

    def mark(self) -> int:
        """Number of operations so far: crashes at or after it come after what was done."""
        return len(self.history) - 1

    def crash_states(self, folder: Path) -> Iterator[tuple[int, Path]]:
        """Every modelled content of the disk after a crash, as (operations done, a real folder to read)."""
        numbers = itertools.count()
        for done, (_, tree) in enumerate(self.history):
            nodes = list(_reachable(tree))
            most_names = max((len(n.pending) for n in nodes), default=0) + 2
            for names, data in itertools.product(range(most_names), range(4)):
                target = folder / str(next(numbers))
                _materialise(tree, target, names, data)
                yield done, target


def _reachable(node: Node) -> Iterator[Node]:
    yield node
    for child in {**node.durable_names, **node.names}.values():
        yield from _reachable(child)


def _materialise(node: Node, path: Path, names: int, data: int) -> None:
    if not node.folder:
        choices = _data_choices(node)
        path.write_bytes(choices[min(data, len(choices) - 1)])
        return
    path.mkdir()
    name_choices = _name_choices(node)
    for name, child in name_choices[min(names, len(name_choices) - 1)].items():
        _materialise(child, path / name, names, data)


@pytest.fixture
def record_disk(tmp_path: Path) -> Iterator[Callable[..., RecordedDisk]]:
    """Start recording below ``tmp_path / "disk"``; several recordings in one test undo each other."""
    patches = []

    def start(**options: bool) -> RecordedDisk:
        for patch in patches:
            patch.undo()
        root = tmp_path / f"disk{len(patches)}"
        root.mkdir()
        patches.append(pytest.MonkeyPatch())
        return RecordedDisk(root, patches[-1], **options)

    start.stop = lambda: [patch.undo() for patch in patches]  # type: ignore[attr-defined]
    yield start
    for patch in patches:
        patch.undo()


@pytest.fixture
def fail_nth_call(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], Callable[[], int]]:
    """Let the n-th of the writer's calls to the system fail with an error number; returns a call counter."""

    def arm(nth: int, errno: int) -> Callable[[], int]:
        count = 0

        def wrap(real: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                nonlocal count
                count += 1
                if count == nth:
                    raise OSError(errno, os.strerror(errno))
                return real(*args, **kwargs)

            return call

        monkeypatch.undo()
        for name in ("open", "write", "fsync", "mkdir", "rename", "replace"):
            monkeypatch.setattr(os, name, wrap(getattr(os, name)))
        return lambda: count

    return arm


def some_tensors(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "anchor/0": torch.randn(5, generator=generator),
        "half": torch.randn(2, 2, generator=generator).bfloat16(),
        "step": torch.tensor(float(seed)),
        "empty": torch.empty(0, 3),
    }


@pytest.fixture
def tensors_of() -> Callable[[int], dict[str, Tensor]]:
    """Small tensors of several dtypes, a function of a number."""
    return some_tensors
