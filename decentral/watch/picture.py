"""The whole screen from one look: for every part its text, its place and the words on its frame. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rich.cells import cell_len
from rich.text import Text

from decentral.dashboard.view import View
from decentral.watch.cells import fit, join_parts, shown
from decentral.watch.panels import (
    caption_of_loss,
    caption_of_rounds,
    furthest,
    health,
    in_progress,
    legend,
    loss,
    news,
    others,
    own,
    strip,
    summary,
    title,
)

FRAME = 2  # rows of a border
SIDES = 4  # columns of a border, and of the blanks beside it
FRAMED = ("own", "others", "strip", "loss")
_ON_FRAME = 6  # columns of a frame that hold no words


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the screen. ``width`` and ``height`` from edge to edge; without rows it is not shown."""

    text: Text
    width: int
    height: int
    above: Text = field(default_factory=Text)  # on the frame
    below: Text = field(default_factory=Text)


def picture(
    parts: Mapping[str, View],
    width: int,
    height: int,
    *,
    folder: str = "",
    folders: tuple[str, ...] = ("",),
    first: int = 0,
    said: str = "",
) -> dict[str, Part]:
    """Return parts by name, from top to bottom. ``first``: which of the others is on top; ``said``: the last answer."""
    now, rounds, learning = (parts.get(name, {}) for name in ("now", "rounds", "learning"))
    sentence = health(now, width, health_rows(height))
    at = places(width, height, len(sentence.plain.splitlines()))
    first = min(first, furthest(now, at.panels - FRAME))
    which = folders.index(folder) if folder in folders else 0
    curve, span = caption_of_loss(learning)

    def in_frame(draw: Text, wide: int, high: int, above: str, below: str = "") -> Part:
        return Part(draw, wide, high, *(fit(shown(words), wide - _ON_FRAME) for words in (above, below)))

    def inside(wide: int, high: int) -> tuple[int, int]:
        return max(0, wide - SIDES), max(0, high - FRAME)

    strip_above = join_parts((caption_of_rounds(rounds), in_progress(now)))
    return {
        "title": Part(title(now, width, folder=folder, at=which, of=len(folders)), width, 1),
        "health": Part(sentence, width, at.health),
        "own": in_frame(own(now, *inside(at.left, at.panels)), at.left, at.panels, _me(now)),
        "others": in_frame(others(now, *inside(at.right, at.panels), first), at.right, at.panels, summary(now)),
        "strip": in_frame(strip(rounds, *inside(width, at.strip)), width, at.strip, strip_above, legend(rounds)),
        "loss": in_frame(loss(learning, *inside(width, at.loss)), width, at.loss, curve, span),
        "news": Part(news(parts.get("events", {}), width, at.news), width, at.news),
        "bottom": Part(bottom(width, said=said, several=len(folders) > 1), width, 1),
    }


def _me(now: View) -> str:
    short = (now.get("me") or {}).get("short")
    return f"this peer {short}" if short else "this peer"


# ---- rows and columns of each part ----


@dataclass(frozen=True, slots=True)
class Places:
    """Rows and columns from edge to edge; a part without rows is not shown."""

    width: int
    health: int
    panels: int
    strip: int
    loss: int
    news: int
    left: int  # columns of this peer's panel
    right: int


def health_rows(height: int) -> int:
    """Return how many rows the sentence of health may have."""
    return 1 if height < 14 else 2 if height < 24 else 3


def places(width: int, height: int, health: int | None = None) -> Places:
    """Return the places on a screen of so many cells; ``health``: rows that its sentence needs."""
    spare = max(0, height - 2)  # the title, the keys
    most = health_rows(height)
    health = most if health is None else max(min(2, most), min(most, health))  # one or two: the rest must not jump
    strip = 0 if height < 14 else max(4, height // 6)
    loss = 0 if height < 18 else max(3, height // 6)
    news = 0 if height < 18 else max(1, height // 4 - 4)
    left = min(46, round(0.46 * width))
    return Places(
        width=width,
        health=health,
        panels=max(3, spare - health - strip - loss - news),
        strip=strip,
        loss=loss,
        news=news,
        left=left,
        right=width - left,
    )


# ---- keys, questions and help ----
#
# As the bottom line and the page of help say them, and what is asked before a request.

REQUESTS = {"p": "pause", "r": "resume", "f": "finish", "l": "leave"}  # a key each
_KEYS = (*REQUESTS.items(), ("?", "help"), ("q", "close"))
_QUESTIONS = {
    "pause": "pause {}?",
    "resume": "resume {}?",
    "finish": "let {} finish?",
    "leave": "let {} leave?",
}
_MEANS = {
    "pause": "It stays in the swarm and contributes nothing until it is resumed.",
    "resume": "It contributes again, and trains on if training had stopped.",
    "finish": "It leaves once its next round is committed, at once where it is paused or rests.",
    "leave": "It leaves at its next step; a checkpoint is kept.",
}
HELP = (
    ("p, r", "pause this peer, resume it"),
    ("f", "finish: leave with its next round"),
    ("l", "leave: at the next step"),
    ("", "each asks first: y is yes"),
    ("up, down", "further peers; PgUp, PgDn"),
    ("left, right", "another peer of this folder"),
    ("q", "close this view, the peer goes on"),
    ("", ""),
    ("last", "● in the last round, ○ not in it"),
    ("rounds", "bars: how long each took"),
    ("● ◐ ○", "all in, not everybody, not yours"),
)


def bottom(width: int, *, said: str = "", several: bool = False) -> Text:
    """Return the last line: the answer to what was asked last, else the keys, as many as fit."""
    if said:
        return fit(Text(f" {shown(said)}", style="bold"), width)
    keys = [*_KEYS, ("→", "next peer")] if several else list(_KEYS)
    line = Text()
    for key, does in keys:
        if line.cell_len + cell_len(f" {key} {does} ") > width:
            break
        line = Text.assemble(line, (f" {key} ", "bold"), f"{does} ")
    return line


def question(request: str, peer: str) -> tuple[str, str]:
    """Return the question before a request is left, and what the request would do."""
    whom = f"this peer {shown(peer)}" if peer else "this peer"
    return f"{_QUESTIONS[request].format(whom)} y/n", _MEANS[request]


def help_text() -> Text:
    """Return the page of help."""
    lines = [Text.assemble((f"{key:<13}", "bold"), does) for key, does in HELP]
    return Text("\n").join(lines)
