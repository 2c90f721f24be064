"""The one sentence that says whether a peer is healthy and useful.

A pure function of its status, as is the short line of a round. Who reads one looks at its process, too (`as_seen`).
"""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from decentral.observe.diagnostics import back_sentence, warning
from decentral.observe.events import printable
from decentral.observe.status import QUANTITIES, Status, Unit, is_lost, is_stopped, number_of, silent_for

_HIDDEN = ("nat", "symmetric nat", "firewall", "unknown")  # as far as anybody could tell
_RESUME = "decentral resume continues from there"
_AGAIN = "start it again with the same --out to resume"
_SCRIPT_ALONE = "decentral.join(alone=True), or join --script --alone, goes on without"
_TAKING_PART = ("training", "waiting", "looking")
MOODS: Mapping[str, Literal["ok", "warn", "bad"]] = {  # of first words of sentences; bad: it takes no part
    **dict.fromkeys(("healthy", "done"), "ok"),
    **dict.fromkeys(("late", "shrunk", "alone", "looking", "waiting"), "warn"),
    **dict.fromkeys(("attention", "stalled", "stopped", "gone", "frozen", "behind", "out"), "bad"),
}
_LATE_SHARE = 0.5  # below this share of recent rounds a volunteer should look at the link
_WELL_AGAIN = 0.6  # and is told so until this: who is in every second round is not well and late by turns


def health_sentence(status: Status) -> str:
    """Say in one line how the peer is, and when something is wrong what to do. Its ``health`` is what was said before:
    the word changes when it will last.
    """
    silent = status.silent_relays if status.state in (*_TAKING_PART, "starting", "following") else ()
    said = "; ".join((_sentence(status), *(f"relay {relay} does not answer" for relay in silent)))
    return with_names(said, names_in(status))


def _sentence(status: Status) -> str:
    if status.problem and status.state == "left":
        return f"stopped: {status.problem}; {_AGAIN}"
    if status.problem:
        return f"attention: {status.problem}"
    if status.left_out_seconds is not None and status.state in _TAKING_PART:
        return _left_out(status)
    if status.others_round is not None and status.state in _TAKING_PART:
        return _behind(status)
    if status.given_up and status.peer not in status.given_up and status.state in ("training", "looking"):
        return _shrunk(status)
    if status.stalled_seconds and status.state in ("training", "waiting") and not status.wanted_members:
        return _stall_sentence(status)
    if status.state in _SENTENCES_OF_STATES:
        return _SENTENCES_OF_STATES[status.state](status)
    if status.state == "leaving":
        return f"leaving: after round {status.round}, saying goodbye"
    if status.state == "left":
        return f"left: round {status.round} was its last, everything is kept; {_AGAIN}"
    if status.state == "done":
        useful = f", {_useful(status)}" if status.rounds_seen else ""  # none in a process that came after the end
        return f"done: {_rounds_made(status)}, {in_units(status.bytes_sent)} sent{useful}"
    return _training(status)


def as_seen(status: Status, now: float, monotonic: float) -> Status:
    """Return the status with another sentence where its process is gone, or is frozen.

    ``now`` in seconds since the epoch, ``monotonic`` by this machine's clock of that name.
    """
    if is_lost(status):
        return replace(status, health=lost_sentence(status, now))
    if silent := silent_for(status, monotonic):
        found = replace(status, frozen_seconds=silent)
        return replace(found, health=_freeze_sentence(found, stopped=is_stopped(status)))
    return status


def is_well(status: Status) -> bool:
    """Tell whether the peer takes part, or rests because somebody wished it, by its sentence."""
    return MOODS.get(status.health.partition(":")[0]) != "bad"


def lost_sentence(status: Status, now: float) -> str:
    """Return the sentence for a status whose process is gone, ``now`` in seconds since the epoch."""
    stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(status.updated))
    return (
        f"gone: the peer that wrote this is gone (killed or crashed); its last sign was at {stamp}, "
        f"{in_time(max(0.0, now - status.updated))} ago, in round {status.round} ({status.state}); {_AGAIN}"
    )


