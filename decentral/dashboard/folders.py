"""Which peers' folders a directory has: it may be one itself, or hold several side by side, as a demo's does."""

from __future__ import annotations

import math
from pathlib import Path

from decentral.observe.status import STATUS_FILE

MANIFEST_FILE = "run.toml"
MOST = 64  # folders on one page


def peers_in(directory: Path) -> dict[str, Path]:
    """Folders by the name that the page calls them, the empty name for the directory itself.

    Looked at anew every time: a demo's peers come one after the other.
    """
    if (directory / STATUS_FILE).is_file():
        return {"": directory}
    try:
        found = sorted(
            (_began(path.parent), path.parent.name, path.parent) for path in directory.glob(f"*/{STATUS_FILE}")
        )
    except OSError:
        return {}
    return {name: path for _, name, path in found[:MOST]}


def _began(folder: Path) -> float:
    """When its peer learnt of the run: a newcomer stands behind those who were there."""
    try:
        return (folder / MANIFEST_FILE).stat().st_mtime
    except OSError:
        return math.inf


def chosen(folders: dict[str, Path], asked: str | None) -> str | None:
    """The one that was asked for, else the first; a name that is none of them is never made a path."""
    if asked is not None and asked in folders:
        return asked
    return next(iter(folders), None)
