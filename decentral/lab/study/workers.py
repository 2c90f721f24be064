"""Processes that run cells, one thread each. One that dies takes its cell with it, and nothing else.

They end with whoever started them, however that one ends: each watches its parent.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Self

from decentral.lab.runs.cell import Cell
from decentral.lab.runs.running import Outcome, failed

__all__ = ["Workers"]

Run = Callable[[Cell], Outcome]

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
            outcome = failed(
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
    """Who is started here never hears what terminals and services send to all: who was asked ends the others.

    A worker that ended first would look as if its cell had failed.
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
    """What a worker does all its life."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    import torch

    torch.set_num_threads(1)
    with contextlib.suppress(EOFError, OSError):
        while True:
            line.send(run(line.recv()))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "workers are started by one"
    parent.join()
    os._exit(1)