def _freeze_sentence(status: Status, *, stopped: bool) -> str:
    why = "its machine, its disk or the process itself hangs"
    if stopped:
        why = f"it is stopped: kill -CONT {status.pid} lets it go on"
    return (
        f"frozen: nothing was written for {in_time(status.frozen_seconds)}, in round {status.round} ({status.state}), "
        f"though process {status.pid} is there; {why}"
    )


def over_sentence(out: Path, *, again: bool) -> str:
    """Say how to have the model of a run that is over; ``again``: to who starts it anew there."""
    anew = "; a new run takes another folder, --out or join(out=...)" if again else ""
    return f"This run is over: decentral export {shlex.quote(str(out))} --to model/{anew}"


def round_line(status: Status) -> str:
    """Return a short line: where the run is, how good, at what cost, for how long."""
    parts = [f"round {status.round}" + ("" if status.rounds is None else f" of {status.rounds}")]
    if status.loss is not None:
        parts.append(f"loss {status.loss:.4f}")
    if status.held_out_loss is not None:
        parts.append(f"held-out {status.held_out_loss:.4f}")
    if num := len(status.members):  # a baseline has none
        parts += [f"{num} peer{'s' if num > 1 else ''}", f"{in_units(status.bytes_sent)} sent"]
    if status.seconds_left is not None:
        parts.append(f"{in_time(status.seconds_left)} left")
    return ", ".join(parts)


def health_word(status: Status) -> str:
    """Return how the peer is, in one word: the first of its sentence."""
    return health_sentence(status).partition(":")[0]


def _rounds_made(status: Status) -> str:
    """Say how many rounds were made; a run may also end by its time."""
    if status.rounds is None or status.round >= status.rounds:
        return f"{status.round} rounds"
    return f"{status.round} of {status.rounds} rounds, its time was up"


def _starting(status: Status) -> str:
    return "starting: getting in touch with the run's peers; training has not begun"


def alone_sentence(names: Sequence[str], *, left: bool) -> str:
    """Return the sentence of a peer whose last company has gone."""
    whom = list_names(names)
    if left:
        return f"alone: {whom} left; the invite still lets others in"
    return f"alone: {whom} fell silent; whoever is heard of again is let in"


def _looking(status: Status) -> str:
    # Before the first inner step nobody knows whether the loop trains on alone, or waits for a second peer.
    meanwhile = f"training on alone (inner step {status.inner_steps})" if status.inner_steps else ""
    if status.gone and meanwhile and status.late_rounds is not None and not status.gone_left:
        meanwhile += (
            ", which counts as one round at most; "
            f"if a round is made without this peer, it counts for nothing after {_late(status)}"
        )
    if status.gone:
        return "; ".join(filter(None, (alone_sentence(status.gone, left=status.gone_left), meanwhile)))
    nobody = ", ".join(filter(None, ("looking: nobody reachable yet", meanwhile)))
    if status.members and status.peer not in {member.get("peer") for member in status.members}:
        return (
            f"{nobody}; this peer said goodbye in round {status.round}, and what it trains until a member lets it in "
            "again counts as one round at most; if they are done, so is the run"
        )
    if status.reachability in _HIDDEN and not status.relays:
        return (
            f"{nobody}; when all of you are behind routers, one public machine must help: run decentral relay there, "
            "and start with the --relay line that it prints"
        )
    return f"{nobody}; share the invite line, or ask decentral doctor"


def _syncing(status: Status) -> str:
    came = ""
    if status.model_nbytes:
        left = status.model_nbytes - status.model_here
        rate = status.received_per_second
        took = f", about {in_time(left / rate)} left" if rate > 0 and left else ""
        came = f", {in_units(status.model_here)} of {in_units(status.model_nbytes)} are here{took}"
    return f"syncing: fetching and checking the model of round {status.round}{came}; training starts right after"


def _following(status: Status) -> str:
    served = "; the run is over, and its last state can be had here" if status.round == status.rounds else ""
    return f"following: round {status.round}, its anchors are received and nothing is contributed{served}"


def _waiting(status: Status) -> str:
    if status.wanted_members:
        return _waiting_for_members(status)
    if status.shares and not status.stages:
        return "waiting: for other machines that share (--share), to be one replica with them; it follows the run"
    whom = list_names(status.waiting_for) or "the other peers"
    return f"waiting: round {status.round + 1} needs {whom}; training goes on after it"


