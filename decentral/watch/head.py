"""The first lines: which run and peer this is, and the sentence of health. Pure."""

from __future__ import annotations

from typing import Any

from rich.cells import cell_len
from rich.text import Text

from decentral.dashboard.view import View
from decentral.observe.health import in_time
from decentral.watch.cells import figure, fit, joined, padded, shown, wrapped

_STYLES = {
    **dict.fromkeys(("healthy", "done"), "green"),
    **dict.fromkeys(("attention", "gone", "stalled", "nothing"), "bold red"),
    **dict.fromkeys(("late", "shrunk", "alone", "looking", "waiting"), "yellow"),
}


def title(now: View, width: int, *, folder: str = "", at: int = 0, of: int = 1) -> Text:
    """Run and algorithm; on the right which of several folders is shown. ``at`` counts from 0."""
    which = f" {shown(folder)}, {at + 1} of {of} " if of > 1 else " "
    run = now.get("run") or {}
    name = shown(run.get("name") or "decentral")
    line = Text(f" {joined((name, shown(run.get('algorithm') or ''), _progress(run)))}", style="bold")
    if of < 2:
        return fit(line, width)
    return Text.assemble(padded(line, max(0, width - cell_len(which))), fit(Text(which, style="cyan"), width))


def _progress(run: dict[str, Any]) -> str:
    made, rounds, left = figure(run.get("round")), figure(run.get("rounds")), figure(run.get("seconds_left"))
    if made is None:
        return ""
    return f"round {made}" + (f" of {rounds}" if rounds else "") + (f", {in_time(left)} left" if left else "")


def health(now: View, width: int, rows: int) -> Text:
    """The sentence, its first word in the colour of its mood: on as many rows as there are, if it needs them."""
    word = shown(now.get("word", ""))
    text = Text("\n".join(f" {line}" for line in wrapped(shown(now.get("health", "")), width - 2, rows)), no_wrap=True)
    if text.plain.startswith(f" {word}:"):
        text.stylize(_STYLES.get(word, "cyan"), 1, len(word) + 2)
    return text
