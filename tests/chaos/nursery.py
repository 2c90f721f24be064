"""The harness' side of the zygote: start a worker, hear which have ended."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import uuid
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from decentral.cli.demo_processes import MARK
from decentral.errors import DecentralError
from tests.kit.processes import end_all, marked

LOADING = 180.0  # s for the imports of the zygote on a laden machine: 10 s of CPU
FORKING = 20.0  # s until a worker's process id is known


class Nursery:
    """Owns the zygote, and through its mark every process of this run. Leaving ends them all."""

    def __init__(self, folder: Path) -> None:
        self.mark = uuid.uuid4().hex
        self.strays: list[str] = []
        self._news: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._kept: list[dict[str, Any]] = []
        self._log = (folder / "zygote.txt").open("w")

    def __enter__(self) -> Self:
        threads = {name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.chaos.zygote", str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={**os.environ, **threads, MARK: self.mark, "TOKENIZERS_PARALLELISM": "false"},
            start_new_session=True,  # Ctrl-C reaches the harness alone
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        if self._wait_for("ready", LOADING)["threads"] != 1:
            raise DecentralError("the zygote has threads: a fork of it could hang; see what the imports start")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        end_all(marked(self.mark), timeout=10)
        self._process.wait()
        self._reader.join()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._log.close()

    def start(self, order: dict[str, Any]) -> int:
        """Fork a worker; returns its process id."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return int(self._wait_for("started", FORKING)["pid"])

    def ended(self, timeout: float) -> dict[str, Any] | None:
        """The next worker that ended (pid, code), waiting for at most ``timeout`` seconds."""
        if self._kept:
            return self._kept.pop(0)
        try:
            return self._news.get(timeout=max(timeout, 0.001))
        except queue.Empty:
            return None

    def others(self, pids: set[int]) -> list[str]:
        """Living processes of this run besides the zygote and ``pids``."""
        known = pids | {self._process.pid}
        return [f"{p.pid} {p.name()}" for p in marked(self.mark) if p.pid not in known]

    def _wait_for(self, event: str, timeout: float) -> dict[str, Any]:
        while True:
            try:
                news = self._news.get(timeout=timeout)
            except queue.Empty:
                raise DecentralError(f"the zygote did not say {event} within {timeout:g} s; see zygote.txt") from None
            if news["event"] == event:
                return news
            self._kept.append(news)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._news.put(json.loads(line))
