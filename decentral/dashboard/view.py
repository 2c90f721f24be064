"""From a status and a history to what the page shows, as plain data in four parts. Pure.

``now`` changes every second, ``rounds`` and ``events`` with a round, ``learning`` with a row of metrics: each part is
sent when it changed. What a peer does not know is null, and the page says "not known".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from decentral.dashboard.history import History
from decentral.observe.diagnostics import WORDS, in_words
from decentral.observe.health import MOODS, names_in, sample_of, short_name, with_names
from decentral.observe.report import dense_allreduce_nbytes
from decentral.observe.status import ENDED, PAGE_ROWS, QUANTITIES, WATCH_ROWS, Status, presence

View = dict[str, Any]  # JSON

_BESIDE = (  # fields that are told beside those that have rows
    *("rounds_seen", "own_loop", "bytes_measuring", "bytes_per_round", "max_download", "sent_today", "addresses"),
    *("max_writes", "given_rounds", "given_seconds", "given_bytes", "given_share"),
    *("relays", "silent_relays", "next_sync_seconds", "usual_round_seconds", "stalled_seconds", "stalled_by"),
    *("notices", "problem"),
)
_OWN = dict.fromkeys((*(name for _, name in (*PAGE_ROWS, *WATCH_ROWS)), *_BESIDE))  # each once
_ROWS = [
    {"label": label, "name": name, "unit": QUANTITIES[name].unit if name in QUANTITIES else None}
    for label, name in PAGE_ROWS
]

PEERS = 200  # in the table: who is sent a thousand rows a second sees none of them
_KINDS = {  # protocols as people call what they carry
    "frame": "updates",
    "fetch": "updates",
    "piece": "updates",
    "pair": "updates",
    "control": "offers and votes",
    "lease": "who is here",
    "leases": "who is here",
    "hello": "terms",
    "admission": "terms",
    "chain": "models for newcomers",
    "index": "models for newcomers",
    "state": "models for newcomers",
    "speed": "measuring lines",
    "dialback": "measuring lines",
}


def now_of(status: Status, history: History, *, health: str, alive: bool) -> View:
    """Return the peer and its swarm at this moment; ``health``: the sentence, another one when the process is gone."""
    last = history.rounds[-1] if history.rounds else None
    word, called = health.partition(":")[0], names_in(status)
    return {
        "health": health,
        "word": word,
        "mood": MOODS.get(word, ""),
        "alive": alive,
        "updated": status.updated,
        "run": {
            "name": status.run,
            "id": status.run_id,
            "algorithm": status.algorithm,
            "round": status.round,
            "rounds": status.rounds,
            "epoch": status.epoch,
            "seconds_left": status.seconds_left,
        },
        "me": {
            **{name: getattr(status, name) for name in _OWN},
            "short": with_names(short_name(status.peer), called),
            "waiting_for": [with_names(short_name(name), called) for name in status.waiting_for],
            "stalled_by": with_names(status.stalled_by, called),
            "notices": [with_names(notice, called) for notice in status.notices],
        },
        "sample": sample_of(status),
        "rows": _ROWS,  # of this peer's card on the page
        "gossips": last is not None and is_pair(last),
        "peers": [peer_of(member, last, called) for member in _shown(status)],
        "stages": [stage_of(one, called) for one in status.stages],
        "more_peers": max(0, len(status.members) - PEERS),
        "open": _open_round(status, called),
        "diagnostics": _diagnostics(status),
        "bytes": bytes_of(status),
    }


def stage_of(stage: Mapping[str, Any], called: Mapping[str, str]) -> View:
    """Return a stage of the replica that this peer is in, as this peer sees it."""
    return {**stage, "short": with_names(short_name(str(stage.get("peer", "?"))), called)}


def peer_of(member: Mapping[str, Any], last: Mapping[str, Any] | None, called: Mapping[str, str]) -> View:
    """Return a member as this peer sees it."""
    name = str(member.get("peer", "?"))
    taken = None  # no member then, or not told: of gossip steps a peer knows its own
    if last is not None and name in (*last["contributors"], *last["late"]):
        taken = name in last["contributors"]
    elif last is not None and is_pair(last) and member.get("self"):
        taken = bool(last["contributors"])
    return {
        "peer": name,
        "short": with_names(short_name(name), called),
        "letters": short_name(name),
        "called": called.get(short_name(name), ""),
        "self": bool(member.get("self")),
        "presence": presence(member),
        "in_last_round": taken,
        **{
            key: member.get(key)
            for key in ("round", "trains", "path", "relayed_share", "answers_in", "uplink_bits", "seen")
        },
        **{key: member.get(key) for key in ("bytes_sent", "bytes_received")},
    }


def _shown(status: Status) -> list[Mapping[str, Any]]:
    """Return so many members, this peer among them, those that are gone first: they are what a person looks for."""
    if len(status.members) <= PEERS:
        return list(status.members)
    return sorted(status.members, key=lambda member: (not member.get("self"), presence(member) == "live"))[:PEERS]


def is_pair(made: Mapping[str, Any]) -> bool:
    """Tell whether a round is a gossip step of this peer."""
    return "disagreement" in made


def _diagnostics(status: Status) -> list[View]:
    return [
        {"name": name, "text": in_words({name: value}), "out": name in status.out_of_band}
        for name, value in status.diagnostics.items()
    ]


def bytes_of(status: Status) -> View:
    """Return what this peer sent, and what a float32 all-reduce at every step would have; null without the model's
    size.
    """
    num_peers, size = len(status.members), status.num_parameters
    dense = None
    if size and num_peers > 1:
        dense = dense_allreduce_nbytes(num_parameters=size, steps=[status.inner_steps], num_peers=num_peers)
    return {
        "sent": status.bytes_sent,
        "received": status.bytes_received,
        "dense": dense,
        "num_parameters": size or None,
        "kinds": _kinds(status),
    }


def _kinds(status: Status) -> list[View]:
    """Return bytes by kind of message, most first; what no stream carried, as the DHT's, is the rest."""
    found: dict[str, list[int]] = {}
    for kind, (sent, received) in status.kinds.items():
        name = _KINDS.get(kind, kind)
        before = found.get(name, [0, 0])
        found[name] = [before[0] + sent, before[1] + received]
    totals = (status.bytes_sent + status.bytes_measuring, status.bytes_received)
    rest = [max(0, total - sum(moved[at] for moved in found.values())) for at, total in enumerate(totals)]
    if found and sum(rest):
        found["discovery, and the rest"] = rest
    named = [{"name": name, "sent": sent, "received": received} for name, (sent, received) in found.items()]
    return sorted(named, key=lambda kind: -(kind["sent"] + kind["received"]))