def _waiting_for_members(status: Status) -> str:
    if status.wanted_members == 2:
        without = _SCRIPT_ALONE if status.own_loop else "--alone goes on without"
        return f"waiting: for a second peer, who joins with the invite; {without}"
    return f"waiting: {len(status.members)} of {status.wanted_members} peers are here; training begins with the last"


def list_names(names: Sequence[str]) -> str:
    """Return names for people, three at most."""
    return ", ".join(map(short_name, names[:3])) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _stall_sentence(status: Status) -> str:
    usual = status.usual_round_seconds
    than = "" if usual is None else f", where one takes {in_time(usual)}"
    return f"stalled: {status.stalled_by}; no round was made with others for {in_time(status.stalled_seconds)}{than}"


def left_out_sentence(leader: str, round_: int) -> str:
    """Give what is said of who was left out; ``leader``: of the commit that did so, empty where that is not known.

    ``round_``: outer steps of all together; 0 in gossip, where there are none.
    """
    if not leader:
        return "left out of the run while it was behind" + (f", in round {round_} or before" if round_ else "")
    return f"left out of the run by {short_name(leader)}" + (f" in round {round_}" if round_ else "")


def _left_out(status: Status) -> str:
    asks = "it asks to be let in again" if status.state != "looking" else "none of the others can be reached"
    said = left_out_sentence(status.left_out_by, status.left_out_round)
    return f"out: {said}, {in_time(status.left_out_seconds or 0.0)} ago; {asks}"


def _behind(status: Status) -> str:
    came = ""
    if status.model_nbytes:
        came = f"; {in_units(status.model_here)} of the {in_units(status.model_nbytes)} of a later model are here"
    return f"behind: the others are in round {status.others_round}, this peer in {status.round}{came}"


def _pause_sentence(status: Status) -> str:
    why = "; ".join(status.paused_because)
    goes_on = "it goes on by itself" if why and "decentral resume" not in why else _RESUME
    meanwhile = "; your loop trains on, and contributes nothing" if status.trains_while_paused else ""
    reason = f", {why}" if why else ""
    return f"paused: after round {status.round}{reason}; the others go on without you{meanwhile}; {goes_on}"


def _resting(status: Status) -> str:
    limit = "" if status.daily_upload is None else f" of {in_units(status.daily_upload)}"
    return (
        f"resting: today's upload{limit} is used up; you contribute again from 00:00 UTC, "
        "from what the others have by then"
    )


def _training(status: Status) -> str:
    share = _WELL_AGAIN if status.health.startswith("late:") else _LATE_SHARE
    is_late = status.rounds_seen >= 4 and status.rounds_contributed < share * status.rounds_seen
    word = "late" if is_late else "healthy"
    if status.notices:
        word = f"attention: {status.notices[0]}; you train on"
    parts = [f"{word}: round {status.round}", _useful(status)]
    if status.finishing:
        parts.append("leaves with the round that is made now")
    parts += _stage(status)
    if status.rounds_contributed:
        parts.append(f"{in_units(status.bytes_per_round)} sent per round")
    if status.next_sync_seconds is not None:
        parts.append(f"next sync in {status.next_sync_seconds:.0f} s")
    return ", ".join(parts)


def _stage(status: Status) -> list[str]:
    """Say which stage of a replica of several machines this peer is, and which it waits for."""
    place = next((place for place, stage in enumerate(status.stages) if stage.get("self")), None)
    if place is None:
        return []
    whom = status.stages[place].get("waits_for")
    waits = f" and waits for stage {whom + 1}" if isinstance(whom, int) else ""
    return [f"stage {place + 1} of {len(status.stages)}{waits}"]


_SENTENCES_OF_STATES = {
    "starting": _starting,
    "looking": _looking,
    "syncing": _syncing,
    "following": _following,
    "waiting": _waiting,
    "paused": _pause_sentence,
    "resting": _resting,
}


