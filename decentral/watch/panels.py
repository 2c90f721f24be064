"""The panels of the view, each a few lines of text from one look. Pure."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from rich.cells import cell_len
from rich.text import Text

from decentral.dashboard.view import View, is_pair
from decentral.observe.health import MOODS, in_time
from decentral.observe.status import ENDED, WATCH_ROWS
from decentral.watch.cells import (
    NOT_KNOWN,
    block,
    figure,
    fit,
    join_parts,
    nbytes,
    pad,
    shown,
    span,
    value_text,
    wrap,
)

# ---- the first lines ----
#
# The run and the peer, and the sentence of health.

_STYLE_OF_MOOD = {"ok": "green", "warn": "yellow", "bad": "bold red", "": "cyan"}


def title(now: View, width: int, *, folder: str = "", at: int = 0, of: int = 1) -> Text:
    """Return run and algorithm; on the right which of several folders is shown. ``at`` counts from 0."""
    which = f" {shown(folder)}, {at + 1} of {of} " if of > 1 else " "
    run = now.get("run") or {}
    name = shown(run.get("name") or "decentral")
    line = Text(f" {join_parts((name, shown(run.get('algorithm') or ''), _progress(run)))}", style="bold")
    if of < 2:
        return fit(line, width)
    return Text.assemble(pad(line, max(0, width - cell_len(which))), fit(Text(which, style="cyan"), width))


def _progress(run: dict[str, Any]) -> str:
    made, rounds, left = figure(run.get("round")), figure(run.get("rounds")), figure(run.get("seconds_left"))
    if made is None:
        return ""
    return f"round {made}" + (f" of {rounds}" if rounds else "") + (f", {in_time(left)} left" if left else "")


def health(now: View, width: int, rows: int) -> Text:
    """Return the sentence, its first word in the colour of its mood: on as many rows as there are, if it needs them."""
    word = shown(now.get("word", ""))
    text = Text("\n".join(f" {line}" for line in wrap(shown(now.get("health", "")), width - 2, rows)), no_wrap=True)
    if text.plain.startswith(f" {word}:"):
        mood = "bad" if word == "nothing" else MOODS.get(word, "")
        text.stylize(_STYLE_OF_MOOD[mood], 1, len(word) + 2)
    return text


# ---- this peer ----
#
# Its state, for whom it works, and what that costs.

_NAME_CELLS = 9  # cells of the first column
_FEW = 0.5  # of the recent rounds: below it a look at the link is worth it


def own(now: View, width: int, height: int) -> Text:
    """Return this peer's rows, the last given up first where there is little room."""
    if not now.get("me"):
        return Text("nothing is known of a peer yet", style="dim")
    rows = [
        Text.assemble(pad(Text(name, style="dim"), _NAME_CELLS), value) for name, value in _own_rows(now, now["me"])
    ]
    return block(rows[:height], width, height)  # a terminal that is higher shows the others


def _own_rows(now: View, me: dict[str, Any]) -> Iterator[tuple[str, Text]]:
    for label, name in WATCH_ROWS:
        if text := _OWN_ROWS[name](now, me) if name in _OWN_ROWS else Text(value_text(name, me.get(name))):
            yield label, text


def _state(now: View, me: dict[str, Any]) -> Text:
    state = shown(me.get("state", ""))
    if not now.get("alive") and state not in ENDED:
        return Text("gone", style="bold red")
    if now.get("word") == "frozen":
        return Text(f"{state}, frozen", style="bold red")
    return Text(state, style="green" if state == "training" else "")


def _useful(now: View, me: dict[str, Any]) -> Text:
    seen, contributed = figure(me.get("rounds_seen")), figure(me.get("rounds_contributed"))
    if not seen or contributed is None:
        return Text("no round yet")
    return Text(f"{contributed} of {seen} rounds", style="yellow" if contributed < _FEW * seen else "")


