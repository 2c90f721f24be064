"""The views of a running peer: a live one on a terminal, one plain line per round anywhere else.

Both write to stderr, because stdout belongs to results. Both say how to stop. Colours follow ``NO_COLOR``.
"""

from __future__ import annotations

import logging
import os
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import IO, Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from decentral.observe.events import printable
from decentral.observe.health import (
    health_sentence,
    health_word,
    in_units,
    names_in,
    quantity_text,
    round_line,
    short_name,
    with_names,
)
from decentral.observe.status import LIVE_CELLS, Status, presence
from decentral.swarm.invite import Invite

_SILENCE_SECONDS = 30.0  # a log that says nothing for longer looks stuck
_JUST_NOW = 5.0  # s in which a line that was logged is not said again by the status
_MAX_MEMBERS_SHOWN = 12
_OTHER_ROWS = 12  # of the live view at 60 columns: sentence 4, numbers 4, head, "and n more", how to stop, the cursor
_STYLES = {
    **dict.fromkeys(("healthy", "done"), "green"),
    **dict.fromkeys(("late", "stalled", "behind", "out"), "yellow"),
    "attention": "bold red",
}


class Display(Protocol):
    """Somewhere to show how the peer is."""

    def show(self, status: Status) -> None:
        """Show this moment."""

    def say(self, text: str) -> None:
        """Show one line that stays."""

    def result(self, text: str) -> None:
        """Put one line on stdout, and where people see it."""

    def close(self) -> None:
        """Leave the last state readable."""


def open_display(stream: IO[str], *, stop: str) -> Display:
    """Return the live view when ``stream`` is a terminal that can move its cursor, else plain lines."""
    console = Console(file=stream, highlight=False)
    if console.is_terminal and not console.is_dumb_terminal:
        return LiveDisplay(console, stop=stop)
    return PlainDisplay(stream, stop=stop)