def _shrunk(status: Status) -> str:
    """Warn a volunteer that this may be the smaller part of a swarm that was cut in two, whose work is given up."""
    here, gone = len(status.members), len(status.given_up)
    since = "" if status.given_up_seconds is None else f" for {in_time(status.given_up_seconds)}"
    said = f"shrunk: round {status.round} goes on with {here} of {here + gone} peers{since}, as the others fell silent"
    if status.late_rounds is None:
        return f"{said}; your model meets theirs again, pair by pair"
    theirs = ("theirs wins", "what yours learns alone")
    wins, loses = theirs if gone > here else ("the heavier chain wins", "what the lighter learns alone")
    if status.given_up_rounds > status.late_rounds:
        counts = f"{loses} is practice by now, and counts for nothing"
    else:
        counts = f"{loses} counts as one round at most, and for nothing after about {_late(status)}"
    return f"{said}; if they stopped, all of it counts; if they went on elsewhere, {wins} when you meet, and {counts}"


def _late(status: Status) -> str:
    """Return how many rounds' steps a peer may bring back at most, and how long those take."""
    rounds, each = status.late_rounds or 0, status.usual_round_seconds
    takes = "" if each is None or not rounds else f" ({in_time(rounds * each)})"
    return f"{rounds} round{'' if rounds == 1 else 's'}{takes}"


def _useful(status: Status) -> str:
    if not status.rounds_seen:
        return "no round has ended yet"
    return f"you contributed to {status.rounds_contributed} of the last {status.rounds_seen}"


def in_units(nbytes: float) -> str:
    """Return bytes for people: ``0.2 MB``; decimal units, as links are sold."""
    for unit, size in (("GB", 1e9), ("MB", 1e6)):
        if nbytes >= 0.1 * size:
            return f"{nbytes / size:.1f} {unit}"
    return f"{nbytes / 1e3:.1f} kB"