def _total_and_rate(total: str, rate: str) -> Callable[[View, dict[str, Any]], Text]:
    """Give the bytes so far, and how fast it goes now where the peer still runs."""

    def text(now: View, me: dict[str, Any]) -> Text:
        moves = now.get("alive") and figure(me.get(rate)) is not None
        return Text(value_text(total, me.get(total)) + (f", {value_text(rate, me[rate])}" if moves else ""))

    return text


def _caps(now: View, me: dict[str, Any]) -> Text:
    ways = (("up", figure(me.get("max_upload"))), ("down", figure(me.get("max_download"))))
    return Text(", ".join(f"{8 * cap / 1e6:g} Mbit/s {way}" for way, cap in ways if cap))


def _today(now: View, me: dict[str, Any]) -> Text:
    """Give what is used of the day's upload; empty where there is no limit."""
    if not figure(me.get("daily_upload")):
        return Text()
    return Text(f"{value_text('sent_today', me.get('sent_today'))} of {value_text('daily_upload', me['daily_upload'])}")


def _reachability(now: View, me: dict[str, Any]) -> Text:
    relays = me.get("relays") or ()
    through = f", {len(relays)} relay{'' if len(relays) == 1 else 's'}" if relays else ""
    silent = "".join(f", relay {shown(relay)} does not answer" for relay in me.get("silent_relays") or ())
    return Text(shown(me.get("reachability") or NOT_KNOWN) + through + silent)


def _savings(now: View, me: dict[str, Any]) -> Text:
    """Give how many times fewer bytes were sent than by a float32 all-reduce at every step."""
    cost = now.get("bytes") or {}
    dense, sent = figure(cost.get("dense")), figure(cost.get("sent"))
    return Text(f"{dense / sent:,.0f} x fewer bytes than all-reduce" if dense and sent else "")


_OWN_ROWS: Mapping[str, Callable[[View, dict[str, Any]], Text]] = {  # of fields that take more than their value
    "state": _state,
    "rounds_contributed": _useful,
    "bytes_sent": _total_and_rate("bytes_sent", "sent_per_second"),
    "bytes_received": _total_and_rate("bytes_received", "received_per_second"),
    "max_upload": _caps,
    "daily_upload": _today,
    "reachability": _reachability,
    "num_parameters": _savings,
}


# ---- the other peers ----
#
# One line each, with as many columns as there is room for.

_GAP = 2
_LETTERS = 7  # cells of who has no name
_MOST_OF_NAMES = 20  # cells of who has one
_PATHS = {"direct": "green", "punched": "green", "relayed": "yellow"}
_IN_LAST_ROUND = {True: ("●", "green"), False: ("○", "yellow")}


@dataclass(frozen=True, slots=True)
class _Column:
    name: str
    width: int
    cell: Callable[[View], Text]
    right: bool = False


def others(now: View, width: int, height: int, first: int = 0) -> Text:
    """Return the others from ``first`` on; the last line says how many more there are, above and below."""
    peers = others_of(now)
    if not peers:
        return Text("nobody yet", style="dim")
    columns = _columns(width, peers)
    room = max(0, height - 1)
    hidden = len(peers) > room
    rows = peers[first : first + room - hidden]
    lines = [_line_of([Text(column.name, style="dim") for column in columns], columns)]
    lines += [_line_of([column.cell(peer) for column in columns], columns) for peer in rows]
    if hidden:
        lines.append(Text(_more(first, len(peers) - first - len(rows)), style="dim"))
    return block(lines, width, height)


def others_of(now: View) -> list[View]:
    """Return all but this peer, as far as the view has them: the page's 200 at most."""
    return [peer for peer in now.get("peers", ()) if not peer.get("self")]


def furthest(now: View, height: int) -> int:
    """Return the last ``first`` that fills the panel."""
    many, room = len(others_of(now)), max(0, height - 1)
    return max(0, many - max(1, room - 1)) if many > room else 0


