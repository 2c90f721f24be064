"""Following a demo while it runs: shows progress, kills a peer at a third of the rounds, adds one at half,
bounds the time.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import IO, Self

from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar

from decentral.cli.demo.children import DemoProcess
from decentral.cli.failure import INTERRUPTED
from decentral.cli.stopping import Stop
from decentral.errors import DecentralError, UsageError
from decentral.observe.health import in_time, in_units
from decentral.observe.status import Status, read_status

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
    """Whether the peer whose status it is takes ``peer`` for alive."""
    return any(member.get("peer") == peer and member.get("live", True) for member in status.members)


def _check(children: Sequence[DemoProcess]) -> None:
    for child in children:
        code = child.process.poll()
        if code not in (None, 0) and not child.killed:
            raise DecentralError(f"{child.name} ended with exit code {code}: {child.last_words()}")


def _is_too_late(newcomer: DemoProcess, others: Sequence[DemoProcess]) -> bool:
    """Whether the newcomer still looks for a run that everybody else has finished."""
    if not newcomer.running or any(child.running for child in others):
        return False
    try:
        return read_status(newcomer.directory).state in ("starting", "looking")
    except UsageError:  # it has not even found the manifest
        return True


def _late(children: Sequence[DemoProcess]) -> str:
    late = ", ".join(child.name for child in children if child.running)
    return f"the demo took longer than its limit, {late} still run; try fewer --peers or more --minutes"
