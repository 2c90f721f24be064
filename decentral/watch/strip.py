"""The strip of rounds: a bar each, as high as it took long, and below it a mark of who was in it. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.text import Text

from decentral.dashboard.view import View, is_pair
from decentral.watch.cells import block, figure, shown

EIGHTHS = " ▁▂▃▄▅▆▇█"
LEGEND = "● all in  ◐ not everybody  ○ not yours"
PAIRS = "● met a partner  ○ alone"
_UNKNOWN = 0.3  # of the height, of a round that nobody timed
_MOST_BUT_FEW = 0.95  # one stall of an hour must not flatten the others


def strip(part: View, width: int, height: int) -> Text:
    """The newest rounds, one cell each. What colours say the marks do as well."""
    made = list(part.get("rounds", ()))[-width:] if width > 0 else []
    if not made:
        return Text("no round was made yet", style="dim")
    styles = [_mark(one)[1] for one in made]
    shares = _shares([figure(one.get("seconds")) for one in made])
    lines = bars(shares, styles, max(1, height - 1)) if height > 1 else []
    marks = Text.assemble(*(_mark(one) for one in made))
    return block([*lines, marks], width, height)


def bars(shares: Sequence[float], styles: Sequence[str], height: int) -> list[Text]:
    """Columns of ``shares`` of the height, from the top line down; each is an eighth of a cell high at least."""
    lines = []
    for row in reversed(range(height)):
        eighths = [max(0, min(8, max(1, round(8 * height * share)) - 8 * row)) for share in shares]
        lines.append(Text.assemble(*((EIGHTHS[at], style) for at, style in zip(eighths, styles, strict=True))))
    return lines


def caption(part: View) -> str:
    """Which rounds are shown, for the frame."""
    rounds = part.get("rounds", ())
    return f"rounds, up to {shown(rounds[-1].get('step'))}" if rounds else "rounds"


def legend(part: View) -> str:
    """What the marks are."""
    rounds = part.get("rounds", ())
    return PAIRS if rounds and is_pair(rounds[-1]) else LEGEND if rounds else ""


def in_progress(now: View) -> str:
    """The round that is made now; empty where none is."""
    made = now.get("open")
    if not isinstance(made, Mapping):
        return ""
    votes = f", {shown(made['votes'])} votes" if figure(made.get("votes")) else ""
    return (
        f"round {shown(made.get('round'))}: {shown(made.get('offers'))} of {shown(made.get('members'))} offered{votes}"
    )


def _shares(seconds: Sequence[float | None]) -> list[float]:
    known = sorted(one for one in seconds if one is not None)
    longest = known[min(len(known) - 1, int(_MOST_BUT_FEW * len(known)))] if known else 0.0
    return [_UNKNOWN if one is None or longest <= 0 else max(0.0, min(1.0, one / longest)) for one in seconds]


def _mark(made: Mapping[str, Any]) -> tuple[str, str]:
    """A sign and its colour."""
    if is_pair(made):
        return ("●", "green") if made.get("contributors") else ("○", "yellow")
    if not made.get("contributed"):
        return "○", "yellow" if made.get("contributors") else "dim"
    return ("◐", "yellow") if made.get("late") else ("●", "green")
