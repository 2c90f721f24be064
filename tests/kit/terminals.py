"""A program on a pseudo-terminal of a given size, and the screen that a person would have in front of them."""

import fcntl
import os
import pty
import select
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.kit.screen import Screen


class OnTerminal:
    """Runs ``command`` with stdin, stdout and stderr on a terminal of ``columns`` x ``rows``; ends it in any case."""

    def __init__(self, command: Sequence[str], columns: int, rows: int, *, cwd: Path) -> None:
        self.screen = Screen(columns, rows)
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        environment = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "LINES", "NO_COLOR")}
        environment["TERM"] = "xterm-256color"
        self.process = subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, cwd=cwd, env=environment, start_new_session=True
        )
        os.close(slave)

    def until(self, condition: Callable[[Screen], bool], seconds: float) -> Screen:
        """Read on until the screen is as wanted."""
        deadline = time.monotonic() + seconds
        while not condition(self.screen):
            assert time.monotonic() < deadline, "\n".join(self.screen.lines)
            assert self._read(), "it ended: " + "\n".join(self.screen.lines)
        return self.screen

    def finish(self, seconds: float) -> int:
        """Read to the end; returns the exit code."""
        deadline = time.monotonic() + seconds
        while self._read():
            assert time.monotonic() < deadline, "\n".join(self.screen.lines)
        return self.process.wait(seconds)

    def _read(self) -> bool:
        """Whether there may be more."""
        if not select.select([self._master], [], [], 0.2)[0]:
            return self.process.poll() is None
        try:
            data = os.read(self._master, 65536)
        except OSError:  # EIO: nobody holds the other side any more
            return False
        self.screen.feed(data)
        return bool(data)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)
