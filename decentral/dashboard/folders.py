"""Which peers' folders a directory has: it may be one itself, or hold several side by side, as a demo's does."""

from __future__ import annotations

from pathlib import Path

from decentral.observe.status import STATUS_FILE

MOST = 64  # folders on one page


def peers_in(directory: Path) -> dict[str, Path]:
    """Folders by the name that the page calls them, the empty name for the directory itself.

    Looked at anew every time: a demo's peers come one after the other.
    """
    if (directory / STATUS_FILE).is_file():
        return {"": directory}
    try:
        found = sorted(path.parent for path in directory.glob(f"*/{STATUS_FILE}"))
    except OSError:
        return {}
    return {path.name: path for path in found[:MOST]}


def chosen(folders: dict[str, Path], asked: str | None) -> str | None:
    """The one that was asked for, else the first; a name that is none of them is never made a path."""
    if asked is not None and asked in folders:
        return asked
    return next(iter(folders), None)
