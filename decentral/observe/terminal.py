"""What a running peer shows: a live view on a terminal, one plain line per round anywhere else.

Both write to stderr, because stdout belongs to results. Both end with how to stop. Colours follow
``NO_COLOR``.
"""

import time
from collections.abc import Callable
from typing import IO, Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from decentral.observe.health import health_sentence, in_units, short_name
from decentral.observe.status import Status

_SILENCE_SECONDS = 30.0  # a log that says nothing for longer looks stuck
_MAX_MEMBERS_SHOWN = 12
_STYLES = {"healthy": "green", "done": "green", "attention": "bold red", "late": "yellow"}


class Display(Protocol):
    """Somewhere to show how the peer is."""

    def show(self, status: Status) -> None:
        """Show this moment."""

    def say(self, text: str) -> None:
        """Show one line that stays."""

    def close(self) -> None:
        """Leave the last state readable."""


def open_display(stream: IO[str], *, stop: str) -> Display:
    """The live view when ``stream`` is a terminal that can move its cursor, else plain lines."""
    console = Console(file=stream, highlight=False)
    if console.is_terminal and not console.is_dumb_terminal:
        return LiveDisplay(console, stop=stop)
    return PlainDisplay(stream, stop=stop)


class PlainDisplay:
    """One line per round or change of state, and one when nothing changed for half a minute."""

    def __init__(self, stream: IO[str], *, stop: str, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._monotonic = monotonic
        self._shown: tuple[str, int, str] | None = None
        self._shown_at = 0.0
        self.say(f"to stop: {stop}")

    def show(self, status: Status) -> None:
        """Print the health sentence when it tells something new."""
        now, what = self._monotonic(), (status.state, status.round, status.problem)
        if what == self._shown and now - self._shown_at < _SILENCE_SECONDS:
            return
        self._shown, self._shown_at = what, now
        self.say(health_sentence(status))

    def say(self, text: str) -> None:
        """Print one line at once."""
        print(text, file=self._stream, flush=True)

    def close(self) -> None:
        """Nothing to restore."""


class LiveDisplay:
    """A small table that is redrawn in place; the last line says how to stop."""

    def __init__(self, console: Console, *, stop: str) -> None:
        self._console = console
        self._stop = stop
        self._live = Live(console=console, auto_refresh=False, transient=False)
        self._live.start()

    def show(self, status: Status) -> None:
        """Redraw."""
        self._live.update(render(status, self._stop), refresh=True)

    def say(self, text: str) -> None:
        """Print above the table."""
        self._console.print(Text(text))

    def close(self) -> None:
        """Leave the last picture and give the cursor back."""
        self._live.stop()


def render(status: Status, stop: str) -> Group:
    """The live view of one status."""
    sentence = health_sentence(status)
    word = sentence.split(":", 1)[0]
    return Group(
        Text(sentence, style=_STYLES.get(word, "cyan")),
        _numbers(status),
        _members(status),
        Text(f"to stop: {stop}", style="dim"),
    )


def _numbers(status: Status) -> Table:
    table = Table.grid(padding=(0, 2))
    rounds = "" if status.rounds is None else f" of {status.rounds}"
    table.add_row("run", status.run or status.run_id[:12], "round", f"{status.round}{rounds}, epoch {status.epoch}")
    loss = "-" if status.loss is None else f"{status.loss:.4f}"
    table.add_row("loss", loss, "inner steps", str(status.inner_steps))
    table.add_row(
        "sent",
        f"{in_units(status.bytes_sent)}, {in_units(status.sent_per_second)}/s",
        "received",
        f"{in_units(status.bytes_received)}, {in_units(status.received_per_second)}/s",
    )
    return table


def _members(status: Status) -> Table:
    table = Table(box=None, padding=(0, 2), header_style="dim")
    for column in ("peer", "state", "round", "path"):
        table.add_column(column)
    for member in status.members[:_MAX_MEMBERS_SHOWN]:
        name = str(member.get("peer", "?"))
        you = " (you)" if name == status.peer else ""
        cells = (str(member.get(key, "-")) for key in ("state", "round", "path"))
        table.add_row(short_name(name) + you, *cells)
    hidden = len(status.members) - _MAX_MEMBERS_SHOWN
    if hidden > 0:
        table.add_row(f"and {hidden} more", "", "", "")
    return table