def in_time(seconds: float) -> str:
    """Return a span for people: ``45 s``, ``12 min``, ``3.5 h``, ``2.1 days``."""
    for unit, size, digits in (("days", 86_400, 1), ("h", 3600, 1), ("min", 60, 0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.{digits}f} {unit}"
    return f"{seconds:.0f} s"


TEXT_OF_UNIT: Mapping[Unit, Callable[[float], str]] = {
    "count": str,
    "bytes": in_units,
    "bytes/s": lambda rate: f"{in_units(rate)}/s",
    "bit/s": lambda bits: f"{bits / 1e6:g} Mbit/s",
    "s": in_time,
    "nats": "{:.4f}".format,
}


def quantity_text(status: Status, name: str) -> str:
    """Return a quantity of ``status`` for people, in its unit; empty: it is not known."""
    value = number_of(status, name)
    return "" if value is None else TEXT_OF_UNIT[QUANTITIES[name].unit](value)


def short_name(peer: str) -> str:
    """Return the end of a libp2p name, as all of them start alike: a peer's letters."""
    return peer if len(peer) <= 8 else "…" + peer[-6:]


_MOST_SAID = 300  # characters of what a model says


def sample_of(status: Status) -> Mapping[str, Any]:
    """Return what the model says, fit for a screen; empty where nothing is known, or what is no such thing."""
    if not isinstance(status.sample, Mapping) or not {"prompt", "text", "round"} <= status.sample.keys():
        return {}
    return {key: printable(str(value))[:_MOST_SAID] for key, value in status.sample.items()}


# ---- names beside letters ----
#
# Sentences are made with the letters of keys, whoever speaks. Where people read them, names are put before: so a name
# that came later, or is another one now, stands in old sentences, too.

_LETTERS = re.compile(r"…\w{6}")
_MOST_NAMES = 8  # in one sentence: others choose what is in it, and it must stay short


def names_in(status: Status) -> Mapping[str, str]:
    """Return what peers call themselves, by their letters; none of those who have the same letters."""
    if not isinstance(status.names, Mapping) or not status.names:
        return {}
    from decentral.swarm.leases import is_name  # here: most runs have no names, and it loads cryptography

    found: dict[str, str] = {}
    for peer, name in status.names.items():
        letters = short_name(peer)
        found[letters] = name if letters not in found and isinstance(name, str) and is_name(name) else ""
    return {letters: name for letters, name in found.items() if name}


def with_names(text: str, called: Mapping[str, str]) -> str:
    """Return the text with letters as ``Anna (a3f9xy)`` where their peer is ``called`` so."""
    return _LETTERS.sub(lambda found: _put_name(found.group(), called), text, count=_MOST_NAMES) if called else text


def _put_name(letters: str, called: Mapping[str, str]) -> str:
    return f"{called[letters]} ({letters[1:]})" if letters in called else letters


# ---- sentences about peers ----
#
# From the events that name them: about what they do to the run. The status repeats them for a while, and warnings of
# figures until they are back.

SAID_FOR = 30  # rounds: events are told again after 20, so what goes on is always there


class Notices:
    """The newest sentence on each outlier, pair of twins, round that moved nothing, and figure out of its band."""

    def __init__(self) -> None:
        self._said: dict[tuple[str, ...], tuple[int, str]] = {}  # who -> round, sentence
        self._lasting: dict[str, str] = {}  # figure that is out of its band -> sentence

    def hear(self, event: str, fields: Mapping[str, Any], me: str) -> str | None:
        """Remember and return the sentence of an event that is worth one. ``me``: the peer that speaks."""
        if event in ("out_of_band", "back_in_band"):
            return self._hear_of_band(fields, is_out=event == "out_of_band")
        if event not in NOTICES:
            return None
        who, sentence = NOTICES[event](fields, me)
        self._said[who] = (int(fields["round"]), sentence)
        return sentence

    def _hear_of_band(self, fields: Mapping[str, Any], *, is_out: bool) -> str:
        """Return the sentence; a warning holds until its figure is back."""
        figure, value, outer_step = str(fields["figure"]), float(fields["value"]), int(fields["outer_step"])
        others = {other: said for other, said in self._lasting.items() if other != figure}
        if not is_out:
            self._lasting = others
            return back_sentence(figure, value, outer_step)
        sentence = warning(figure, value, str(fields["why"]), outer_step)
        self._lasting = {**others, figure: sentence}
        return sentence

    def now(self, round_: int) -> tuple[str, ...]:
        """Return the sentences that still hold in ``round_``, the newest first, and behind them figures out of their
        bands.
        """
        self._said = {who: said for who, said in self._said.items() if round_ - said[0] < SAID_FOR}
        newest = sorted(self._said.values(), reverse=True)
        return (*(sentence for _, sentence in newest), *reversed(self._lasting.values()))


def _outlier(fields: Mapping[str, Any], me: str) -> tuple[tuple[str, ...], str]:
    at = fields.get("outer_step", fields["round"])  # of a version before 0.2, which told the record's number alone
    peer, much = str(fields["peer"]), f"{fields['times']:.3g} times as large as the others' (round {at})"
    if peer == me:
        return (peer,), (
            f"your update is {much}: compare learning rate and data with theirs, or decentral leave; after training "
            "alone for a while this passes with the next merge"
        )
    return (peer,), (
        f"the update of {short_name(peer)} is {much}: its learning rate or data differ, or it trained alone for a "
        'while; where norm_clip = "median" under [outer] does not shorten it, it can ruin the run'
    )


def _twins(fields: Mapping[str, Any], me: str) -> tuple[tuple[str, ...], str]:
    peers: Sequence[str] = fields["peers"]
    one, other = ("you" if peer == me else short_name(peer) for peer in sorted(peers, key=lambda peer: peer != me))
    return tuple(peers), (
        f"{one} and {other} send nearly the same update: do both use the same seed and data? see peer.seed, peer.shard"
    )


def _no_move(fields: Mapping[str, Any], me: str) -> tuple[tuple[str, ...], str]:
    method, why, round_ = fields["method"], fields["why"], fields.get("outer_step", fields["round"])
    return ("",), f"round {round_} moved nothing: {method}: {why}; what was contributed to it is gone"


def _unsaid(fields: Mapping[str, Any], me: str) -> tuple[tuple[str, ...], str]:
    method, why, round_ = fields["method"], fields["why"], fields.get("outer_step", fields["round"])
    return ("unsaid",), f"your contribution to round {round_} went without a summary: {method}: {why}; ask its author"


NOTICES = {"outlier": _outlier, "twins": _twins, "unmoved": _no_move, "unsaid": _unsaid}
