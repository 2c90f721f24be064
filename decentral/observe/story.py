"""The events of a peer as sentences: of a round a few words, of the rest what it means.

`decentral logs`, the page and the terminal tell the same. Rows come from files that others may have written: of one
that has not the shape that it should, the word and the fields are told. Raw events are JSON (`decentral logs --json`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from decentral.observe.diagnostics import back_sentence, warning
from decentral.observe.events import plain_words, printable
from decentral.observe.health import (
    NOTICES,
    alone_sentence,
    in_time,
    in_units,
    left_out_sentence,
    list_names,
    short_name,
)

LONGEST = 400  # characters of a sentence: others choose what is in it
_MOST = 1e15  # of a number in an event
_SECRET = ("invite",)  # whoever has it may join, and a page or a log may be looked at by more
_ROUNDS_TO_BEGIN = 5  # that a newcomer may miss: it takes the model first, and a round's steps
_WORDS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")


class Story:
    """Tells the events of one peer in their order."""

    def __init__(self) -> None:
        self.members: list[str] = []  # of the round in progress: a commit names those of the next
        self._new: dict[str, int] = {}  # of them, who was let in and has not contributed yet: rounds since

    def tell(self, row: Mapping[str, Any]) -> list[str]:
        """Return the sentences of the next event: of a round itself, and of who came or went with it."""
        made = self.tell_round(row)
        return [printable(said)[:LONGEST] for said in [*([made] if made else []), *self.tell_beside(row)]]

    def tell_round(self, row: Mapping[str, Any]) -> str:
        """Return who was in a round, and how long it took; empty for what is none."""
        if (step := steps_made(row)) is None:
            return ""
        words = _pair_words(row) if row.get("event") == "pair" else self._words_of_commit(row)
        seconds = number(row.get("seconds"))
        return f"round {step}: {words}" + ("" if seconds is None else f", {seconds:.1f} s")

    def tell_beside(self, row: Mapping[str, Any]) -> list[str]:
        """Return what an event says beside the round that it ended, and take its members for the next."""
        if row.get("event") not in ("commit", "membership"):
            said = sentence_of(row)
            return [] if said is None else [said]
        before, self.members = self.members, str_list(row.get("members"))
        self._take_newcomers(row, before)
        said = members_sentence(without(self.members, before), without(before, self.members))
        return [said] if before and said and not row.get("truncated") else []

    def _take_newcomers(self, row: Mapping[str, Any], before: Sequence[str]) -> None:
        """Note who was let in, and forget who has contributed, left, or had rounds enough."""
        came = set(str_list(row.get("contributors")))
        waited = {name: rounds + 1 for name, rounds in self._new.items() if rounds < _ROUNDS_TO_BEGIN}
        fresh = dict.fromkeys(without(self.members, before), 0) if before else {}
        self._new = {
            name: rounds for name, rounds in (waited | fresh).items() if name in self.members and name not in came
        }

    def expect(self, row: Mapping[str, Any]) -> list[str]:
        """Return the members that a round was to have: of those who have just come only who made it already."""
        came = set(str_list(row.get("contributors")))
        members = self.members or str_list(row.get("members"))
        return [name for name in members if name in came or name not in self._new]

    def _words_of_commit(self, row: Mapping[str, Any]) -> str:
        members, mine = self.expect(row), bool(row.get("contributed"))
        late = without(members, str_list(row.get("contributors")))
        if row.get("truncated"):  # lists were cut
            return "you too" if mine else "without you"
        if not late:
            if len(members) < 2:
                return "you alone" if mine else "nobody"
            return ("both" if len(members) == 2 else f"all {_in_words(len(members))}") + (", you too" if mine else "")
        share = f"{_in_words(len(members) - len(late))} of {_in_words(len(members))}"
        if mine:
            return f"{share}, you too, without {list_names(late)}"
        return f"{share}, without you" + (f" and {len(late) - 1} more" if len(late) > 1 else "")


def _in_words(count: int) -> str:
    return _WORDS[count] if count < len(_WORDS) else str(count)


def _pair_words(row: Mapping[str, Any]) -> str:
    return f"with {_peer_of(row, 'partner')}" if row.get("partner") else "alone, as no partner came"


def steps_made(row: Mapping[str, Any]) -> int | None:
    """Return the outer steps made with an event, as gossip steps are counted from 0; None where it is of no round."""
    if row.get("event") == "commit" and isinstance(row.get("outer_step"), int):
        return int(row["outer_step"])
    if row.get("event") == "pair" and isinstance(row.get("step"), int):
        return int(row["step"]) + 1
    return None


def without(names: Sequence[str], others: Collection[str]) -> list[str]:
    """Return the names that are none of the others."""
    known = set(others)
    return [name for name in names if name not in known]


def number(value: object) -> float | None:
    """Return a finite number, or None for what is none."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    return value if abs(value) < _MOST else None


