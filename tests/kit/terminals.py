"""A program on a pseudo-terminal of a given size, and the screen that a person would have in front of them.

The screen knows what rich writes and no more: text, CR, LF, cursor up, erase in line, and modes and colours, which show
nothing. A line longer than the screen is wide goes on in the next row, as on every terminal (a VT100's deferred wrap).
"""

import codecs
import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

_TOKEN = re.compile(r"\x1b\[([?0-9;]*)([A-Za-z])|(\r|\n|[^\x1b\r\n]+)|(\x1b\[?[?0-9;]*)$")


@dataclass(slots=True)
class Row:
    """One row; ``goes_on`` when the next one is the rest of its line."""

    text: str = ""
    goes_on: bool = False


@dataclass(slots=True)
class Screen:
    """``columns`` x ``rows``; ``history`` is what was scrolled off, oldest first."""

    columns: int
    rows: int
    shown: list[Row] = field(default_factory=lambda: [Row()])
    history: list[Row] = field(default_factory=list)
    _x: int = 0
    _y: int = 0
    _half: str = ""  # an escape sequence of which more is to come
    _decoder: codecs.IncrementalDecoder = field(default_factory=codecs.getincrementaldecoder("utf-8"))

    def feed(self, data: bytes) -> None:
        """Take what the program wrote. AssertionError on a sequence that this terminal does not know."""
        text, self._half, at = self._half + self._decoder.decode(data), "", 0
        while at < len(text):
            token = _TOKEN.match(text, at)
            assert token is not None, f"what is {text[at : at + 12]!r}?"
            at = token.end()
            if token[4] is not None:
                self._half = token[4]
            elif token[3] is None:
                self._control(token[1], token[2])
            else:
                self._put(token[3])

    @property
    def lines(self) -> list[str]:
        """Whole lines, as one would copy them: scrollback first."""
        lines, open_ = [], False
        for row in [*self.history, *self.shown]:
            if open_:
                lines[-1] += row.text
            else:
                lines.append(row.text)
            open_ = row.goes_on
        return lines

    def _control(self, parameters: str, letter: str) -> None:
        if letter == "A":
            self._y = max(0, self._y - int(parameters or 1))
        elif letter == "K":
            assert parameters == "2", f"erase in line {parameters!r}"
            self.shown[self._y] = Row()
        else:
            assert letter in "mhl", f"control sequence {letter!r}"

    def _put(self, text: str) -> None:
        if text == "\r":
            self._x = 0
        elif text == "\n":
            self._down()
            self._x = 0  # the line discipline made CR LF of it
        else:
            for character in text:
                self._put_one(character)

    def _put_one(self, character: str) -> None:
        if self._x == self.columns:
            self.shown[self._y].goes_on = True
            self._down()
            self._x = 0
        row = self.shown[self._y]
        row.text = row.text[: self._x].ljust(self._x) + character + row.text[self._x + 1 :]
        self._x += 1

    def _down(self) -> None:
        self._y += 1
        if self._y == len(self.shown):
            self.shown.append(Row())
        while len(self.shown) > self.rows:
            self.history.append(self.shown.pop(0))
            self._y -= 1


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
