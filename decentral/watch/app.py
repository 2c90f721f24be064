"""The app of the view: it looks once a second on a thread, shows the picture of it, and hands keys on."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal
from textual.events import Key
from textual.screen import ModalScreen
from textual.widgets import Static

from decentral.dashboard.live import LiveFolder, choose_folder, peers_in
from decentral.dashboard.view import View
from decentral.errors import DecentralError
from decentral.observe.requests import answer_to, ask_running
from decentral.watch.panels import furthest
from decentral.watch.picture import FRAME, FRAMED, REQUESTS, Part, help_text, picture, question

PERIOD = 1.0  # s between two looks: as often as a peer writes its status
SAID = 10.0  # s that an answer stays in the last line
_SCROLLS = {"up,k": -1, "down,j": 1, "pageup": -8, "pagedown": 8}


class Watch(App[BaseException]):
    """The app of one folder. Ends with None by its key, else with what ended it, to be raised once the terminal is as
    before.
    """

    ENABLE_COMMAND_PALETTE = False
    CSS = """
    Screen { background: ansi_default; }
    ModalScreen { background: transparent; }
    Static { height: 1; }
    #panels { height: auto; }
    .framed { border: round ansi_default; padding: 0 1; }
    ModalScreen { align: center middle; }
    .box { border: round ansi_default; padding: 0 2; width: 56; max-width: 100%; height: auto; }
    .box { background: ansi_default; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        *(Binding(key, f"ask('{request}')") for key, request in REQUESTS.items()),
        Binding("question_mark,h", "help"),
        Binding("q", "close"),
        Binding("ctrl+c", "interrupt", priority=True),
        Binding("right", "turn(1)"),
        Binding("left", "turn(-1)"),
        *(Binding(key, f"scroll_others({by})") for key, by in _SCROLLS.items()),
    ]

    def __init__(self, directory: Path, *, period: float = PERIOD) -> None:
        super().__init__(ansi_color=True)
        self.theme = "ansi-dark"  # the terminal's own sixteen colours and its background
        self._watched, self._period = Watched(directory), period
        self._looking = asyncio.Lock()
        self._seen = Seen({}, directory)
        self._wanted: str | None = None  # which of several folders
        self._first, self._rows = 0, 0  # of the others, who stands at the top, and rows of their panel
        self._said = ""
        self._drawn: dict[str, Part] = {}

    def compose(self) -> ComposeResult:
        """Yield the parts from top to bottom."""
        yield Static(id="title")
        yield Static(id="health")
        with Horizontal(id="panels"):
            yield Static(id="own", classes="framed")
            yield Static(id="others", classes="framed")
        yield Static(id="strip", classes="framed")
        yield Static(id="loss", classes="framed")
        yield Static(id="news")
        yield Static(id="bottom")

    async def on_mount(self) -> None:
        """Look before anything is drawn, then once every period."""
        with suppress(ValueError, RuntimeError, NotImplementedError):  # not on the main thread, or no such signal here
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self.exit, SystemExit(128 + signal.SIGTERM))
        await self.look()
        self.set_interval(self._period, self.look)

    def on_unmount(self) -> None:
        """Close the files."""
        self._watched.close()

    def on_resize(self) -> None:
        """Draw again: every part gets another place."""
        self._draw()

    async def look(self) -> None:
        """Read what is there now, and show it. What goes wrong ends the view, for the command line to say."""
        if self._looking.locked():
            return  # a disk that is slow: the look before is not back yet
        async with self._looking:
            try:
                self._seen = await asyncio.to_thread(self._watched.look, self._wanted)
            except Exception as error:  # noqa: BLE001  textual would print a traceback into the terminal
                self.exit(error)
            self._draw()

    def _draw(self) -> None:
        """Draw what has changed since it was drawn last."""
        try:
            self._show(self._picture())
        except Exception as error:  # noqa: BLE001  as above
            self.exit(error)

    def _picture(self) -> dict[str, Part]:
        seen, (width, height) = self._seen, self.size
        return picture(
            seen.parts, width, height, folder=seen.name, folders=seen.names, first=self._first, said=self._said
        )

    def _show(self, drawn: dict[str, Part]) -> None:
        self._rows = drawn["others"].height - FRAME
        for name, part in drawn.items():
            before = self._drawn.get(name)
            if part != before:  # a line that is slow carries what changed, and not the screen every second
                self._place(self.screen_stack[0].query_one(f"#{name}", Static), name, part, before)
        self._drawn = drawn

    def _place(self, widget: Static, name: str, part: Part, before: Part | None) -> None:
        moved = before is None or (part.width, part.height) != (before.width, before.height)
        if moved:
            widget.display = part.height > 0
            widget.styles.width, widget.styles.height = part.width, part.height
        widget.update(part.text, layout=moved)
        if name in FRAMED:
            widget.border_title, widget.border_subtitle = part.above, part.below

    def say(self, text: str) -> None:
        """Show a text in the last line, for a while."""
        self._said = text
        self._draw()
        if text:
            self.set_timer(SAID, partial(self._unsay, text))

    def _unsay(self, text: str) -> None:
        if self._said == text:
            self.say("")

    def action_ask(self, request: str) -> None:
        """Ask the person first; a peer that has ended is not asked for anything."""
        now = self._seen.parts.get("now", {})
        short = str((now.get("me") or {}).get("short") or "")
        if not now.get("alive"):
            self.say(f"no peer runs here now; nothing to {request}")
            return
        asking = partial(
            self._take_answer, request, self._seen.directory
        )  # whose view it was: it may have turned meanwhile
        self.push_screen(Question(request, short), asking)

    def _take_answer(self, request: str, directory: Path, meant: bool | None) -> None:
        if not meant:
            self.say("nothing was asked of the peer")
            return
        try:
            self.say(f"asked: {answer_to(request, ask_running(directory, request))}")
        except DecentralError as error:
            self.say(str(error))

    def action_help(self) -> None:
        """Show what keys and signs mean."""
        self.push_screen(Help())

    async def action_turn(self, by: int) -> None:
        """Go to another peer of the folder."""
        names = self._seen.names
        if len(names) > 1:
            at = names.index(self._seen.name) if self._seen.name in names else 0
            self._wanted, self._first = names[(at + by) % len(names)], 0
            await self.look()

    def action_scroll_others(self, by: int) -> None:
        """Go to further peers, and back."""
        last = furthest(self._seen.parts.get("now", {}), self._rows)
        self._first = max(0, min(last, self._first + by))
        self._draw()

    def action_close(self) -> None:
        """Close the view alone."""
        self.exit()

    def action_interrupt(self) -> None:
        """End the view by Ctrl-C; the peer goes on."""
        self.exit(KeyboardInterrupt())


