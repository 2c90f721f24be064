"""What happened, the newest first. Pure."""

from __future__ import annotations

import time

from rich.text import Text

from decentral.dashboard.view import View
from decentral.watch.cells import block, figure, shown


def news(part: View, width: int, height: int) -> Text:
    """A line each, in local time."""
    lines = [
        Text.assemble((f" {_clock(one.get('t'))}  ", "dim"), shown(one.get("text"))) for one in part.get("events", ())
    ]
    return block(lines[:height], width, height)


def _clock(seconds: object) -> str:
    known = figure(seconds)
    try:
        return "--:--:--" if known is None else time.strftime("%H:%M:%S", time.localtime(known))
    except (OverflowError, ValueError, OSError):  # a time that no calendar has
        return "--:--:--"
