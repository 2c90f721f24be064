"""Lines of a terminal: text of others that steers nothing, and nothing that is cut without an ellipsis. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from rich.cells import cell_len
from rich.text import Text

from decentral.observe.health import TEXT_OF_UNIT, in_units
from decentral.observe.status import QUANTITIES, Unit
from decentral.observe.story import number

NOT_KNOWN = "not known"
_LONGEST = 1000  # characters of one value: signs without a width would never be cut


def shown(value: object) -> str:
    """Return a value that others may have chosen without line breaks, escapes and marks that turn writing around."""
    return "".join(c if c.isprintable() else "?" for c in str(value)[:_LONGEST])


def fit(text: Text | str, width: int) -> Text:
    """Return at most ``width`` cells, with an ellipsis where that is not all."""
    if width < 1:
        return Text()
    line = Text(text) if isinstance(text, str) else text.copy()
    line.truncate(width, overflow="ellipsis")
    return line


def pad(text: Text | str, width: int, *, right: bool = False) -> Text:
    """Return exactly ``width`` cells; ``right``: a number, below others of its column."""
    line = fit(text, width)
    missing = width - line.cell_len
    return Text.assemble(" " * missing, line) if right else Text.assemble(line, " " * missing)


def block(lines: Sequence[Text | str], width: int, height: int) -> Text:
    """Return lines below one another; where there are too many the last one tells of it."""
    kept = [fit(line, width) for line in lines[:height]]
    if len(lines) > height > 0:
        kept[-1] = Text("…", style="dim")
    return Text("\n", no_wrap=True).join(kept)


def wrap(text: str, width: int, rows: int) -> list[str]:
    """Return words on ``rows`` lines; an ellipsis stands for what does not fit."""
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".lstrip()
        if cell_len(longer) <= width or not lines[-1]:
            lines[-1] = longer
        elif len(lines) < rows:
            lines.append(word)
        else:
            lines[-1] = fit(f"{lines[-1]} …", width).plain
            break
    return [fit(line, width).plain for line in lines]


def join_parts(parts: Iterable[str]) -> str:
    """Join the parts of a line that say something."""
    return " · ".join(part for part in parts if part)


def figure(value: object) -> float | None:
    """Return a number that can be drawn; None for what is none, not finite, or larger than any float."""
    known = number(value)
    try:
        return known if known is not None and math.isfinite(known) else None
    except OverflowError:
        return None


def nbytes(value: object) -> str:
    """Return bytes for people."""
    known = figure(value)
    return NOT_KNOWN if known is None else in_units(known)


def bits(per_second: object) -> str:
    """Return what a line carries, in the units that it is sold in; 0 says that nobody has measured it."""
    known = figure(per_second)
    return f"{known / 1e6:.1f} Mbit/s" if known else NOT_KNOWN


def span(seconds: object) -> str:
    """Return a short span: ``12 ms``, ``3.4 s``; longer ones in seconds."""
    known = figure(seconds)
    if known is None:
        return ""
    return f"{1000 * known:.0f} ms" if known < 1 else f"{known:.1f} s" if known < 10 else f"{known:.0f} s"


_TEXT_OF_UNIT: Mapping[Unit, Callable[[float], str]] = {
    **TEXT_OF_UNIT,
    "bit/s": bits,
    "s": span,
}  # there is little room


def value_text(name: str, value: object) -> str:
    """Return the value of a field of the status for people, a quantity's in its unit."""
    if name not in QUANTITIES:
        return shown(value or NOT_KNOWN)
    known = figure(value)
    return NOT_KNOWN if known is None else _TEXT_OF_UNIT[QUANTITIES[name].unit](known)