# ---- the folder that is looked at ----
#
# It may hold several peers: one of them at a time, through the page's reader.


@dataclass(frozen=True, slots=True)
class Seen:
    """A look: the view of one peer in its parts, and whose it is."""

    parts: Mapping[str, View]
    directory: Path
    name: str = ""  # of its folder
    names: tuple[str, ...] = ("",)


class Watched:
    """Looks into ``directory``. Not to be asked by two threads at a time."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._live: LiveFolder | None = None
        self._of: Path | None = None

    def look(self, asked: str | None = None) -> Seen:
        """Read what is there now; ``asked``: one folder of several, else the first. Blocks while it reads."""
        folders = peers_in(self._directory)
        name = choose_folder(folders, asked)
        place = self._directory if name is None else folders[name]
        if self._live is None or place != self._of:
            self.close()
            self._live, self._of = LiveFolder(place), place
        return Seen(self._live.look(), place, name or "", tuple(folders) or ("",))

    def close(self) -> None:
        """Close the files."""
        if self._live is not None:
            self._live.close()
        self._live = self._of = None


# ---- dialogs above the view ----
#
# For a moment: a question, and the page of help.


class Question(ModalScreen[bool]):
    """A question before a request: y, and nothing else, is yes."""

    def __init__(self, request: str, peer: str) -> None:
        super().__init__()
        self._asks, self._does = question(request, peer)
        self._answered = False  # a second key may come before the screen is gone

    def compose(self) -> ComposeResult:
        """Yield the box."""
        yield Static(Text.assemble((f"{self._asks}\n", "bold"), self._does), classes="box")

    def on_key(self, event: Key) -> None:
        """Take any key for an answer."""
        event.stop()
        if not self._answered:
            self._answered = True
            self.dismiss(event.key in ("y", "Y"))


class Help(ModalScreen[None]):
    """The page of help; any key closes it."""

    _answered = False

    def compose(self) -> ComposeResult:
        """Yield the box."""
        yield Static(help_text(), classes="box")

    def on_key(self, event: Key) -> None:
        """Close."""
        event.stop()
        if not self._answered:
            self._answered = True
            self.dismiss()