class PlainDisplay:
    """A sentence when the peer's state changes, a short line per round, one when nothing changed for half a minute.

    Each line begins with ``prefix``: beside what a script writes, a reader must know who speaks.
    """

    def __init__(
        self, stream: IO[str], *, stop: str, prefix: str = "", monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._stream, self._prefix = stream, prefix
        self._monotonic = monotonic
        self._state: tuple[str, str] | None = None
        self._tenths = 0  # of a model that is being fetched
        self._round = 0
        self._shown_at = 0.0
        self._told, self._told_at = "", 0.0  # the last line that was not the status'
        self._called: Mapping[str, str] = {}  # what peers call themselves, by their letters
        self.say(f"to stop: {stop}")

    def show(self, status: Status) -> None:
        """Print what is new, if anything is."""
        word, self._called = health_word(status), names_in(status)
        before, state = self._state, (word, status.problem)
        self._state = state
        usual = before is not None and before[0] == "waiting" and word == "healthy"  # so it is in every slow round
        if state != before and not (usual and status.round != self._round):
            self._print(health_sentence(status), status)
        elif status.round != self._round:
            self._print(round_line(status), status)
        elif status.state == "syncing" and self._tenths < _tenths(status) < 10:
            self._print(health_sentence(status), status)
        elif self._monotonic() - self._shown_at >= _SILENCE_SECONDS:
            still = f"still {word}: {round_line(status)}, inner step {status.inner_steps}"
            self._print(f"still {health_sentence(status)}" if status.wanted_members else still, status)

    def _print(self, text: str, status: Status) -> None:
        """Print a line of the status, unless it says what was logged just now."""
        self._round, self._shown_at, self._tenths = status.round, self._monotonic(), _tenths(status)
        if self._told not in text or self._shown_at - self._told_at > _JUST_NOW:
            self._write(text)

    def say(self, text: str) -> None:
        """Print one line at once."""
        text = with_names(text, self._called)
        self._told, self._told_at = text.removeprefix("warning: "), self._monotonic()
        self._write(text)

    def _write(self, text: str) -> None:
        write_line(self._stream, f"{self._prefix}{text}")

    def result(self, text: str) -> None:
        """Print on stdout."""
        write_out(text)

    def close(self) -> None:
        """Do nothing: there is nothing to restore."""


class LiveDisplay:
    """A small table that is redrawn in place; the last line says how to stop, until it is closed.

    Whatever else goes to this terminal must go through ``say`` or ``result``: what is written past them is wiped off by
    the next redraw, which goes up as many lines as the table had.
    """

    def __init__(self, console: Console, *, stop: str) -> None:
        self._console = console
        self._stop = stop
        self._last: Status | None = None
        self._live = Live(console=console, auto_refresh=False, transient=False, redirect_stdout=_is_terminal_out())
        self._live.start()

    def show(self, status: Status) -> None:
        """Redraw."""
        self._last = status
        self._live.update(render(status, self._stop, rows=self._console.height), refresh=True)

    def say(self, text: str) -> None:
        """Print above the table, without a line break of ours: an invite is selected and copied whole."""
        text = text if self._last is None else with_names(text, names_in(self._last))
        self._console.print(Text(text), soft_wrap=True)

    def result(self, text: str) -> None:
        """Print above the table, and on stdout when that is not this terminal."""
        self.say(text)
        if not _is_terminal_out():
            write_out(text)

    def close(self) -> None:
        """Leave the last picture, in which there is nothing to stop any more, and give the cursor back."""
        if self._last is not None:
            self._live.update(render(self._last, None, rows=self._console.height))
        self._live.stop()


def _tenths(status: Status) -> int:
    return 10 * status.model_here // status.model_nbytes if status.model_nbytes else 0


def _is_terminal_out() -> bool:
    return sys.stdout is not None and sys.stdout.isatty()


def invite_for(stream: IO[str], invite: str) -> str:
    """Return the invite as it may be written to ``stream``: without token, unless that is a terminal or hands stdout to
    a program. A file, a service's journal and piped errors are kept, and others may read them.
    """
    found = Invite.parse(invite)
    return invite if found.token is None or _is_for_now(stream) else str(replace(found, token=None))


def _is_for_now(stream: IO[str]) -> bool:
    try:
        kind = os.fstat(stream.fileno()).st_mode
    except (OSError, ValueError, AttributeError):  # a notebook's, which is a file in the end
        return False
    return stream.isatty() or (stream is sys.stdout and stat.S_ISFIFO(kind))


def write_out(text: str) -> None:
    """Write a line on stdout, at once. Where its reader has gone (``| head -1``), training goes on."""
    with suppress(BrokenPipeError):
        sys.stdout.write(writable(sys.stdout, text) + "\n")
        sys.stdout.flush()


def write_line(stream: IO[str] | None, text: str) -> None:
    """Write a line for whoever still reads the stream; None: a process has none, as pythonw."""
    if stream is not None:
        with suppress(OSError, ValueError):  # closed, or on a disk that is full
            print(writable(stream, text), file=stream, flush=True)


def writable(stream: IO[str], text: str) -> str:
    r"""The text with ``\xe4`` for what the stream's encoding has not: a name of a folder may hold any letter."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


def render(status: Status, stop: str | None, *, rows: int) -> Group:
    """Return the live view of a status, on a screen of so many rows; ``stop`` is None when all is over."""
    return Group(
        Text(health_sentence(status), style=_STYLES.get(health_word(status), "cyan")),
        _numbers(status),
        *((_members(status, max(1, min(_MAX_MEMBERS_SHOWN, rows - _OTHER_ROWS))),) if status.members else ()),
        *(() if stop is None else (Text(f"to stop: {stop}", style="dim"),)),
    )


def _numbers(status: Status) -> Table:
    table = Table.grid(padding=(0, 2))
    for row in LIVE_CELLS:
        cells = [text for label, name in row for text in (label, _cell(status, name))]
        if None not in cells:
            table.add_row(*(Text(text or "") for text in cells))  # brackets are no markup
    return table


def _cell(status: Status, name: str) -> str | None:
    return _CELLS[name](status) if name in _CELLS else quantity_text(status, name) or "-"


def _round_cell(status: Status) -> str:
    rounds = "" if status.rounds is None else f" of {status.rounds}"
    return f"{status.round}{rounds}"


def _model_cell(status: Status) -> str | None:
    if status.state != "syncing" or not status.model_nbytes:
        return None
    share = status.model_here / status.model_nbytes
    return f"{bar(share)} {share:.0%}"


_CELLS: Mapping[str, Callable[[Status], str | None]] = {  # of fields that take more than their number; None: no row
    "run": lambda status: status.run or status.run_id[:12],
    "round": _round_cell,
    "model_nbytes": _model_cell,
    "bytes_sent": lambda status: f"{in_units(status.bytes_sent)}, {quantity_text(status, 'sent_per_second')}",
    "bytes_received": lambda status: (
        f"{in_units(status.bytes_received)}, {quantity_text(status, 'received_per_second')}"
    ),
}


def _members(status: Status, num_shown: int) -> Table:
    table = Table(box=None, padding=(0, 2), header_style="dim")
    for column in ("peer", "state", "round", "path"):
        table.add_column(column)
    called = names_in(status)
    for member in status.members[:num_shown]:
        name = str(member.get("peer", "?"))
        you = " (you)" if name == status.peer else ""
        state = status.state if you else presence(member)
        round_, path = ("-" if member.get(key) is None else str(member[key]) for key in ("round", "path"))
        table.add_row(with_names(short_name(name), called) + you, state, round_, path)
    hidden = len(status.members) - num_shown
    if hidden > 0:
        table.add_row(f"and {hidden} more", "", "", "")
    return table


# ---- a run that is over already ----
#
# A peer that joins it shows nothing but its end, as there is nothing to get ready for.

_FETCHING = "the run is over: fetching its last state ..."
_OF_THE_END = ("starting", "syncing", "done")  # what such a peer goes through


class LateDisplay:
    """Keeps still; the display of a peer that trains opens when anything else comes, for others' word may be wrong."""

    def __init__(
        self, stream: IO[str], open_: Callable[[], Display], *, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._stream, self._open, self._monotonic = stream, open_, monotonic
        self._began = monotonic()
        self._told = False
        self._display: Display | None = None

    def show(self, status: Status) -> None:
        """Show nothing of an end as it should be, but a line when that takes long."""
        if self._display is None and (status.problem or status.state not in _OF_THE_END):
            self._display = self._open()
        if self._display is not None:
            self._display.show(status)
        elif status.state != "done" and not self._told and self._monotonic() - self._began >= HINT_SECONDS:
            self._told = True
            self.say(_FETCHING)

    def say(self, text: str) -> None:
        """Show a line that stays."""
        if self._display is not None:
            self._display.say(text)
        else:
            write_line(self._stream, text)

    def result(self, text: str) -> None:
        """Put a line on stdout."""
        if self._display is not None:
            self._display.result(text)
        else:
            write_out(text)

    def close(self) -> None:
        """Close what was opened."""
        if self._display is not None:
            self._display.close()


# ---- the library's own log ----
#
# ``logging.getLogger("decentral...")`` as lines of a display. A handler that wrote to stderr by itself would tear the
# live view, and be wiped off by it.


@contextmanager
def log_shown_by(say: Callable[[str], None]) -> Iterator[None]:
    """Have warnings and errors that are logged inside the block said, too, and what is logged for a screen."""
    log, handler = logging.getLogger("decentral"), _LogLines(say)
    handler.addFilter(lambda record: record.levelno >= logging.WARNING or _is_plain(record))
    level = log.level
    log.setLevel(logging.INFO)
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)


class _LogLines(logging.Handler):
    def __init__(self, say: Callable[[str], None]) -> None:
        super().__init__()
        self._say = say

    def emit(self, record: logging.LogRecord) -> None:
        """Say it; a message that cannot be formatted is logging's own business."""
        try:
            for line in f"{_word(record)}{self.format(record)}".splitlines():
                self._say(printable(line))
        except Exception:  # noqa: BLE001  as every handler does: what is logged must never end what logs it
            self.handleError(record)


def _word(record: logging.LogRecord) -> str:
    """Return what stands before a line; nothing before what is no complaint (``extra={"plain": True}``)."""
    if _is_plain(record):
        return ""
    return "error: " if record.levelno >= logging.ERROR else "warning: "  # hivemind gives the levels other names


def _is_plain(record: logging.LogRecord) -> bool:
    return bool(getattr(record, "plain", False))


# ---- a word for who waits ----
#
# On the screen, for somebody that waits longer than usual.

HINT_SECONDS = 15.0  # until somebody who waits is told for what, and what may be wrong


@contextmanager
def hint_after(seconds: float, text: str) -> Iterator[None]:
    """Say ``text`` on stderr, once, when the block has lasted so long."""
    timer = threading.Timer(seconds, say, (text,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def say(text: str) -> None:
    """Write a line on stderr, for whoever still reads that."""
    write_line(sys.stderr, text)


# ---- a bar of plain characters ----
#
# For people: the same wherever one is shown.

BAR_WIDTH = 20  # characters between its ends


def bar(share: float, width: int = BAR_WIDTH) -> str:
    """Return ``[#####---------------]`` for a quarter; ``share`` from 0 to 1."""
    done = int(width * min(1.0, max(0.0, share)))
    return f"[{'#' * done}{'-' * (width - done)}]"
