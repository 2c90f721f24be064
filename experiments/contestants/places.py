"""Where the workers of a match run: a network namespace each, behind a line, or all on this machine's loopback."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.contestants.terms import DELAY, Match
from tests.natlab.lab import Lab
from tests.natlab.wires import Line

ROOT = Path(__file__).parents[2]
START = Callable[..., "subprocess.Popen[str]"]


@dataclass(frozen=True, slots=True)
class Place:
    """Where one process runs."""

    address: str
    interface: str
    start: START
    named: bool = True  # whether the machine's name is its address: torchft tells others where to fetch by name


@contextmanager
def places(match: Match) -> Iterator[list[Place]]:
    """One for each peer, the late one included, and one more for what a contestant needs besides: on a fast line."""
    count = match.peers + 1
    if not match.mbit:
        yield [Place("127.0.0.1", "lo", _here, named=False)] * (count + 1)
        return
    line = Line(up=match.mbit, down=match.mbit, delay=DELAY)
    with Lab() as lab:
        hosts = [lab.public(f"peer{number}", line) for number in range(count)] + [lab.public("service")]
        yield [Place(str(host.v4), "wan", host.start) for host in hosts]


def launch(place: Place, command: Sequence[str], log: Path) -> subprocess.Popen[str]:
    """Start a command there, with its children a group of its own that can be killed whole."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    named = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', place.address] if place.named else []
    with log.open("a") as out:
        given = {"env": environment, "cwd": ROOT, "start_new_session": True, "stdout": out, "stderr": out}
        return place.start(*named, *command, **given)


def _here(*command: str, **given: Any) -> subprocess.Popen[str]:  # Any: Popen's own keywords
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, text=True, **given)


def python_of(match: Match, torchft_python: str | None) -> str:
    """The interpreter that a contestant's worker needs."""
    return torchft_python or sys.executable if match.contestant == "torchft" else sys.executable
