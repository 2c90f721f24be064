"""Two peers that are restarted together, as after a power cut: real processes and daemons, no local network."""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any

import pytest

from decentral.manifest import Manifest
from decentral.node.folder import Addresses, read_addresses
from decentral.swarm.directory import Directory
from tests.kit.patience import PATIENCE
from tests.kit.problems import Problem, joined, run_terms

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload([__name__])  # torch is imported once, and not by each of 14 processes
LEASE = 60.0  # s
SOON = 10.0  # s, a sixth of the lease: it takes less than one, and not much more with a queue of ten
NOBODY = threading.Event()  # is set by nobody


async def looking(directory: Directory) -> bool:
    return directory.looking


def take_part(run: Manifest | str, out: Path, told: SimpleQueue[tuple[str, Any, float]]) -> None:
    """Tell when this peer listens and when another one is here, until killed; no step is made and nothing saved."""
    problem = Problem(0)
    with joined(run, problem, out, transport="daemon") as peer:
        told.put(("listens", peer.invite, time.monotonic()))
        while peer.swarm.call(looking, peer.swarm.node.directory):
            NOBODY.wait(0.01)
        told.put(("found", peer.invite, time.monotonic()))
        while True:
            NOBODY.wait(1.0)


class Two:
    """The processes, and what each of them tells."""

    def __init__(self, folder: Path) -> None:
        self.folders = [folder / f"peer{number}" for number in range(2)]
        self.runs: list[Manifest | str] = [run_terms("sparseloco", swarm={"lease": LEASE, "shrink_after": 2 * LEASE})]
        self.told = [FORKS.SimpleQueue() for _ in range(2)]
        self.processes: dict[int, BaseProcess] = {}

    def start(self, number: int) -> None:
        self.told[number] = FORKS.SimpleQueue()  # a killed process may hold the lock of the one before for ever
        given = (self.runs[number], self.folders[number], self.told[number])
        self.processes[number] = FORKS.Process(target=take_part, args=given, daemon=True)
        self.processes[number].start()

    def hear(self, number: int, what: str, within: float) -> tuple[Any, float]:
        """When the peer says so; the time is the system's, so that of two processes can be compared."""
        deadline = time.monotonic() + within
        while self.told[number].empty():
            assert self.processes[number].exitcode is None, f"peer {number} ended"
            assert time.monotonic() < deadline, f"peer {number}: no {what!r} within {within:g} s"
            NOBODY.wait(0.01)
        said, invite, at = self.told[number].get()
        assert said == what
        return invite, at

    def kill(self) -> None:
        for process in self.processes.values():
            process.kill()
        for process in self.processes.values():
            process.join()


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Two]:
    two = Two(tmp_path)
    try:
        yield two
    finally:
        two.kill()


@pytest.mark.long
def test_two_that_are_killed_and_restarted_together_find_each_other_at_once(two: Two):
    two.start(0)
    two.runs.append(two.hear(0, "listens", PATIENCE)[0])
    two.start(1)
    two.hear(1, "listens", PATIENCE)
    for number in range(2):
        two.hear(number, "found", SOON)
    listened = None
    took = []
    for restart in range(6):
        deadline = time.monotonic() + SOON
        while not all(read_addresses(folder).others for folder in two.folders):
            assert time.monotonic() < deadline, "a moment after they met, each has noted where the other is"
            NOBODY.wait(0.01)
        kept: list[Addresses] = [read_addresses(folder) for folder in two.folders]
        assert listened in (None, [one.listen for one in kept]), "they listen where they did"
        listened = [one.listen for one in kept]
        two.kill()
        for number in (0, 1) if restart % 2 else (1, 0):
            two.start(number)
        both_listen = max(two.hear(number, "listens", PATIENCE)[1] for number in range(2))
        both_found = max(two.hear(number, "found", SOON)[1] for number in range(2))
        took.append(max(0.0, both_found - both_listen))
    print("s from when both listened:", [round(seconds, 2) for seconds in took])
    assert max(took) < SOON, took