def summary(now: View) -> str:
    """Count who is there and who is not, for the panel's frame."""
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


def _columns(width: int, peers: Sequence[View]) -> list[_Column]:
    """Return as many columns as fit, in their order; the first is as wide as the names, up to a bound."""
    kept: list[_Column] = []
    named = min(_MOST_OF_NAMES, max(cell_len(shown(peer.get("short", "?"))) for peer in peers))
    for column in (_Column("peer", max(_LETTERS, named), _name), *_COLUMNS):
        if sum(one.width + _GAP for one in kept) + column.width > width:
            break
        kept.append(column)
    return kept


def _line_of(cells: list[Text], columns: list[_Column]) -> Text:
    both = zip(cells, columns, strict=True)
    return Text(" " * _GAP).join(pad(cell, column.width, right=column.right) for cell, column in both)


def _name(peer: View) -> Text:
    """Give name and letters; of both the name is cut, for anybody may take any."""
    called, letters = shown(peer.get("called") or ""), shown(peer.get("letters", peer.get("short", "?")))
    if not called:
        return Text(letters)
    return Text.assemble(fit(called, _MOST_OF_NAMES - _LETTERS - 2), f" ({letters.removeprefix('…')})")


def _last(peer: View) -> Text:
    """Mark whether its update was in the last round."""
    taken = peer.get("in_last_round")
    return Text(*_IN_LAST_ROUND[taken]) if isinstance(taken, bool) else Text("·", style="dim")


def _path(peer: View) -> Text:
    """Say how it is reached, or that it is not."""
    if (presence := shown(peer.get("presence"))) != "live":
        return Text(presence, style="red" if presence == "gone" else "dim")
    path = shown(peer.get("path") or "?")
    return Text(path, style=_PATHS.get(path, ""))


def _bytes_of(key: str) -> Callable[[View], Text]:
    return lambda peer: Text("?" if figure(peer.get(key)) is None else nbytes(peer.get(key)))


def _uplink(peer: View) -> Text:
    known = figure(peer.get("uplink_bits"))
    return Text(f"{known / 1e6:.1f} Mbit/s" if known else "?")


def _seen(peer: View) -> Text:
    return Text(f"{span(peer.get('seen'))} ago" if figure(peer.get("seen")) is not None else "?")


_COLUMNS = (
    _Column("last", 4, _last),
    _Column("path", 7, _path),
    _Column("answers", 7, lambda peer: Text(span(peer.get("answers_in")) or "?"), right=True),
    _Column("sent", 8, _bytes_of("bytes_sent"), right=True),
    _Column("received", 8, _bytes_of("bytes_received"), right=True),
    _Column("seen", 10, _seen, right=True),
    _Column("uplink", 12, _uplink, right=True),
    _Column("round", 7, lambda peer: Text(shown("?" if peer.get("round") is None else peer["round"])), right=True),
)


# ---- the strip of rounds ----
#
# A bar for each round, as high as it took long, and below it a mark of who was in it.

EIGHTHS = " ▁▂▃▄▅▆▇█"
LEGEND = "● all in  ◐ not everybody  ○ not yours"
LEGEND_OF_PAIRS = "● met a partner  ○ alone"
_UNKNOWN = 0.3  # of the height, of a round that nobody timed
_MOST_BUT_FEW = 0.95  # one stall of an hour must not flatten the others


def strip(part: View, width: int, height: int) -> Text:
    """Draw the newest rounds, one cell each. What colours say the marks do as well."""
    made = list(part.get("rounds", ()))[-width:] if width > 0 else []
    if not made:
        return Text("no round was made yet", style="dim")
    styles = [_mark(one)[1] for one in made]
    shares = _shares([figure(one.get("seconds")) for one in made])
    lines = bars(shares, styles, max(1, height - 1)) if height > 1 else []
    marks = Text.assemble(*(_mark(one) for one in made))
    return block([*lines, marks], width, height)


