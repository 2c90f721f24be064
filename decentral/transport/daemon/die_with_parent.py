"""Run a command that dies with the process that started this one. A script, not a module: nothing imports it.

    python -I -S die_with_parent.py exec  PARENT COMMAND...     Linux: the kernel kills the command with its parent
    python -I -S die_with_parent.py watch PARENT COMMAND...     elsewhere: stay between, kill it when stdin ends

The parent need not run any code for either: SIGKILL, a crash and an exit all end the command.
"""

import ctypes
import os
import signal
import subprocess
import sys
import threading
from types import FrameType

_PR_SET_PDEATHSIG = 1


def become(parent: int, command: list[str]) -> None:
    """Turn into ``command``, which the kernel ends when the thread that started it ends."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:  # it died before the call above, which then waits for the wrong one
        os._exit(1)
    os.execv(command[0], command)


def watch(command: list[str]) -> int:
    """Run ``command`` until it ends, or until stdin, whose other end the parent holds, does."""
    with subprocess.Popen(command, stdin=subprocess.DEVNULL) as child:

        def kill(signum: int = 0, frame: FrameType | None = None) -> None:
            child.kill()

        def kill_at_end_of_stdin() -> None:
            sys.stdin.buffer.read()
            kill()

        signal.signal(signal.SIGTERM, kill)
        threading.Thread(target=kill_at_end_of_stdin, daemon=True).start()
        return child.wait()


if __name__ == "__main__":
    if sys.argv[1] == "exec":
        become(int(sys.argv[2]), sys.argv[3:])
    os._exit(abs(watch(sys.argv[3:])))  # at once: the thread that waits for stdin must not hold it up
