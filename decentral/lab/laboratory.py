"""The run of a study, from its plan to all its cells: what is there is kept, what is wanted is run, until the plan
wants nothing more.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import torch

from decentral.errors import UsageError
from decentral.lab.cells import Cell
from decentral.lab.plan import Plan
from decentral.lab.running import Outcome, failure
from decentral.state.durable import DISK, Disk, disk_errors

__all__ = ["Here", "Memory", "Progress", "Runner", "Store", "Workers", "end_with_parent", "run_study"]


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a study is, after a cell."""

    done: int
    of: int
    told: str  # of the last cell

    @classmethod
    def after(cls, done: int, size: int, cell: Cell, outcome: Outcome) -> Progress:
        """``size``: as many as were expected beforehand."""
        manifest = cell.manifest
        what = manifest.outer.method if cell.kind == "swarm" else f"{cell.kind} {manifest.inner.optimizer_name}"
        end = f"{outcome.loss:.4f}" if outcome.loss is not None else f"{outcome.status} {outcome.reason}".strip()
        told = f"{what}, {manifest.inner.learning_rate:g}, seed {manifest.run.seed}: {end} in {outcome.seconds:.1f} s"
        return cls(done, max(size, done), told)


def run_study(
    plan: Plan, store: Store | Memory, workers: Runner, on_progress: Callable[[Progress], None] = lambda progress: None
) -> dict[str, Outcome]:
    """Run what is missing; what all the study's cells came to, and others that the folder holds. DiskError."""
    known = store.known()
    size = plan.size()
    while True:
        running = workers.running
        wanted = [cell for cell in plan.due_cells(known) if cell.id not in running]
        for cell in wanted[: workers.idle]:
            workers.give(cell)
        if not workers.running:
            return known
        for cell, outcome in workers.take():
            store.keep(cell, outcome)
            known[cell.id] = outcome
            on_progress(Progress.after(plan.done(known), size, cell, outcome))


Run = Callable[[Cell], Outcome]


class Runner(Protocol):
    """Give cells, take outcomes."""

    @property
    def running(self) -> list[str]:
        """Ids of the cells that are being run."""
        ...

    @property
    def idle(self) -> int:
        """Cells that can be given now."""
        ...

    def give(self, cell: Cell) -> None:
        """Have it run."""
        ...

    def take(self) -> list[tuple[Cell, Outcome]]:
        """Wait until one is over."""
        ...


# ---- cells that are there ----
#
# A line each, written whole or taken for not there, and never run again.
#
# One file, small enough to be committed with the report: a clone goes on where another machine ended. While a study
# runs its process has the file locked: two that ran one study would each run every cell.

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
        if not _try_lock(self._lock):
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
        """Return the outcomes that are there, by id; a line that is no record, as one that a power cut left, is as if
        it was not there.
        """
        with disk_errors(f"reading {self._path}"):
            lines = self._path.read_bytes().splitlines() if self._path.exists() else []
        return dict(found for found in map(_read_record, lines) if found is not None)

    def keep(self, cell: Cell, outcome: Outcome) -> None:
        """Add one. DiskError where it cannot be."""
        record = {"id": cell.id, "cell": cell.as_json, **outcome.to_json()}
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


class Memory:
    """A store of a study that leaves nothing behind."""

    def __init__(self) -> None:
        self._known: dict[str, Outcome] = {}

    def known(self) -> dict[str, Outcome]:
        """Return the outcomes that are there, by id."""
        return dict(self._known)

    def keep(self, cell: Cell, outcome: Outcome) -> None:
        """Add one."""
        self._known[cell.id] = outcome


def _read_record(line: bytes) -> tuple[str, Outcome] | None:
    try:
        record: dict[str, Any] = json.loads(line)
        return str(record["id"]), Outcome.from_json(record)
    except (ValueError, KeyError, TypeError):
        return None