def bars(shares: Sequence[float], styles: Sequence[str], height: int) -> list[Text]:
    """Draw columns of ``shares`` of the height, from the top line down; each is an eighth of a cell high at least."""
    lines = []
    for row in reversed(range(height)):
        eighths = [max(0, min(8, max(1, round(8 * height * share)) - 8 * row)) for share in shares]
        lines.append(Text.assemble(*((EIGHTHS[at], style) for at, style in zip(eighths, styles, strict=True))))
    return lines


def caption_of_rounds(part: View) -> str:
    """Say which rounds are shown, for the frame."""
    rounds = part.get("rounds", ())
    return f"rounds, up to {shown(rounds[-1].get('step'))}" if rounds else "rounds"


def legend(part: View) -> str:
    """Say what the marks are."""
    rounds = part.get("rounds", ())
    return LEGEND_OF_PAIRS if rounds and is_pair(rounds[-1]) else LEGEND if rounds else ""


def in_progress(now: View) -> str:
    """Say which round is made now; empty where none is."""
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
    """Return a sign and its colour."""
    if is_pair(made):
        return ("●", "green") if made.get("contributors") else ("○", "yellow")
    if not made.get("contributed"):
        return "○", "yellow" if made.get("contributors") else "dim"
    return ("◐", "yellow") if made.get("late") else ("●", "green")


# ---- the sparkline of the loss ----

_MOST_CELLS = 4  # of one value
_CURVES = (  # the first that has a value
    ("training", "loss", "training loss"),
    ("held_out", "bits_per_byte", "held-out loss, bits per byte"),
)


def loss(learning: View, width: int, height: int) -> Text:
    """Draw the loss from the first step to the newest, each cell the mean of those that fall on it."""
    values = spread(curve(learning)[1], width)
    if not values:
        return Text("no loss is known yet", style="dim")
    low, high = min(values), max(values)
    shares = [(value - low) / (high - low) if high > low else 0.5 for value in values]
    return block(bars(shares, ["cyan"] * len(shares), height), width, height)


def caption_of_loss(learning: View) -> tuple[str, str]:
    """Say what is drawn and where it is now, and from where to where it went, for the frame."""
    name, values = curve(learning)
    if not values:
        return "loss", ""
    return f"{name}: {values[-1]:.3f}", f"{min(values):.3f} to {max(values):.3f}"


def curve(learning: View) -> tuple[str, list[float]]:
    """Return a name and its values: the training loss, or where none is told the loss of held-out text."""
    for series, column, name in _CURVES:
        found = [one for value in learning.get(series, {}).get(column, ()) if (one := figure(value)) is not None]
        if found:
            return name, found
    return "loss", []


def spread(values: Sequence[float], width: int) -> list[float]:
    """Spread values over ``width`` cells: means where there are more, each several times where there are far fewer."""
    times = min(_MOST_CELLS, width // len(values)) if values else 1
    return means(values, width) if times < 2 else [value for value in values for _ in range(times)]


def means(values: Sequence[float], width: int) -> list[float]:
    """Return at most ``width`` means."""
    if len(values) <= width or width < 1:
        return list(values[: max(0, width)])
    edges = [at * len(values) // width for at in range(width + 1)]
    parts = [values[begin:end] for begin, end in pairwise(edges)]
    return [sum(part) / len(part) for part in parts]


# ---- events, the newest first ----


def news(part: View, width: int, height: int) -> Text:
    """Return a line for each event, in local time."""
    lines = [
        Text.assemble((f" {_clock(one.get('t'))}  ", "dim"), shown(one.get("text"))) for one in part.get("events", ())
    ]
    return block(lines[:height], width, height)


def _clock(seconds: object) -> str:
    known = figure(seconds)
    try:
        return "--:--:--" if known is None else time.strftime("%H:%M:%S", time.localtime(known))
    except (OverflowError, ValueError, OSError):  # a time that no calendar has
        return "--:--:--"
