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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Self

import psutil
from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar

from decentral.cli.group import INTERRUPTED, Stop
from decentral.errors import DecentralError, DiskError, UsageError
from decentral.observe.health import in_time, in_units
from decentral.observe.status import Status, read_status
from decentral.state.durable import make_private_folders
from decentral.transport.daemon.process import tether

MARK = "DECENTRAL_FAMILY"
_OF_ANOTHER_RUN = ("DECENTRAL_ADMIT", "DECENTRAL_INVITE")  # a demo's is open to its own processes, and has no secret
LEAVE_SECONDS = 10.0  # what a peer promises to need after one signal
STRAY_SECONDS = 5.0  # what a daemon may need to notice that its parent is gone


@dataclass(slots=True)
class DemoProcess:
    """A process of the demo; what it prints goes to ``stdout.txt`` and ``stderr.txt`` in its directory."""

    name: str
    directory: Path
    process: subprocess.Popen[str]
    lines: list[str] = field(default_factory=list)  # of stdout
    killed: bool = False
    _news: threading.Condition = field(default_factory=threading.Condition)
    _closed: bool = False

    @property
    def running(self) -> bool:
        """True while the process has not ended."""
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
            make_private_folders(directory)
            copy = (directory / "stdout.txt").open("w", encoding="utf-8")
            errors = (directory / "stderr.txt").open("w", encoding="utf-8")
        except OSError as error:
            raise DiskError(f"{directory}: cannot be written ({error.strerror}); choose another --out") from error
        mine = {name: value for name, value in os.environ.items() if name not in _OF_ANOTHER_RUN}
        environment = {**mine, MARK: self._mark, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        with errors:
            process = subprocess.Popen(
                tether(command) if sys.platform == "linux" else command,
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
        return [process for process in self._find_marked() if process.pid not in ours]

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
        strays = self._find_marked()
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

    def _find_marked(self) -> list[psutil.Process]:
        return [process for process in psutil.process_iter() if self._is_marked(process)]

    def _is_marked(self, process: psutil.Process) -> bool:
        try:
            return process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == self._mark
        except (psutil.Error, OSError):  # gone, or another user's
            return False


def _kill(process: psutil.Process) -> None:
    with contextlib.suppress(psutil.Error):  # it ended meanwhile
        process.kill()


# ---- a demo while it runs ----
#
# Progress is shown, a peer is killed at a third of the rounds, one is added at half, and the time is bounded.

_LOOK_SECONDS = 0.2


@dataclass(slots=True)
class Churn:
    """Which peer is killed, which comes, and when: by the first peer's rounds, or by the time on a slow machine."""

    rounds: int
    ends: float  # time.monotonic() at which the run ends with fewer rounds
    victim: DemoProcess | None
    add: Callable[[], DemoProcess] | None
    newcomer: DemoProcess | None = None
    killed: list[str] = field(default_factory=list)
    waited_for: str = ""  # the peer that was killed, as long as the others wait for its contributions
    _began: float | None = None

    def act(self, round_: int, now: float) -> None:
        """Do what is due at this round and time, each only once; the time counts from the first round on."""
        if round_ == 0:
            return
        self._began = now if self._began is None else self._began
        done = max(round_ / self.rounds, (now - self._began) / max(1.0, self.ends - self._began))
        if self.victim is not None and not self.killed and 3 * done >= 1:
            self.waited_for = _peer_in(self.victim)
            self.victim.kill()
            self.killed.append(self.victim.name)
        if self.add is not None and self.newcomer is None and 2 * done >= 1:
            self.newcomer = self.add()

    @property
    def newcomers(self) -> list[DemoProcess]:
        """The newcomer, if it has come."""
        return [] if self.newcomer is None else [self.newcomer]

    def send_home(self) -> None:
        """End a newcomer that found nobody; it does not count."""
        assert self.newcomer is not None
        self.newcomer.killed = True  # its exit code means nothing
        self.newcomer.process.terminate()
        self.newcomer.process.wait()
        self.newcomer, self.add = None, None


class DemoProgress:
    """A bar on a terminal, a line per round anywhere else."""

    def __init__(self, stream: IO[str], rounds: int) -> None:
        console = Console(file=stream, highlight=False)
        self._stream, self._rounds, self._round = stream, rounds, -1
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[left]}"))
        self._bar = Bar(*columns, console=console) if console.is_terminal else None
        self._task = self._bar.add_task("starting", total=rounds, left="") if self._bar else None

    def __enter__(self) -> Self:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._bar:
            self._bar.stop()

    def show(self, status: Status) -> None:
        """Show where the first peer is."""
        if self._bar and self._task is not None:
            left = "" if status.seconds_left is None else f"{in_time(status.seconds_left)} left"
            self._bar.update(self._task, completed=status.round, description=self._sentence(status), left=left)
        elif status.round != self._round:
            self.say(self._sentence(status))
        self._round = status.round

    def say(self, text: str) -> None:
        """Say one thing that happened."""
        if self._bar:
            self._bar.console.print(text)
        else:
            print(text, file=self._stream, flush=True)

    def _sentence(self, status: Status) -> str:
        loss = "" if status.loss is None else f", loss {status.loss:.3f}"
        sent = in_units(status.bytes_sent)
        return f"round {status.round} of {self._rounds}: {len(status.members)} members{loss}, {sent} sent by peer-0"


def watch(
    peers: Sequence[DemoProcess],
    solo: DemoProcess,
    churn: Churn,
    progress: DemoProgress,
    *,
    stop: Stop,
    deadline: float,
) -> None:
    """Return when everybody has ended well. Raises DecentralError when one fails or time is up."""
    wake = threading.Event()
    stop.gently(wake.set)  # Ctrl-C: leave this loop; the family ends its members
    told = False
    while any(child.running for child in [*peers, solo, *churn.newcomers]):
        if wake.wait(_LOOK_SECONDS):
            raise KeyboardInterrupt if stop.code == INTERRUPTED else SystemExit(stop.code)
        if time.monotonic() > deadline:
            raise DecentralError(_late([*peers, solo, *churn.newcomers]))
        _look(peers[0], churn, progress)
        if churn.newcomer is not None and not told:
            told = True
            progress.say("a newcomer joins with nothing but the invite")
        if churn.newcomer is not None and _is_too_late(churn.newcomer, [*peers, solo]):
            progress.say("the newcomer came too late, the run is over; try more --minutes")
            churn.send_home()
        _check([*peers, solo, *churn.newcomers])
    _check([*peers, solo, *churn.newcomers])


def _look(first: DemoProcess, churn: Churn, progress: DemoProgress) -> None:
    try:
        status = read_status(first.directory)
    except UsageError:  # it has not written one yet
        return
    progress.show(status)
    num_killed = len(churn.killed)
    churn.act(status.round, time.monotonic())
    for name in churn.killed[num_killed:]:
        progress.say(
            f"{name} was killed (SIGKILL) in round {status.round}; nobody told the others, so they wait for it"
        )
    if churn.waited_for and not _is_there(churn.waited_for, status):
        churn.waited_for = ""
        gone = churn.killed[-1]
        progress.say(f"the lease of {gone} has run out: the others go on without it from round {status.round} on")


def _peer_in(child: DemoProcess) -> str:
    try:
        return read_status(child.directory).peer
    except UsageError:  # it has not written one yet
        return ""


def _is_there(peer: str, status: Status) -> bool:
    """Tell whether the peer whose status it is takes ``peer`` for alive."""
    return any(member.get("peer") == peer and member.get("live", True) for member in status.members)


def _check(children: Sequence[DemoProcess]) -> None:
    for child in children:
        code = child.process.poll()
        if code not in (None, 0) and not child.killed:
            raise DecentralError(f"{child.name} ended with exit code {code}: {child.last_words()}")


def _is_too_late(newcomer: DemoProcess, others: Sequence[DemoProcess]) -> bool:
    """Tell whether the newcomer still looks for a run that everybody else has finished."""
    if not newcomer.running or any(child.running for child in others):
        return False
    try:
        return read_status(newcomer.directory).state in ("starting", "looking")
    except UsageError:  # it has not even found the manifest
        return True


def _late(children: Sequence[DemoProcess]) -> str:
    late = ", ".join(child.name for child in children if child.running)
    return f"the demo took longer than its limit, {late} still run; try fewer --peers or more --minutes"
