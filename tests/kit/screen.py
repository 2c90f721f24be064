"""A terminal for tests: what a person would see, and find by scrolling up, after the bytes that a program wrote.

Knows what rich writes and no more: text, CR, LF, cursor up, erase in line, and modes and colours, which show nothing.
A line longer than the screen is wide goes on in the next row, as on every terminal (a VT100's deferred wrap).
"""

import codecs
import re
from dataclasses import dataclass, field

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
