"""How many rows and columns each part of the screen gets. Pure."""

from __future__ import annotations

from dataclasses import dataclass

FRAME = 2  # rows of a border
SIDES = 4  # columns of a border, and of the blanks beside it


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
    """At most so many for the sentence of health."""
    return 1 if height < 14 else 2 if height < 24 else 3


def places(width: int, height: int, health: int | None = None) -> Places:
    """For a screen of so many cells; ``health``: rows that its sentence needs."""
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
