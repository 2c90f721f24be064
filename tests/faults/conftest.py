"""Swarms of real processes that are killed for real."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from decentral.manifest import preset_manifest

WORKER = Path(__file__).parent / "worker.py"
PATIENCE = 60.0  # s for one step of a script: a shared two-core machine starts a peer in about 5 s


class Worker:
    """A peer process and everything it has said."""

    def __init__(self, manifest: Path, out: Path, seed: int, join: str | None) -> None:
        command = [sys.executable, str(WORKER), str(manifest), "--out", str(out), "--seed", str(seed)]
        command += ["--join", join] if join else []
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self.lines: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self.rounds: dict[int, dict[str, Any]] = {}
        self.order: list[int] = []
        self.said: list[dict[str, Any]] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._errors = threading.Thread(target=self._drain, daemon=True)
        self._errors.start()
        self.stderr: list[str] = []

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.put(json.loads(line))

    def _drain(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.stderr.append(line)

    def hear(self) -> None:
        while not self.lines.empty():
            said = self.lines.get()
            self.said.append(said)
            if said["event"] == "round":
                self.order.append(said["round"])
                self.rounds[said["round"]] = said

    def wait_for(self, what: Callable[[Worker], object], why: str) -> Any:
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            self.hear()
            if found := what(self):
                return found
            if self.process.poll() is not None:
                break
            threading.Event().wait(0.02)
        raise AssertionError(f"{why}: not within {PATIENCE} s; it ended with {self.process.poll()}: {self.stderr[-5:]}")

    def ready(self) -> dict[str, Any]:
        return self.wait_for(lambda w: next((s for s in w.said if s["event"] == "ready"), None), "peer starts")

    def order_to(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def steps(self) -> int:
        self.hear()
        return max((said["outer_step"] for said in self.rounds.values() if said["named"]), default=-1)

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._reader.join()
        self._errors.join()
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            assert pipe is not None
            try:
                pipe.close()
            except BrokenPipeError:  # an order was still in the buffer of a peer that is dead
                continue
        self.hear()


class RealSwarm:
    """Founder first; every worker ever started stays known, so that the dead are compared, too."""

    def __init__(self, folder: Path, preset: str) -> None:
        self.folder = folder
        limits = {"deadline_floor": 1.0, "deadline_ceiling": 6.0, "lease": 6.0, "shrink_after": 8.0, "min_peers": 1}
        manifest = preset_manifest(preset, run={"rounds": 100_000, "salt": "faults"}, swarm=limits)
        self.manifest = folder / "run.toml"
        self.manifest.write_text(manifest.to_toml())
        self.workers: list[Worker] = []

    def add(self) -> Worker:
        number = len(self.workers)
        join = self.workers[0].ready()["invite"] if self.workers else None
        self.workers.append(Worker(self.manifest, self.folder / f"peer{number}", number, join))
        return self.workers[-1]

    def alive(self) -> list[Worker]:
        return [worker for worker in self.workers if worker.process.poll() is None]

    def wait_for_members(self, count: int) -> None:
        for worker in self.alive():
            worker.wait_for(
                lambda w: w.order and w.rounds[w.order[-1]]["members"] == count and w.steps() >= 0, f"{count} members"
            )

    def go_on(self, count: int) -> None:
        goal = max(worker.steps() for worker in self.alive()) + count
        for worker in self.alive():
            worker.wait_for(lambda w: w.steps() >= goal, f"outer step {goal}")

    def check(self) -> None:
        digests: dict[int, str] = {}
        for worker in self.workers:
            worker.hear()
            assert worker.order == sorted(set(worker.order)), "a round was applied twice or out of order"
            for round_, said in worker.rounds.items():
                assert digests.setdefault(round_, said["digest"]) == said["digest"], f"round {round_} differs"

    def end(self) -> None:
        for worker in self.workers:
            worker.end()


@pytest.fixture
def real_swarm(tmp_path: Path) -> Iterator[Callable[[str], RealSwarm]]:
    swarms: list[RealSwarm] = []
    before = {p.pid for p in psutil.process_iter() if p.name() == "p2pd"}

    def make(preset: str) -> RealSwarm:
        swarms.append(RealSwarm(tmp_path, preset))
        return swarms[-1]

    yield make
    for swarm in swarms:
        swarm.end()
    strays = [p for p in psutil.process_iter() if p.name() == "p2pd" and p.pid not in before]
    _, left = psutil.wait_procs(strays, timeout=10)
    assert not left, f"daemons outlived their peers: {left}"
