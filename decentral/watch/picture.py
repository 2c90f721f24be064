"""The whole screen from one look: for every part its text, its place and the words on its frame. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rich.text import Text

from decentral.dashboard.view import View
from decentral.watch.cells import fit, joined, shown
from decentral.watch.head import health, title
from decentral.watch.keys import bottom
from decentral.watch.loss import caption as loss_caption
from decentral.watch.loss import loss
from decentral.watch.news import news
from decentral.watch.others import furthest, others, summary
from decentral.watch.own import own
from decentral.watch.places import FRAME, SIDES, health_rows, places
from decentral.watch.strip import caption, in_progress, legend, strip

FRAMED = ("own", "others", "strip", "loss")
_ON_FRAME = 6  # columns of a frame that hold no words


@dataclass(frozen=True, slots=True)
class Part:
    """One part of the screen. ``width`` and ``height`` from edge to edge; without rows it is not shown."""

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
    """Parts by name, from top to bottom. ``first``: of the others, who stands at the top; ``said``: the last answer."""
    now, rounds, learning = (parts.get(name, {}) for name in ("now", "rounds", "learning"))
    sentence = health(now, width, health_rows(height))
    at = places(width, height, len(sentence.plain.splitlines()))
    first = min(first, furthest(now, at.panels - FRAME))
    which = folders.index(folder) if folder in folders else 0
    curve, span = loss_caption(learning)

    def framed(draw: Text, wide: int, high: int, above: str, below: str = "") -> Part:
        return Part(draw, wide, high, *(fit(shown(words), wide - _ON_FRAME) for words in (above, below)))

    def inside(wide: int, high: int) -> tuple[int, int]:
        return max(0, wide - SIDES), max(0, high - FRAME)

    strip_above = joined((caption(rounds), in_progress(now)))
    return {
        "title": Part(title(now, width, folder=folder, at=which, of=len(folders)), width, 1),
        "health": Part(sentence, width, at.health),
        "own": framed(own(now, *inside(at.left, at.panels)), at.left, at.panels, _me(now)),
        "others": framed(others(now, *inside(at.right, at.panels), first), at.right, at.panels, summary(now)),
        "strip": framed(strip(rounds, *inside(width, at.strip)), width, at.strip, strip_above, legend(rounds)),
        "loss": framed(loss(learning, *inside(width, at.loss)), width, at.loss, curve, span),
        "news": Part(news(parts.get("events", {}), width, at.news), width, at.news),
        "bottom": Part(bottom(width, said=said, several=len(folders) > 1), width, 1),
    }


def _me(now: View) -> str:
    short = (now.get("me") or {}).get("short")
    return f"this peer {short}" if short else "this peer"
