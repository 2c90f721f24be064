"""A swarm whose peers are exchanged one by one, as docs/operations.md says, and peers of another wire version."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from decentral.observe.status import Status, is_running, read_status
from tests.kit.families import NET, write_terms
from tests.kit.patience import PATIENCE, until

ROOT = Path(__file__).parents[2]
# A process of another release: what it says of itself, and whether its bytes are other ones.
OF_VERSION = """
import sys
release, wire = sys.argv[1], int(sys.argv[2])
import decentral.swarm.hello as hello, decentral.swarm.leases as lease
hello.package_version = lease.package_version = lambda: release
hello.WIRE_VERSION += wire
from decentral.cli import main
main(sys.argv[3:])
"""


@dataclass
class Machine:
    """One of the swarm's: a folder, the command that it is started with, and the release that is installed."""

    folder: Path
    words: list[str]
    release: str = "0.1.0"
    wire: int = 0
    process: subprocess.Popen[str] | None = field(default=None)

    def start(self) -> None:
        log = self.folder.with_suffix(".log").open("a")
        command = [sys.executable, "-c", OF_VERSION, self.release, str(self.wire), *self.words]
        env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(command, env=env, stdout=log, stderr=log, text=True)
        log.close()

    def ends_with(self) -> int:
        assert self.process is not None
        return self.process.wait(PATIENCE)

    def finish(self) -> None:
        """As an operator does it."""
        asked = [sys.executable, "-c", OF_VERSION, self.release, "0", "finish", "--out", str(self.folder)]
        subprocess.run(asked, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=True, capture_output=True)
        assert self.ends_with() == 0

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    @property
    def said(self) -> str:
        return self.folder.with_suffix(".log").read_text()

    @property
    def status(self) -> Status:
        return read_status(self.folder) if (self.folder / "status.json").exists() else Status()

    def trains(self, beyond: int) -> bool:
        return is_running(self.status) and self.status.round > beyond


@contextmanager
def swarm(folder: Path, count: int) -> Iterator[list[Machine]]:
    write_terms(folder)
    common = ["--data", str(folder / "text"), *NET]
    with ExitStack() as stack:
        first = Machine(folder / "peer0", ["start", str(folder / "run.toml"), "--out", str(folder / "peer0"), *common])
        machines = [first]
        first.start()
        stack.callback(lambda: [one.kill() for one in machines])
        until(lambda: bool(first.status.invite))
        for number in range(1, count):
            out = folder / f"peer{number}"
            machines.append(Machine(out, ["join", first.status.invite, "--out", str(out), *common]))
            machines[-1].start()
        until(lambda: all(one.trains(1) for one in machines))
        yield machines


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_swarm_whose_peers_are_exchanged_one_by_one_goes_on_and_another_wire_version_is_refused(
    tmp_path: Path,
) -> None:
    with swarm(tmp_path, 3) as machines:
        for machine in machines:  # within a wire version
            others, at = [one for one in machines if one is not machine], machine.status.round
            machine.finish()
            until(lambda others=others, at=at: all(one.trains(at + 2) for one in others))
            machine.release = "0.1.9"
            machine.start()
            ahead = max(one.status.round for one in others)
            until(lambda machine=machine, ahead=ahead: machine.trains(ahead))
        invite = machines[0].status.invite
        newcomer = tmp_path / "newcomer"
        stranger = Machine(newcomer, ["join", invite, "--out", str(newcomer), *machines[1].words[4:]], "0.2.0", wire=1)
        stranger.start()
        last = machines[-1]  # and across one
        last.finish()
        last.release, last.wire = "0.2.0", 1
        last.start()
        for refused in (stranger, last):
            assert refused.ends_with() == 21, refused.said
            (sentence,) = [line for line in refused.said.splitlines() if "speaks wire version" in line]
            assert "(decentral 0.1.9), this is" in sentence
            assert "install decentral 0.1.9" in sentence
        assert not (newcomer / "checkpoints").exists()
        at = max(one.status.round for one in machines[:2])
        until(lambda: all(one.trains(at + 2) for one in machines[:2]))
        last.release, last.wire = "0.1.9", 0  # what it was told to install
        last.start()
        until(lambda: last.trains(at + 2))
