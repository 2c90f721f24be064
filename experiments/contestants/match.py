"""One match: start the workers, let them begin together, kill and add peers when it is time, end everything.

What the workers leave in the folder is all that is known of it afterwards.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from contextlib import suppress
from pathlib import Path

from experiments.contestants.places import Place, launch, places, python_of
from experiments.contestants.seat import Seat
from experiments.contestants.terms import Match, events
from experiments.contestants.torchft_service import LIGHTHOUSE

MEETING = 120.0  # s in which all must have met
SETTLING = 3.0  # s between the last one's word and the go
GRACE = 3.0  # s behind the end for who is in the middle of a step
_LOOK = 0.1  # s


class MatchError(Exception):
    """The peers did not meet: nothing was measured."""


def play(match: Match, folder: Path, torchft_python: str | None = None) -> None:
    """From the first worker's start to the last one's end."""
    with places(match) as where:
        stage = Stage(match, folder, where, python_of(match, torchft_python))
        try:
            stage.meet()
            stage.play()
        finally:
            stage.end()


class Stage:
    """The processes of a match."""

    def __init__(self, match: Match, folder: Path, where: list[Place], python: str) -> None:
        self.match, self.folder, self.where, self.python = match, folder, where, python
        self.running: dict[int, subprocess.Popen[str]] = {}
        self.nobody = threading.Event()

    def meet(self) -> None:
        """Start all that begin the match; MatchError when they do not find one another."""
        if self.match.contestant == "torchft":
            program = str(Path(self.python).with_name("torchft_lighthouse"))
            self.running[-1] = launch(self.where[-1], [program, *LIGHTHOUSE], self.folder / "lighthouse.log")
        for rank in range(self.match.peers):
            self.start(rank)
        until = time.monotonic() + MEETING
        while not all((self.folder / f"ready-{rank}").exists() for rank in range(self.match.peers)):
            failed = [path.read_text() for path in self.folder.glob("failed-*")]
            if failed or time.monotonic() > until:
                why = "; ".join(failed) or f"no time left after {MEETING:g} s"
                raise MatchError(f"{self.match.name}: the peers did not meet: {why}")
            self.nobody.wait(_LOOK)
        self.nobody.wait(SETTLING)

    def play(self) -> None:
        """Give the go, and let happen what is to happen."""
        began = time.monotonic()
        self._tell("go", str(began))
        for event in events(self.match):
            self.nobody.wait(max(0.0, began + event.at - time.monotonic()))
            if event.what == "kill":
                self.kill(event.rank)
            else:
                self.start(event.rank)
        over = began + self.match.seconds + GRACE
        while time.monotonic() < over and any(process.poll() is None for process in self._workers()):
            self.nobody.wait(_LOOK)

    def start(self, rank: int) -> None:
        """One worker."""
        place = self.where[rank]
        seat = Seat(
            match=self.match,
            rank=rank,
            address=place.address,
            first_address=self.where[0].address,
            interface=place.interface,
            folder=str(self.folder),
            service=self.where[-1].address,
        )
        command = [self.python, "-m", "experiments.contestants.worker", seat.to_line()]
        self.running[rank] = launch(place, command, self.folder / f"log-{rank}")

    def kill(self, rank: int) -> None:
        """As a power cut does: the process and its children, without a word."""
        process = self.running[rank]
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def end(self) -> None:
        """Whatever still runs."""
        for rank in self.running:
            self.kill(rank)

    def _workers(self) -> list[subprocess.Popen[str]]:
        return [process for rank, process in self.running.items() if rank >= 0]

    def _tell(self, name: str, text: str) -> None:
        written = self.folder / f".{name}"
        written.write_text(text)
        os.replace(written, self.folder / name)
