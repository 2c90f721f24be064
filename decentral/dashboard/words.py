"""Events as sentences for the page; what rounds show anyway has none."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from decentral.observe.diagnostics import back_sentence, warning
from decentral.observe.events import event_line
from decentral.observe.health import alone_sentence, listed, short_name

_SHOWN_ELSEWHERE = ("commit", "pair", "metrics", "membership")
_SECRET = ("invite",)  # whoever has it may join, and this page may be looked at by more


def sentence_of(row: Mapping[str, Any]) -> str | None:
    """What an event means; None where it is not worth a line."""
    event = row.get("event")
    if not isinstance(event, str) or event in _SHOWN_ELSEWHERE:
        return None
    try:
        return _SENTENCES[event](row)
    except (KeyError, TypeError, ValueError):  # unknown here, or of another version
        return _plain({key: value for key, value in row.items() if key not in _SECRET})


def members_sentence(came: Sequence[str], went: Sequence[str]) -> str:
    """Who is a member from now on, and who is not any more; empty when nobody came or went."""
    parts = []
    if came:
        parts.append(f"{listed(came)} {'was' if len(came) == 1 else 'were'} let in")
    if went:
        parts.append(f"the run goes on without {listed(went)}")
    return "; ".join(parts)


def _plain(row: dict[str, Any]) -> str:
    """The event's word and fields, without its time."""
    try:
        return " ".join(event_line({**row, "t": 0}).split()[1:])
    except (TypeError, ValueError):
        return str(row.get("event"))


def _named(row: Mapping[str, Any], key: str = "peer") -> str:
    return short_name(str(row[key]))


def _joined(row: Mapping[str, Any]) -> str:
    how = "resumed" if row.get("resumed") else "joined"
    return f"{how} at round {int(row['round'])}: the model is checked, training goes on from it"


def _band(row: Mapping[str, Any]) -> str:
    figure, value, step = str(row["figure"]), float(row["value"]), int(row["outer_step"])
    if row["event"] == "back_in_band":
        return back_sentence(figure, value, step)
    return warning(figure, value, str(row["why"]), step)


_SENTENCES: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "joined": _joined,
    "alone": lambda row: alone_sentence([str(name) for name in row["peers"]], left=bool(row["left"])),
    "synced": lambda row: f"the model came from {_named(row)}",
    "sync_failed": lambda row: f"{_named(row)} could not give its model: {row['why']}",
    "shrunk": lambda row: (
        "the run went on without this peer, which was away"
        if row.get("away")
        else f"the run goes on without {len(row['given_up'])} silent peers, half of it or more"
    ),
    "resynced": lambda row: "this peer was behind, and took over the others' state whole",
    "unmoved": lambda row: f"a round moved nothing: {row['why']}",
    "restarted": lambda row: f"the live model was put back to the anchor: {row['why']}",
    "lan": lambda row: f"local network: {row['off']}" if row.get("off") else "looks for others on the local network",
    "lan_met": lambda row: f"{_named(row)} was met on the local network",
    "out_of_band": _band,
    "back_in_band": _band,
    "dropped": lambda row: f"{row['what']} failed: {row['why']}; the round goes on without it",
}
