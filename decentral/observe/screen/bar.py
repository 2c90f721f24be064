"""A bar of plain characters, and how long something still takes, for people: the same wherever one is shown."""

from __future__ import annotations

WIDTH = 20  # characters between its ends


def bar(share: float, width: int = WIDTH) -> str:
    """``[#####---------------]`` for a quarter; ``share`` from 0 to 1."""
    done = int(width * min(1.0, max(0.0, share)))
    return f"[{'#' * done}{'-' * (width - done)}]"


def left_after(share: float, seconds: float) -> float:
    """Seconds that the rest takes, as it went so far: ``seconds`` for this ``share``, which is more than 0."""
    return seconds * (1.0 - share) / share