def str_list(value: object) -> list[str]:
    """Return the strings of a list."""
    return [one for one in value if isinstance(one, str)] if isinstance(value, list) else []


# ---- what is not of a round ----


def sentence_of(row: Mapping[str, Any]) -> str | None:
    """Return what an event means; None for a round, and for what a loop logs."""
    event = row.get("event")
    if not isinstance(event, str) or event in ("commit", "pair", "membership", "metrics"):
        return None
    try:
        if event in NOTICES:
            return NOTICES[event](row, "")[1]
        return _SENTENCES[event](row)
    except (KeyError, TypeError, ValueError, OverflowError):  # unknown here, or of another version
        return plain_words({key: value for key, value in row.items() if key not in _SECRET})


def members_sentence(came: Sequence[str], went: Sequence[str]) -> str:
    """Name the members that came and those that went; empty when nobody did."""
    parts = []
    if came:
        parts.append(f"{list_names(came)} {'was' if len(came) == 1 else 'were'} let in")
    if went:
        parts.append(f"the run goes on without {list_names(went)}")
    return "; ".join(parts)


def _peer_of(row: Mapping[str, Any], key: str = "peer") -> str:
    return short_name(str(row[key]))


def _join(row: Mapping[str, Any]) -> str:
    how = "resumed" if row.get("resumed") else "joined"
    return f"{how} at round {int(row['round'])}: the model is checked, training goes on from it"


def _band(row: Mapping[str, Any]) -> str:
    figure, value, step = str(row["figure"]), float(row["value"]), int(row["outer_step"])
    if row["event"] == "back_in_band":
        return back_sentence(figure, value, step)
    return warning(figure, value, str(row["why"]), step)


def _away(row: Mapping[str, Any]) -> str:
    what = f"count as {int(row['counted'])}" if row["counted"] else "are dropped"
    return f"{int(row['missed'])} rounds passed by meanwhile: {int(row['steps'])} inner steps of this peer {what}"


def _awake(row: Mapping[str, Any]) -> str:
    votes = "it votes again when all members have been heard, or after a lease"
    return f"awake after {in_time(float(row['away']))}: {votes}" if row["away"] else f"begins: {votes}"


def _shrunk(row: Mapping[str, Any]) -> str:
    if row.get("away"):
        return "the run went on without this peer, which was away"
    return f"the run goes on without {len(row['given_up'])} silent peers, half of it or more"


def _tell_healing(row: Mapping[str, Any]) -> str:
    said = "the run had parted in two: this peer goes on with the other part"
    lost = int(number(row["given_up"]) or 0)
    if not lost:
        return said
    theirs = "1 round of its own part counts" if lost == 1 else f"{lost} rounds of its own part count"
    return f"{said}, and {theirs} no more"


def _differs(row: Mapping[str, Any]) -> str:
    names = ", ".join(key for key in row if key not in ("v", "t", "mono", "event"))
    return f"the loop's optimizer is not as the run's terms say: {names}"


