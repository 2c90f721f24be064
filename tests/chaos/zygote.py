"""Starts peers as forks of one process that has everything imported: 7 s of CPU less for each restart.

    python -m tests.chaos.zygote      orders on stdin, news on stdout, one JSON object per line

Every fork is a process of its own: own session, own log, dies by real signals, and with this one if that goes
first. Forking is safe because this process has one thread and has started no event loop; both are checked.
"""

from __future__ import annotations

from tests.chaos import clock

clock.install()  # before the imports below take time.time

import ctypes  # noqa: E402
import gc  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import select  # noqa: E402
import signal  # noqa: E402
import sys  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

_PR_SET_PDEATHSIG = 1
_CLONE_NEWNET = 0x40000000


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent ends."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:
        os._exit(1)


def num_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def fork_peer(order: dict[str, Any]) -> int:
    """Fork a worker for ``order``; returns its process id, in the parent only."""
    assert num_threads() == 1, "a fork of several threads may inherit locked locks"
    parent = os.getpid()
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        die_with_parent(parent)
        os.setsid()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        if "network" in order:
            _enter(order["network"])
        _redirect(Path(order["out"]))
        from tests.chaos import worker

        code = worker.main(order)
    finally:
        sys.stderr.flush()
        os._exit(code)  # not through the zygote's own loop


def _enter(network: str) -> None:
    """Go into the network namespace behind a file; what is started from here on lives there."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(network) as namespace:
        if libc.setns(namespace.fileno(), _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"{network}: setns failed")


def _redirect(out: Path) -> None:
    nothing = os.open(os.devnull, os.O_RDONLY)
    log = os.open(out / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(nothing, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.closerange(3, 256)  # the zygote's own pipes


def say(**news: Any) -> None:
    sys.stdout.write(json.dumps(news) + "\n")
    sys.stdout.flush()


def reap() -> None:
    """Tell of every worker that has ended."""
    while True:
        try:
            pid, status, usage = os.wait4(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        cpu = usage.ru_utime + usage.ru_stime
        say(event="ended", pid=pid, code=os.waitstatus_to_exitcode(status), cpu=round(cpu, 3))


def main(harness: int) -> None:
    die_with_parent(harness)
    from tests.chaos import worker

    worker.prepare()
    gc.collect()
    gc.freeze()  # the collector of a worker must not touch, and so copy, what all of them share
    woken, waker = os.pipe()
    os.set_blocking(waker, False)
    signal.set_wakeup_fd(waker)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    say(event="ready", threads=num_threads())
    orders = b""
    while True:
        readable, _, _ = select.select([0, woken], [], [])
        if woken in readable:
            os.read(woken, 4096)
            reap()
        if 0 in readable:
            data = os.read(0, 65536)
            if not data:
                return
            *lines, orders = (orders + data).split(b"\n")
            for line in lines:
                order = json.loads(line)
                say(event="started", name=order["name"], pid=fork_peer(order))


if __name__ == "__main__":
    main(int(sys.argv[1]))
