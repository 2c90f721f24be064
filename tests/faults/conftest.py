"""Swarms of real processes that are killed for real."""

from __future__ import annotations

import contextlib
import json
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from decentral.manifest import preset_manifest
from tests.faults.forks import Forks
from tests.kit.patience import PATIENCE, until


class Worker:
    """A peer process and everything it has said."""

    def __init__(self, forks: Forks, manifest: Path, out: Path, seed: int, join: str | None) -> None:
        invited = ["--join", join] if join else []
        self.process = forks.start("worker", manifest, "--out", out, "--seed", seed, *invited)
        self.lines: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self.rounds: dict[int, dict[str, Any]] = {}
        self.order: list[int] = []
        self.said: list[dict[str, Any]] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._errors = threading.Thread(target=self._drain, daemon=True)
        self._errors.start()
        self.stderr: list[str] = []
        self.daemons: list[psutil.Process] = []

    def _read(self) -> None:
        for line in self.process.stdout:
            self.lines.put(json.loads(line))

    def _drain(self) -> None:
        for line in self.process.stderr:
            self.stderr.append(line)

    def hear(self) -> None:
        while not self.lines.empty():
            said = self.lines.get()
            self.said.append(said)
            if said["event"] == "ready":
                with contextlib.suppress(psutil.NoSuchProcess):  # it was killed since
                    self.daemons = psutil.Process(self.process.pid).children(recursive=True)
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

    def tell(self, **order: str) -> None:
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()

    def steps(self) -> int:
        self.hear()
        return max((said["outer_step"] for said in self.rounds.values() if said["named"]), default=-1)

    def members(self) -> int:
        self.hear()
        return int(self.rounds[self.order[-1]]["members"])

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join()
        self._errors.join()
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            try:
                pipe.close()
            except BrokenPipeError:  # an order was still in the buffer of a peer that is dead
                continue
        self.hear()


class RealSwarm:
    """Every worker ever started stays known, so that the dead are compared, too."""

    def __init__(self, forks: Forks, folder: Path, preset: str) -> None:
        self.forks, self.folder = forks, folder
        limits = {"deadline_floor": 1.0, "deadline_ceiling": 6.0, "lease": 6.0, "shrink_after": 8.0, "min_peers": 1}
        manifest = preset_manifest(preset, run={"rounds": 100_000, "salt": "faults"}, swarm=limits)
        self.manifest = folder / "run.toml"
        self.manifest.write_text(manifest.to_toml())
        self.workers: list[Worker] = []

    def add(self) -> Worker:
        number = len(self.workers)
        join = self.alive()[0].ready()["invite"] if self.workers else None
        self.workers.append(Worker(self.forks, self.manifest, self.folder / f"peer{number}", number, join))
        return self.workers[-1]

    def alive(self) -> list[Worker]:
        return [worker for worker in self.workers if worker.process.poll() is None]

    def kill_one(self, phase: str) -> None:
        """Whoever reaches the phase first dies there."""
        before = self.alive()
        for worker in before:
            worker.tell(die=phase, token=str(self.folder / phase.replace(" ", "-")))
        until(lambda: any(worker.process.poll() is not None for worker in before))
        dead = [worker for worker in before if worker.process.poll() is not None]
        assert [worker.process.returncode for worker in dead] == [-signal.SIGKILL], phase

    def settle(self) -> None:
        """Wait until the newest takes part and so many of the dead are forgotten that one more death is survived."""
        for worker in self.alive():
            worker.wait_for(lambda w: w.steps() >= 0, "it takes part")
            worker.wait_for(lambda w: w.members() <= len(self.alive()) + 1, "the dead are forgotten")

    def go_on(self, count: int) -> None:
        """Those who take part now commit ``count`` outer steps more."""
        survivors = [worker for worker in self.alive() if worker.steps() >= 0]
        goal = max(worker.steps() for worker in survivors) + count
        for worker in survivors:
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


@pytest.fixture(scope="session")
def forks() -> Iterator[Forks]:
    forks = Forks()
    yield forks
    forks.end()


@pytest.fixture
def real_swarm(tmp_path: Path, forks: Forks) -> Iterator[Callable[[str], RealSwarm]]:
    swarms: list[RealSwarm] = []

    def make(preset: str) -> RealSwarm:
        swarms.append(RealSwarm(forks, tmp_path, preset))
        return swarms[-1]

    yield make
    for swarm in swarms:
        swarm.end()
    daemons = [daemon for swarm in swarms for worker in swarm.workers for daemon in worker.daemons]
    assert daemons
    _, left = psutil.wait_procs(daemons, timeout=PATIENCE)
    assert not left, f"daemons outlived their peers: {left}"
