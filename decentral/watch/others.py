"""The panel of the others: one line each, with as many columns as there is room for. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rich.text import Text

from decentral.dashboard.view import View
from decentral.watch.cells import block, figure, nbytes, padded, shown, span

_GAP = 2
_PATHS = {"direct": "green", "punched": "green", "relayed": "yellow"}
_MARKS = {True: ("●", "green"), False: ("○", "yellow")}


@dataclass(frozen=True, slots=True)
class _Column:
    name: str
    width: int
    cell: Callable[[View], Text]
    right: bool = False


def others(now: View, width: int, height: int, first: int = 0) -> Text:
    """Those from ``first`` on; the last line says how many more there are, above and below."""
    peers = others_of(now)
    if not peers:
        return Text("nobody yet", style="dim")
    columns = _columns(width)
    room = max(0, height - 1)
    hidden = len(peers) > room
    rows = peers[first : first + room - hidden]
    lines = [_line([Text(column.name, style="dim") for column in columns], columns)]
    lines += [_line([column.cell(peer) for column in columns], columns) for peer in rows]
    if hidden:
        lines.append(Text(_more(first, len(peers) - first - len(rows)), style="dim"))
    return block(lines, width, height)


def others_of(now: View) -> list[View]:
    """All but this peer: who is in the view, the page's 200 at most."""
    return [peer for peer in now.get("peers", ()) if not peer.get("self")]


def furthest(now: View, height: int) -> int:
    """The last ``first`` that fills the panel."""
    many, room = len(others_of(now)), max(0, height - 1)
    return max(0, many - max(1, room - 1)) if many > room else 0


def summary(now: View) -> str:
    """How many are there and not there, for the panel's frame."""
    peers = others_of(now)
    gone = sum(peer.get("presence") != "live" for peer in peers)
    more = figure(now.get("more_peers")) or 0
    return (
        f"the others: {len(peers) - gone} here"
        + (f", {gone} gone" if gone else "")
        + (f", {more} more" if more else "")
    )


def _more(above: int, below: int) -> str:
    parts = [f"{above} above" if above else "", f"{below} below" if below else ""]
    return f"{' and '.join(part for part in parts if part)}: up, down"


def _columns(width: int) -> list[_Column]:
    """As many as fit, in their order."""
    kept: list[_Column] = []
    for column in _COLUMNS:
        if sum(one.width + _GAP for one in kept) + column.width > width:
            break
        kept.append(column)
    return kept


def _line(cells: list[Text], columns: list[_Column]) -> Text:
    both = zip(cells, columns, strict=True)
    return Text(" " * _GAP).join(padded(cell, column.width, right=column.right) for cell, column in both)


def _name(peer: View) -> Text:
    return Text(shown(peer.get("short", "?")))


def _last(peer: View) -> Text:
    """Whether its update was in the last round."""
    taken = peer.get("in_last_round")
    return Text(*_MARKS[taken]) if isinstance(taken, bool) else Text("·", style="dim")


def _path(peer: View) -> Text:
    """How it is reached, or that it is not."""
    if (presence := shown(peer.get("presence"))) != "live":
        return Text(presence, style="red" if presence == "gone" else "dim")
    path = shown(peer.get("path") or "?")
    return Text(path, style=_PATHS.get(path, ""))


def _moved(key: str) -> Callable[[View], Text]:
    return lambda peer: Text("?" if figure(peer.get(key)) is None else nbytes(peer.get(key)))


def _uplink(peer: View) -> Text:
    known = figure(peer.get("uplink_bits"))
    return Text(f"{known / 1e6:.1f} Mbit/s" if known else "?")


def _seen(peer: View) -> Text:
    return Text(f"{span(peer.get('seen'))} ago" if figure(peer.get("seen")) is not None else "?")


_COLUMNS = (
    _Column("peer", 7, _name),
    _Column("last", 4, _last),
    _Column("path", 7, _path),
    _Column("answers", 7, lambda peer: Text(span(peer.get("answers_in")) or "?"), right=True),
    _Column("sent", 8, _moved("bytes_sent"), right=True),
    _Column("received", 8, _moved("bytes_received"), right=True),
    _Column("seen", 10, _seen, right=True),
    _Column("uplink", 12, _uplink, right=True),
    _Column("round", 7, lambda peer: Text(shown("?" if peer.get("round") is None else peer["round"])), right=True),
)