_SENTENCES: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "joined": _join,
    "undecided": lambda row: (
        f"{_peer_of(row)} was asked for {in_time(float(row['seconds']))} whether the pair is made, and was not heard: "
        "this peer steps alone"
    ),
    "checkpoint": lambda row: (
        f"a checkpoint of round {int(row['outer_step'])} is kept, {in_units(float(row['bytes']))}"
    ),
    "checkpoint_failed": lambda row: f"no checkpoint was made at the end: {row['why']}",
    "checkpoint_passed_over": lambda row: f"checkpoint {row['name']} was passed over: {row['why']}",
    "state_given": lambda row: f"{list_names(row['peers'])} keep a piece each of this peer's own state",
    "state_not_given": lambda row: f"too few took a piece of this peer's own state: {row['why']}",
    "state_restored": lambda row: f"{list_names(row['peers'])} gave back this peer's own state",
    "state_not_restored": lambda row: f"this peer's own state did not come back: {row['why']}",
    "out_of_band": _band,
    "back_in_band": _band,
    "away": _away,
    "trains_part": lambda row: (
        f"memory holds {int(row['stop']) - int(row['first'])} of the run's {int(row['of'])} fragments, from "
        f"{int(row['first'])} on: those are trained here"
    ),
    "group_formed": lambda row: (
        f"one replica with {list_names(row['peers'])}: this peer is stage {int(row['stage']) + 1}, of "
        f"{int(row['micro_batches'])} micro-batches a step"
        + (f", and nobody holds {list_names([f'fragment {f}' for f in row['left_out']])}" if row["left_out"] else "")
    ),
    "group_over": lambda row: f"the replica of several machines came apart: {row['why']}",
    "restarted": lambda row: f"the live model was put back to the anchor: {row['why']}",
    "synced": lambda row: f"the model came from {_peer_of(row)}",
    "sync_failed": lambda row: f"{_peer_of(row)} could not give its model: {row['why']}",
    "donor_dropped": lambda row: f"{_peer_of(row)} is not asked for the model any more: {row['why']}",
    "catch_up_failed": lambda row: f"rounds that were missed could not be fetched: {row['why']}; it tries again",
    "resynced": lambda row: "this peer was behind, and took over the others' state whole",
    "healed": _tell_healing,
    "shrunk": _shrunk,
    "refused": lambda row: f"{_peer_of(row)} showed a record that gives up members who are here: it is not taken",
    "unchecked": lambda row: (
        f"a state was taken over on the word of {int(row['named'])} of {int(row['asked'])} peers, with "
        f"{int(row['records'])} records of it checked; what this peer had is kept aside"
    ),
    "awake": _awake,
    "left_out": lambda row: left_out_sentence(str(row["leader"] or ""), int(row["outer_step"])),
    "stalled": lambda row: f"round {int(row['outer_step'])} is stalled: {row['why']}",
    "stall_over": lambda row: f"rounds are made again, after {in_time(float(row['seconds']))} without one",
    "forgot": lambda row: "the disk had lost rounds that this peer voted in; all were here, and it votes again",
    "upload_used_up": lambda row: f"today's upload of {in_units(float(row['limit']))} is used up: it trains on alone",
    "upload_goes_on": lambda row: "a new day has begun: it contributes again",
    "upload_not_saved": lambda row: f"what was sent today could not be kept: {row['why']}",
    "lan": lambda row: f"local network: {row['off']}" if row.get("off") else "looks for others on the local network",
    "lan_met": lambda row: f"{_peer_of(row)} was met on the local network",
    "alone": lambda row: alone_sentence([str(name) for name in row["peers"]], left=bool(row["left"])),
    "inner_differs": _differs,
    "flooded": lambda row: f"{_peer_of(row)} sends more {row['what']} than it may; what is too much is passed over",
    "dropped": lambda row: f"{row['what']} failed: {row['why']}; the round goes on without it",
    "unexpected": lambda row: f"a mistake of this program: {row['what']}: {row['why']}; please report it",
}
