"""Processes of one torment: found by a mark in their environment, measured, ended. One that holds a folder."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from decentral.cli.demo_processes import MARK

DAEMON = "p2pd"
HOLDER = """
import os, sys
from pathlib import Path
from decentral.node.folder import occupy
with occupy(Path(sys.argv[1])):
    child = os.fork() if sys.argv[2] == "forks" else 1
    if child:
        print(child, flush=True)
    sys.stdin.read()
"""


@dataclass(frozen=True, slots=True)
class Usage:
    """What a process holds."""

    rss: int  # bytes
    anonymous: int  # bytes of rss that are no file's pages: a fork maps those of its libraries only as it runs
    fds: int
    threads: int


def usage(pid: int) -> Usage | None:
    """None for a process that is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        fds = len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return None
    fields = {line.split(":")[0]: line.split()[1] for line in lines if len(line.split()) > 1}
    if "VmRSS" not in fields:
        return None  # a zombie
    return Usage(1024 * int(fields["VmRSS"]), 1024 * int(fields["RssAnon"]), fds, int(fields["Threads"]))


def daemon_of(pid: int) -> int | None:
    """The libp2p daemon of a worker, if it has one now."""
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process(pid).children():
            with contextlib.suppress(psutil.Error):
                if child.name() == DAEMON and child.status() != psutil.STATUS_ZOMBIE:
                    return int(child.pid)
    return None


def send(pid: int, number: signal.Signals) -> bool:
    """Send a signal; False when the process is gone."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def marked(mark: str) -> list[psutil.Process]:
    """Every living process that carries ``mark``, whoever its parent is now."""
    return [process for process in psutil.process_iter() if _is_marked(process, mark)]


def _is_marked(process: psutil.Process, mark: str) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == mark
    except (psutil.Error, OSError):
        return False


def end_all(processes: list[psutil.Process], timeout: float) -> None:
    """SIGKILL them, one by one, and wait."""
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(processes, timeout=timeout)


@contextlib.contextmanager
def held_elsewhere(folder: Path, how: str = "alone") -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Another process that has the folder, and a child of it."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(folder), how], **pipes) as holder:
        child = int(holder.stdout.readline())
        try:
            yield holder, child
        finally:
            holder.kill()