def _open_round(status: Status, called: Mapping[str, str]) -> View | None:
    """Return the round in progress; None where nobody trains any more."""
    if status.open_round is None or status.state in ENDED:
        return None
    leader = str(status.open_round.get("leader", "?"))
    return {**status.open_round, "leader": with_names(short_name(leader), called)}


def rounds_of(history: History, called: Mapping[str, str]) -> View:
    """Return the strip's rounds from the oldest that is kept, and their peers' names, which they have by number."""
    names: dict[str, int] = {}

    def numbers(of: list[str]) -> list[int]:
        return [names.setdefault(name, len(names)) for name in of]

    rounds = [
        {
            **made,
            "contributors": numbers(made["contributors"]),
            "late": numbers(made["late"]),
            **({"leader": numbers([made["leader"]])[0]} if "leader" in made else {}),
        }
        for made in history.rounds
    ]
    return {"names": [with_names(short_name(name), called) for name in names], "rounds": rounds}


def learning_of(history: History) -> View:
    """Return the columns of the charts."""
    return {
        "held_out": history.held_out.columns(),
        "training": history.training.columns(),
        "diagnostics": history.diagnostics.columns(),
        "titles": {name: words.title for name, words in WORDS.items()},  # of the diagnostics' charts
    }


def events_of(history: History, called: Mapping[str, str]) -> View:
    """Return the sentences, the newest first."""
    return {"events": [{**one, "text": with_names(one["text"], called)} for one in reversed(history.sentences)]}
