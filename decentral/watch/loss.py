"""The sparkline of the loss. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from rich.text import Text

from decentral.dashboard.view import View
from decentral.watch.cells import block, figure
from decentral.watch.strip import bars

_MOST_CELLS = 4  # of one value
_CURVES = (  # the first that has a value
    ("training", "loss", "training loss"),
    ("held_out", "bits_per_byte", "held-out loss, bits per byte"),
)


def loss(learning: View, width: int, height: int) -> Text:
    """From the first step to the newest, each cell the mean of those that fall on it."""
    values = spread(curve(learning)[1], width)
    if not values:
        return Text("no loss is known yet", style="dim")
    low, high = min(values), max(values)
    shares = [(value - low) / (high - low) if high > low else 0.5 for value in values]
    return block(bars(shares, ["cyan"] * len(shares), height), width, height)


def caption(learning: View) -> tuple[str, str]:
    """What is drawn and where it is now; from where to where it went, for the frame."""
    name, values = curve(learning)
    if not values:
        return "loss", ""
    return f"{name}: {values[-1]:.3f}", f"{min(values):.3f} to {max(values):.3f}"


def curve(learning: View) -> tuple[str, list[float]]:
    """A name and its values: the training loss, or where none is told the one of held-out text."""
    for series, column, name in _CURVES:
        found = [one for value in learning.get(series, {}).get(column, ()) if (one := figure(value)) is not None]
        if found:
            return name, found
    return "loss", []


def spread(values: Sequence[float], width: int) -> list[float]:
    """Over ``width`` cells: means where there are more values, the same several times where there are far fewer."""
    times = min(_MOST_CELLS, width // len(values)) if values else 1
    return means(values, width) if times < 2 else [value for value in values for _ in range(times)]


def means(values: Sequence[float], width: int) -> list[float]:
    """At most ``width`` of them."""
    if len(values) <= width or width < 1:
        return list(values[: max(0, width)])
    edges = [at * len(values) // width for at in range(width + 1)]
    parts = [values[begin:end] for begin, end in pairwise(edges)]
    return [sum(part) / len(part) for part in parts]
