"""What can be done to a peer, one function per kind of the schedule.

Each returns whether it was done: a victim that is still on its way back from the last fault is left alone, and the
checker counts those. Whatever a fault breaks that a user would mend (space on a disk, a process that is gone) is
mended by the same function, later.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable

from tests.chaos.arena import Arena
from tests.chaos.schedule import EVERYBODY, Fault
from tests.chaos.subject import Subject
from tests.kit.processes import send

DISK_ERROR = 50  # exit code of decentral.errors.DiskError

Action = Callable[[Arena, Subject, float], bool]


def kill(arena: Arena, subject: Subject, seconds: float) -> bool:
    """SIGKILL; started again after ``seconds``."""
    if subject.busy or not subject.kill():
        return False
    subject.busy = True
    arena.after(seconds, lambda: _start_when_gone(arena, subject))
    return True


def kill_daemon(arena: Arena, subject: Subject, seconds: float) -> bool:
    """SIGKILL for the libp2p daemon alone; its peer has to start another."""
    daemon = subject.daemon()
    return daemon is not None and send(daemon, signal.SIGKILL)


def stop(arena: Arena, subject: Subject, seconds: float) -> bool:
    """SIGSTOP, SIGCONT ``seconds`` later; the daemon goes on answering pings meanwhile."""
    return _hold(arena, subject, seconds, subject.pid)


def stop_daemon(arena: Arena, subject: Subject, seconds: float) -> bool:
    """SIGSTOP for the daemon alone."""
    return _hold(arena, subject, seconds, subject.daemon())


def sleep(arena: Arena, subject: Subject, seconds: float) -> bool:
    """A closed lid: peer and daemon stand still for longer than the swarm waits for anybody."""
    return _hold(arena, subject, seconds, subject.pid, subject.daemon())


def disk_full(arena: Arena, subject: Subject, seconds: float) -> bool:
    """No space for ``seconds``; the peer may end with one line and code 50, never with anything else."""
    if subject.pid is None or subject.busy:
        return False
    subject.busy = True
    subject.expected.add(DISK_ERROR)
    subject.disk_full()

    def free() -> None:
        subject.ballast.unlink()
        arena.note("freed", subject)
        arena.after(3.0, mend)

    def mend() -> None:
        subject.busy = False
        subject.expected.discard(DISK_ERROR)
        arena.start(subject)  # does nothing when it survived

    arena.after(seconds, free)
    return True


def clock(arena: Arena, subject: Subject, seconds: float) -> bool:
    """The wall clock of one peer jumps; the monotonic one does not."""
    if subject.pid is None or subject.busy:
        return False
    (subject.folder / "clock").write_text(str(seconds))
    return send(subject.pid, signal.SIGUSR1)


def corrupt_checkpoint(arena: Arena, subject: Subject, seconds: float) -> bool:
    """SIGKILL, then one bit of the newest checkpoint flips before the restart."""
    return _kill_and(arena, subject, seconds, "corrupted", subject.corrupt_checkpoint)


def cut_journal(arena: Arena, subject: Subject, seconds: float) -> bool:
    """SIGKILL, then the journal's tail is gone before the restart."""
    nbytes = 1 + int(1e6 * seconds) % 300  # seconds are drawn to the millisecond: as good as a draw of its own
    return _kill_and(arena, subject, seconds, "cut", lambda: subject.cut_journal(nbytes))


def leave(arena: Arena, subject: Subject, seconds: float) -> bool:
    """A polite goodbye, and back after ``seconds``."""
    if subject.pid is None or subject.busy:
        return False
    subject.busy = True
    subject.expected.add(0)
    send(subject.pid, signal.SIGTERM)
    arena.after(seconds, lambda: _start_when_gone(arena, subject))
    return True


def everybody(arena: Arena, seconds: float) -> None:
    """A power cut: all at once, and all back."""
    for subject in arena.subjects:
        if subject.kill():
            subject.busy = True
    for subject in arena.subjects:
        arena.after(seconds + 0.1 * subject.number, lambda one=subject: _start_when_gone(arena, one))  # type: ignore[misc]


FAULTS: dict[str, Action] = {
    "kill": kill,
    "kill_daemon": kill_daemon,
    "stop": stop,
    "stop_daemon": stop_daemon,
    "sleep": sleep,
    "disk_full": disk_full,
    "clock": clock,
    "corrupt_checkpoint": corrupt_checkpoint,
    "cut_journal": cut_journal,
    "leave": leave,
}


def apply(arena: Arena, fault: Fault) -> None:
    """Do it, and write down whether it was done."""
    if fault.kind == EVERYBODY:
        arena.note(EVERYBODY, None, seconds=fault.seconds, killed=len(arena.running()), done=True)
        everybody(arena, fault.seconds)
        return
    subject = arena.subjects[fault.victim]
    before = subject.pid
    done = FAULTS[fault.kind](arena, subject, fault.seconds)
    arena.note(fault.kind, subject, seconds=fault.seconds, pid=before, done=done)


def _hold(arena: Arena, subject: Subject, seconds: float, *pids: int | None) -> bool:
    if subject.pid is None or subject.busy or subject.held or None in pids:
        return False
    worker = subject.pid
    subject.hold(*pids)

    def let_go() -> None:
        if subject.pid == worker:
            subject.let_go()
            arena.note("continued", subject, pid=worker)

    arena.after(seconds, let_go)
    return True


def _kill_and(arena: Arena, subject: Subject, seconds: float, what: str, damage: Callable[[], bool]) -> bool:
    if subject.busy or not subject.kill():
        return False
    subject.busy = True

    def hurt() -> None:
        if subject.pid is not None:
            arena.after(0.05, hurt)
            return
        with contextlib.suppress(FileNotFoundError):
            if damage():
                arena.note(what, subject)
        arena.start(subject)

    arena.after(seconds, hurt)
    return True


def _start_when_gone(arena: Arena, subject: Subject, patience: float = 30.0) -> None:
    """Start it once the old process is reaped; one that does not go by itself is a finding."""
    since = time.monotonic()

    def again() -> None:
        if subject.pid is None:
            arena.start(subject)
        elif time.monotonic() - since > patience:
            arena.surprises.append(f"{subject.name} did not end within {patience:g} s of being asked to")
            subject.kill()
            arena.after(0.5, again)
        else:
            arena.after(0.05, again)

    again()
