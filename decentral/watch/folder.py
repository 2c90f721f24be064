"""The folder that is looked at, which may hold several peers: one of them at a time, through the page's reader."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from decentral.dashboard.folders import chosen, peers_in
from decentral.dashboard.live import LiveFolder
from decentral.dashboard.view import View


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
        """What is there now; ``asked``: one folder of several, else the first. Blocks while it reads."""
        folders = peers_in(self._directory)
        name = chosen(folders, asked)
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
