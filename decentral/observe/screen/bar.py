"""A bar of plain characters, for people: the same wherever one is shown."""

from __future__ import annotations

WIDTH = 20  # characters between its ends


def bar(share: float, width: int = WIDTH) -> str:
    """``[#####---------------]`` for a quarter; ``share`` from 0 to 1."""
    done = int(width * min(1.0, max(0.0, share)))
    return f"[{'#' * done}{'-' * (width - done)}]"
