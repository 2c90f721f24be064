"""What stands above the view for a moment: a question, and the page of help."""

from __future__ import annotations

from rich.text import Text
from textual.app import ComposeResult
from textual.events import Key
from textual.screen import ModalScreen
from textual.widgets import Static

from decentral.watch.keys import help_text, question


class Question(ModalScreen[bool]):
    """Whether a request is meant: y, and nothing else, is yes."""

    def __init__(self, request: str, peer: str) -> None:
        super().__init__()
        self._asks, self._does = question(request, peer)
        self._answered = False  # a second key may come before the screen is gone

    def compose(self) -> ComposeResult:
        """One box."""
        yield Static(Text.assemble((f"{self._asks}\n", "bold"), self._does), classes="box")

    def on_key(self, event: Key) -> None:
        """Any key answers."""
        event.stop()
        if not self._answered:
            self._answered = True
            self.dismiss(event.key in ("y", "Y"))


class Help(ModalScreen[None]):
    """What keys and signs mean; any key closes it."""

    _answered = False

    def compose(self) -> ComposeResult:
        """One box."""
        yield Static(help_text(), classes="box")

    def on_key(self, event: Key) -> None:
        """Close."""
        event.stop()
        if not self._answered:
            self._answered = True
            self.dismiss()
