"""The panel of this peer: what it does, for whom, and what it costs. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.text import Text

from decentral.dashboard.view import View
from decentral.observe.health import in_units
from decentral.observe.status import ENDED
from decentral.watch.cells import NOT_KNOWN, bits, block, figure, nbytes, padded, shown

_NAMES = 9  # cells of the first column
_LATE = 0.5  # of the recent rounds: below it a look at the link is worth it


def own(now: View, width: int, height: int) -> Text:
    """Rows in the order in which they are given up where there is little room."""
    if not now.get("me"):
        return Text("nothing is known of a peer yet", style="dim")
    rows = [Text.assemble(padded(Text(name, style="dim"), _NAMES), value) for name, value in _rows(now, now["me"])]
    return block(rows[:height], width, height)  # a terminal that is higher shows the others


def _rows(now: View, me: dict[str, Any]) -> Iterator[tuple[str, Text]]:
    yield "state", _state(now, me)
    yield "useful", _useful(me)
    yield "loss", Text(_decimal(me.get("loss")))
    yield "held-out", Text(_decimal(me.get("held_out_loss")))
    yield "sent", Text(_moved(now, "bytes_sent", "sent_per_second"))
    yield "received", Text(_moved(now, "bytes_received", "received_per_second"))
    if caps := _caps(me):
        yield "caps", Text(caps)
    if figure(me.get("daily_upload")):
        yield "today", Text(f"{nbytes(me.get('sent_today'))} of {nbytes(me.get('daily_upload'))}")
    yield "reached", Text(_reached(me))
    yield "uplink", Text(bits(me.get("uplink_bits")))
    yield "steps", Text(shown(me.get("inner_steps", "")))
    if times := _fewer(now):
        yield "saved", Text(times)
    yield "name", Text(shown(me.get("peer") or NOT_KNOWN))
    yield "version", Text(shown(me.get("library") or NOT_KNOWN))


def _state(now: View, me: dict[str, Any]) -> Text:
    state = shown(me.get("state", ""))
    if not now.get("alive") and state not in ENDED:
        return Text("gone", style="bold red")
    return Text(state, style="green" if state == "training" else "")


def _useful(me: dict[str, Any]) -> Text:
    seen, contributed = figure(me.get("rounds_seen")), figure(me.get("rounds_contributed"))
    if not seen or contributed is None:
        return Text("no round yet")
    return Text(f"{contributed} of {seen} rounds", style="yellow" if contributed < _LATE * seen else "")


def _decimal(loss: object) -> str:
    known = figure(loss)
    return NOT_KNOWN if known is None else f"{known:.4f}"


def _moved(now: View, total: str, rate: str) -> str:
    """So far, and how fast now where the peer still runs."""
    per_second = figure(now["me"].get(rate)) if now.get("alive") else None
    return nbytes(now["me"].get(total)) + ("" if per_second is None else f", {in_units(per_second)}/s")


def _caps(me: dict[str, Any]) -> str:
    ways = (("up", figure(me.get("max_upload"))), ("down", figure(me.get("max_download"))))
    return ", ".join(f"{8 * cap / 1e6:g} Mbit/s {way}" for way, cap in ways if cap)


def _reached(me: dict[str, Any]) -> str:
    relays = me.get("relays") or ()
    through = f", {len(relays)} relay{'' if len(relays) == 1 else 's'}" if relays else ""
    return shown(me.get("reachability") or NOT_KNOWN) + through


def _fewer(now: View) -> str:
    """How many times fewer bytes than a float32 all-reduce at every step."""
    cost = now.get("bytes") or {}
    dense, sent = figure(cost.get("dense")), figure(cost.get("sent"))
    return f"{dense / sent:,.0f} x fewer bytes than all-reduce" if dense and sent else ""