def _try_lock(descriptor: int) -> bool:
    """Lock the file and return whether it is this process's now."""
    try:
        import fcntl
    except ImportError:  # Windows: nobody is kept out
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


# ---- this process, which runs cells itself ----


class Here:
    """A runner of one cell after the other, in one thread of torch as workers have: sums in several round otherwise."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._given: list[Cell] = []

    @property
    def running(self) -> list[str]:
        """Ids of the cells that were given."""
        return [cell.id for cell in self._given]

    @property
    def idle(self) -> int:
        """Cells that can be given now."""
        return 1 - len(self._given)

    def give(self, cell: Cell) -> None:
        """Keep it until it is taken."""
        self._given.append(cell)

    def take(self) -> list[tuple[Cell, Outcome]]:
        """Run the cell."""
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return [(cell := self._given.pop(), self._run(cell))]
        finally:
            torch.set_num_threads(threads)


# ---- processes that run cells ----
#
# One thread each. One that dies takes its cell with it, and nothing else. They end with whoever started them, however
# that one ends: each watches its parent.

_END_SECONDS = 5.0  # from the end of its line to that of the process, at most


@dataclass(slots=True)
class _Worker:
    process: BaseProcess
    line: Connection
    cell: Cell | None = None


class Workers:
    """Give cells, take outcomes. ``run`` is sent to each process by its name: a function of a module."""

    def __init__(self, count: int, run: Run) -> None:
        self._run, self._count = run, count
        self._context = multiprocessing.get_context("spawn")
        self._workers: list[_Worker] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for worker in self._workers:
            worker.process.kill()  # it writes nothing that could be half
        for worker in self._workers:
            worker.process.join()
            worker.line.close()
            worker.process.close()
        self._workers.clear()

    @property
    def running(self) -> list[str]:
        """Ids of the cells that are being run."""
        return [worker.cell.id for worker in self._workers if worker.cell is not None]

    @property
    def idle(self) -> int:
        """Cells that can be given now."""
        return self._count - len(self.running)

    def give(self, cell: Cell) -> None:
        """Run it in a process that has nothing to do, or in a new one."""
        free = next((worker for worker in self._workers if worker.cell is None), None) or self._new()
        free.cell = cell
        with contextlib.suppress(OSError):  # it died: its end is found by take
            free.line.send(cell)

    def take(self) -> list[tuple[Cell, Outcome]]:
        """Wait until one is over."""
        busy = [worker for worker in self._workers if worker.cell is not None]
        ready = set(wait([worker.line for worker in busy]))
        return [self._over(worker) for worker in busy if worker.line in ready]

    def _over(self, worker: _Worker) -> tuple[Cell, Outcome]:
        cell, worker.cell = worker.cell, None
        assert cell is not None, "only busy ones are waited for"
        try:
            outcome: Outcome = worker.line.recv()
        except (EOFError, OSError):
            worker.process.join(_END_SECONDS)
            outcome = failure(
                f"its process ended with code {worker.process.exitcode}; the kernel ends what takes memory"
            )
            self._workers.remove(worker)
        return cell, outcome

    def _new(self) -> _Worker:
        mine, its = self._context.Pipe()
        process = self._context.Process(target=_serve, args=(its, self._run), daemon=True)
        with _deaf():
            process.start()
        its.close()
        self._workers.append(_Worker(process, mine))
        return self._workers[-1]


@contextlib.contextmanager
def _deaf() -> Iterator[None]:
    """Start processes in the block that never hear the signals which terminals and services send to all.

    This process ends them. A worker that ended first would look as if its cell had failed.
    """
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _serve(line: Connection, run: Run) -> None:
    """Run cells for as long as the worker lives."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    with contextlib.suppress(EOFError, OSError):
        while True:
            line.send(run(line.recv()))


def end_with_parent() -> None:
    """End this process when its parent has ended, however that was; for a thread of its own."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "workers are started by one"
    parent.join()
    os._exit(1)
