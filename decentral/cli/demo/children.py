"""Processes of a demo: started, watched, killed, and always ended with everything they started.

A child can die by SIGKILL and leave grandchildren (its libp2p daemon) to another parent. So every child
carries a mark in its environment, which grandchildren inherit; whatever still carries the mark after the
end is a stray. On Linux children also end when the demo itself is killed, and their daemons with them.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Self

import psutil

from decentral.errors import DecentralError, DiskError
from decentral.transport.daemon.process import tethered

MARK = "DECENTRAL_FAMILY"
LEAVE_SECONDS = 10.0  # what a peer promises to need after one signal
STRAY_SECONDS = 5.0  # what a daemon may need to notice that its parent is gone


@dataclass(slots=True)
class DemoProcess:
    """One process; what it prints goes to ``stdout.txt`` and ``stderr.txt`` in its directory."""

    name: str
    directory: Path
    process: subprocess.Popen[str]
    lines: list[str] = field(default_factory=list)  # of stdout
    killed: bool = False
    _news: threading.Condition = field(default_factory=threading.Condition)
    _closed: bool = False

    @property
    def running(self) -> bool:
        """Whether the process has not ended."""
        return self.process.poll() is None

    def first_line(self, timeout: float) -> str:
        """First line of stdout; ``DecentralError`` when the process ends or ``timeout`` seconds pass without one."""
        with self._news:
            self._news.wait_for(lambda: bool(self.lines) or self._closed, timeout)
        if not self.lines:
            raise DecentralError(f"{self.name} said nothing within {timeout:g} s: {self.last_words()}")
        return self.lines[0]

    def last_words(self) -> str:
        """Last line of stderr, and where the rest is."""
        path = self.directory / "stderr.txt"
        try:
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            lines = []
        return f"{lines[-1] if lines else 'no word'} (all of it in {path})"

    def kill(self) -> None:
        """SIGKILL this one process, as a power cut would: what it started is left alone."""
        self.killed = True
        self.process.kill()

    def listen(self, stdout: IO[str], copy: IO[str]) -> None:
        """Collect lines of stdout until it closes; runs on a thread of its own."""
        with stdout, copy:
            for line in stdout:
                copy.write(line)
                copy.flush()
                with self._news:
                    self.lines.append(line.rstrip("\n"))
                    self._news.notify_all()
        with self._news:
            self._closed = True
            self._news.notify_all()


class Family:
    """All processes of one demo. Leaving the block ends every one of them, whatever happened inside."""

    def __init__(self) -> None:
        self.children: list[DemoProcess] = []
        self._mark = uuid.uuid4().hex
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.end()

    def start(self, name: str, directory: Path, arguments: Sequence[str]) -> DemoProcess:
        """Start ``python -m decentral ARGUMENTS`` in its own process group, one torch thread."""
        return self.start_command(name, directory, [sys.executable, "-m", "decentral", *arguments])

    def start_command(self, name: str, directory: Path, command: Sequence[str]) -> DemoProcess:
        """Start any command, its program by its path; tests use it with small ones."""
        try:
            directory.mkdir(parents=True, exist_ok=True)
            copy = (directory / "stdout.txt").open("w", encoding="utf-8")
            errors = (directory / "stderr.txt").open("w", encoding="utf-8")
        except OSError as error:
            raise DiskError(f"{directory}: cannot be written ({error.strerror}); choose another --out") from error
        environment = {**os.environ, MARK: self._mark, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        with errors:
            process = subprocess.Popen(
                tethered(command) if sys.platform == "linux" else command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environment,
                text=True,
                encoding="utf-8",
                start_new_session=True,  # Ctrl-C reaches the demo alone, which then ends them in order
            )
        child = DemoProcess(name, directory, process)
        self.children.append(child)
        assert process.stdout is not None
        thread = threading.Thread(target=child.listen, args=(process.stdout, copy), name=f"{name} out", daemon=True)
        thread.start()
        self._threads.append(thread)
        return child

    def strays(self) -> list[psutil.Process]:
        """Living processes of the family that are not children we still run."""
        ours = {child.process.pid for child in self.children if child.running}
        return [process for process in self._marked() if process.pid not in ours]

    def count_strays(self) -> int:
        """Processes that outlive their peers; those on their way out get ``STRAY_SECONDS``."""
        _, alive = psutil.wait_procs(self.strays(), timeout=STRAY_SECONDS)
        return len(alive)

    def end(self) -> None:
        """Ask every child to leave, then end what is left by its process id."""
        running = [child for child in self.children if child.running]
        for child in running:
            child.process.send_signal(signal.SIGTERM)
        self.wait(running, LEAVE_SECONDS)
        for child in running:
            child.process.kill()  # no effect on one that has ended
            child.process.wait()
        strays = self._marked()
        for process in strays:
            _kill(process)
        psutil.wait_procs(strays, timeout=STRAY_SECONDS)
        for thread in self._threads:
            thread.join()

    def wait(self, children: Sequence[DemoProcess], timeout: float) -> bool:
        """Wait until all of them have ended; False when ``timeout`` seconds pass first."""
        deadline = time.monotonic() + timeout
        for child in children:
            try:
                child.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                return False
        return True

    def _marked(self) -> list[psutil.Process]:
        return [process for process in psutil.process_iter() if self._is_marked(process)]

    def _is_marked(self, process: psutil.Process) -> bool:
        try:
            return process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == self._mark
        except (psutil.Error, OSError):  # gone, or another user's
            return False


def _kill(process: psutil.Process) -> None:
    with contextlib.suppress(psutil.Error):  # it ended meanwhile
        process.kill()
