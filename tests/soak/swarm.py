"""A swarm that is to run for long: real processes, each behind a line of its own, some of which fail now and then."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from decentral.errors import UsageError
from decentral.observe.status import Status, read_status
from tests.natlab.lab import Host, Lab
from tests.natlab.wires import Line

PATIENCE = 120.0  # s for the invite
ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Terms:
    """What is run."""

    rounds: int
    mbit: float = 50.0
    peers: int = 3
    preset: str = "diloco"
    hidden: int = 128
    inner_steps: int = 5
    transport: str = "daemon"
    alone: bool = False  # the first peer waits for nobody


class SoakPeer:
    """One of them: a host, a folder, a process."""

    def __init__(self, host: Host, folder: Path, words: list[str]) -> None:
        self.host, self.folder, self.words = host, folder, words
        self.process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """In a life of its own; what it says goes to a file beside its folder."""
        env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        with self.folder.with_suffix(".log").open("a", encoding="utf-8") as log:
            self.process = self.host.start(
                *(sys.executable, "-c", "from decentral.cli import main; main()", *self.words),
                *("--out", str(self.folder), "--no-lan"),
                env=env,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def kill(self) -> None:
        """As a crash would."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def status(self) -> Status:
        """What it last wrote; nothing yet."""
        try:
            return read_status(self.folder)
        except UsageError:
            return Status()


class SoakSwarm:
    """All peers, up while the block lasts: the first one alone at first, the others by its invite."""

    def __init__(self, folder: Path, terms: Terms) -> None:
        self.folder, self.terms = folder, terms
        self.lab = Lab()
        self.peers: list[SoakPeer] = []

    def __enter__(self) -> Self:
        self.lab.__enter__()
        try:
            self._start()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for peer in self.peers:
            if peer.process is not None:
                peer.kill()
        self.lab.__exit__(kind, error, at)

    def _start(self) -> None:
        given = self.terms
        manifest = _manifest(self.folder, given)
        line = Line(up=given.mbit, down=given.mbit, delay=0.005)
        hosts = [self.lab.public(f"peer{n}", line) for n in range(given.peers)]
        common = ["--transport", given.transport]
        self._add(hosts[0], ["start", str(manifest), *common, *(["--alone"] if given.alone else [])])
        invite = self._invite(self.peers[0])
        for host in hosts[1:]:
            self._add(host, ["join", invite, *common])

    def _add(self, host: Host, words: list[str]) -> None:
        self.peers.append(SoakPeer(host, self.folder / f"peer{len(self.peers)}", words))
        self.peers[-1].start()

    def _invite(self, peer: SoakPeer) -> str:
        until, nobody = time.monotonic() + PATIENCE, threading.Event()
        while time.monotonic() < until:
            if invite := peer.status().invite:
                return invite
            nobody.wait(0.5)
        raise AssertionError(f"no invite in {PATIENCE:g} s: {peer.folder.with_suffix('.log').read_text()}")


def _manifest(folder: Path, terms: Terms) -> Path:
    path = folder / "run.toml"
    words = ["init", str(path), "--preset", terms.preset, "--inner-steps", str(terms.inner_steps)]
    words += ["--rounds", str(terms.rounds)]
    subprocess.run(
        [sys.executable, "-c", "from decentral.cli import main; main()", *words],
        check=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    sizes = {"hidden": terms.hidden, "layers": 1, "context": 16, "batch_size": 1}
    lines = path.read_text().splitlines()
    path.write_text(
        "\n".join(f"{key} = {sizes[key]}" if (key := one.partition(" ")[0]) in sizes else one for one in lines) + "\n"
    )
    return path


def size_of(folder: Path) -> int:
    """Bytes of all files in it, as they lie there now; what is replaced meanwhile is passed over."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                total += os.stat(os.path.join(place, name)).st_size
    return total


def largest_files(folder: Path) -> dict[str, int]:
    """Bytes by the first part of the path."""
    found: dict[str, int] = {}
    for path in folder.iterdir():
        found[path.name] = size_of(path) if path.is_dir() else path.stat().st_size
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def clear(folder: Path) -> Path:
    """An empty folder there."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder
