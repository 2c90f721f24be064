"""tests/observe/test_health.py"""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from decentral.observe.health import (
    SAID_FOR,
    Notices,
    as_seen,
    health_sentence,
    in_time,
    in_units,
    is_well,
    left_out_sentence,
    lost_sentence,
    names_in,
    round_line,
    short_name,
    with_names,
)
from decentral.observe.status import STATES, ProcessInfo, Status, read_status, write_status

A, B, C, D = (f"12D3KooW{letter * 6}" for letter in "ABCD")


def parted(rounds: int) -> dict[str, Any]:
    """Of a run that has gone on without its others for so many rounds, and bears the steps of three."""
    return {"state": "training", "given_up_seconds": 720.0, "given_up_rounds": rounds, "late_rounds": 3}


def test_a_healthy_peer_is_told_in_the_promised_words() -> None:
    status = Status(
        state="training",
        round=41,
        rounds_seen=41,
        rounds_contributed=40,
        bytes_per_round=200_000,
        next_sync_seconds=12.2,
    )
    assert health_sentence(status) == (
        "healthy: round 41, you contributed to 40 of the last 41, 0.2 MB sent per round, next sync in 12 s"
    )


@pytest.mark.parametrize(
    ("status", "sentence"),
    [
        (
            Status(state="looking", inner_steps=7),
            "looking: nobody reachable yet, training on alone (inner step 7)",
        ),
        (
            Status(state="looking", inner_steps=7, gone=(B,), gone_left=True),
            "alone: …BBBBBB left; the invite still lets others in; training on alone (inner step 7)",
        ),
        (
            Status(state="looking", inner_steps=1, gone=(B, C)),
            "alone: …BBBBBB, …CCCCCC fell silent; whoever is heard of again is let in; training on alone",
        ),
        (
            Status(state="looking", peer=A, inner_steps=7, round=3, members=({"peer": B},)),
            "and what it trains until a member lets it in again counts as one round at most; if they are done, so",
        ),
        (
            Status(state="looking"),  # the loop may wait for a second peer
            "looking: nobody reachable yet; share the invite line, or ask decentral doctor",
        ),
        (
            Status(state="waiting", wanted_members=2, members=({},)),
            "waiting: for a second peer, who joins with the invite; --alone goes on without",
        ),
        (
            Status(state="waiting", wanted_members=2, members=({},), own_loop=True),
            "joins with the invite; decentral.join(alone=True), or join --script --alone, goes on without",
        ),
        (
            Status(state="waiting", wanted_members=4, members=({}, {})),
            "waiting: 2 of 4 peers are here; training begins with the last",
        ),
        (
            Status(state="looking", round=7, members=({}, {}), given_up=(B, C, D)),
            "shrunk: round 7 goes on with 2 of 5 peers, as the others fell silent; your model meets theirs again, pair",
        ),
        (
            Status(members=({}, {}), given_up=(B, C, D), usual_round_seconds=40.0, **parted(rounds=2)),
            "with 2 of 5 peers for 12 min, as the others fell silent; if they stopped, all of it counts; if they went "
            "on elsewhere, theirs wins when you meet, and what yours learns alone counts as one round at most, and for "
            "nothing after about 3 rounds (2 min)",
        ),
        (
            Status(members=({},), given_up=(B,), **parted(rounds=4)),
            "the heavier chain wins when you meet, and what the lighter learns alone is practice by now, and counts",
        ),
        (
            Status(state="looking", inner_steps=9, gone=(B,), late_rounds=3, usual_round_seconds=40.0),
            "training on alone (inner step 9), which counts as one round at most; if a round is made without this "
            "peer, it counts for nothing after 3 rounds (2 min)",
        ),
        (Status(state="syncing", given_up=(B,)), "syncing:"),
        (Status(state="training", peer=B, round=7, given_up=(B,)), "healthy: round 7"),  # it was away, not the others
        (Status(state="training"), "healthy: round 0, no round has ended yet"),
        (Status(state="syncing", round=9), "syncing: fetching and checking the model of round 9"),
        (
            Status(state="syncing", round=9, model_here=3_000_000, model_nbytes=30_000_000, received_per_second=5e5),
            "syncing: fetching and checking the model of round 9, 3.0 MB of 30.0 MB are here, about 54 s left;",
        ),
        (
            Status(state="syncing", round=9, model_nbytes=30_000_000),
            "syncing: fetching and checking the model of round 9, 0.0 kB of 30.0 MB are here; training starts",
        ),
        (Status(state="waiting", round=3, waiting_for=(A, B)), "waiting: round 4 needs …AAAAAA, …BBBBBB;"),
        (Status(state="waiting", waiting_for=(A, B, C, D)), "needs …AAAAAA, …BBBBBB, …CCCCCC and 1 more;"),
        (Status(state="waiting"), "needs the other peers;"),
        (
            Status(state="paused", round=5),
            "paused: after round 5; the others go on without you; decentral resume continues",
        ),
        (
            Status(state="paused", round=5, trains_while_paused=True),
            "paused: after round 5; the others go on without you; your loop trains on, and contributes nothing;",
        ),
        (Status(state="left", round=5), "left: round 5 was its last, everything is kept; start it again with the same"),
        (Status(state="done", round=8, rounds=8), "done: 8 rounds,"),
        (Status(state="done", round=3, rounds=8), "done: 3 of 8 rounds, its time was up,"),
        (Status(state="leaving", round=5), "leaving: after round 5, saying goodbye"),
        (Status(state="done", round=5, bytes_sent=1_500_000), "done: 5 rounds, 1.5 MB sent"),
        (
            Status(state="training", rounds_seen=10, rounds_contributed=4),
            "late: round 0, you contributed to 4 of",
        ),
        (Status(state="training", problem="the disk is full"), "attention: the disk is full"),
    ],
)
def test_each_state_has_its_sentence(status: Status, sentence: str) -> None:
    assert sentence in health_sentence(status)


@pytest.mark.parametrize("state", ["starting", "looking", "training", "waiting", "following"])
def test_who_is_there_is_told_of_its_relay_that_does_not_answer(state: str) -> None:
    said = health_sentence(Status(state=state, silent_relays=("127.0.0.1:1",)))
    assert said.endswith("; relay 127.0.0.1:1 does not answer")


def test_in_gossip_nobody_is_left_out_in_a_round_of_all() -> None:
    said = left_out_sentence(A, 0), left_out_sentence("", 0)
    assert said == ("left out of the run by …AAAAAA", "left out of the run while it was behind")


def test_the_sentence_is_always_one_line() -> None:
    for state in STATES:
        assert len(health_sentence(Status(state=state)).splitlines()) == 1


def test_who_is_gone_is_told_with_the_time_of_its_last_sign_and_how_to_go_on() -> None:
    said = lost_sentence(Status(state="training", round=41, updated=1_000_000.0), now=1_000_400.0)
    stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(1_000_000.0))
    assert said == (
        f"gone: the peer that wrote this is gone (killed or crashed); its last sign was at {stamp}, 7 min ago, "
        "in round 41 (training); start it again with the same --out to resume"
    )


def written(folder: Path, every: float = 1.0, **fields: Any) -> Status:
    """A status of this very process, as a reader has it."""
    write_status(
        folder,
        Status(**{"state": "training", "round": 41, "health": "healthy: x", **fields}),
        ProcessInfo(),
        every=every,
    )
    return read_status(folder)


def test_who_writes_nothing_though_its_process_lives_is_frozen(tmp_path: Path) -> None:
    status = written(tmp_path)
    for seconds in (1.0, 14.0):
        assert as_seen(status, status.updated + seconds, status.updated_monotonic + seconds) == status
    seen = as_seen(status, status.updated + 40.0, status.updated_monotonic + 40.0)
    assert seen.frozen_seconds == 40.0
    assert seen.health == (
        f"frozen: nothing was written for 40 s, in round 41 (training), though process {os.getpid()} is there; "
        "its machine, its disk or the process itself hangs"
    )
    assert is_well(status)
    assert not is_well(seen)


def test_a_machine_that_slept_and_a_clock_that_was_set_freeze_nobody(tmp_path: Path) -> None:
    """The monotonic clock stands still in its sleep."""
    status = written(tmp_path)
    assert as_seen(status, status.updated + 30_000.0, status.updated_monotonic + 1.0) == status
    assert as_seen(status, status.updated - 30_000.0, status.updated_monotonic + 20.0).frozen_seconds == 20.0


@pytest.mark.parametrize(
    "given",
    [{"every": 0.0, "state": "starting"}, {"state": "left"}, {"state": "done"}],  # while torch is loaded; last words
)
def test_who_has_nothing_more_to_write_is_not_frozen(tmp_path: Path, given: dict[str, Any]) -> None:
    status = written(tmp_path, **given)
    assert as_seen(status, status.updated + 900.0, status.updated_monotonic + 900.0) == status


def test_who_takes_no_part_is_told_so_before_all_that_follows_from_it() -> None:
    stalled = {"stalled_seconds": 90.0, "stalled_by": "waiting for the members to let this peer in"}
    behind = {"others_round": 41, "round": 12, **stalled}
    out = {"left_out_seconds": 130.0, "left_out_round": 12, "left_out_by": A, **behind}
    assert health_sentence(Status(state="training", **behind)) == (
        "behind: the others are in round 41, this peer in 12"
    )
    fetching = {**behind, "model_here": 3_000_000, "model_nbytes": 30_000_000}
    assert health_sentence(Status(state="training", **fetching)) == (
        "behind: the others are in round 41, this peer in 12; 3.0 MB of the 30.0 MB of a later model are here"
    )
    assert health_sentence(Status(state="waiting", **out)) == (
        "out: left out of the run by …AAAAAA in round 12, 2 min ago; it asks to be let in again"
    )
    assert health_sentence(Status(state="looking", **{**out, "left_out_by": ""})) == (
        "out: left out of the run while it was behind, in round 12 or before, 2 min ago; none of the others can be "
        "reached"
    )
    for status in (Status(state="paused", **out), Status(state="leaving", **out), Status(state="done", **out)):
        assert is_well(replace(status, health=health_sentence(status))), "as its person wished"


def test_a_round_is_one_short_line() -> None:
    status = Status(round=41, rounds=60, loss=2.34567, held_out_loss=2.4, members=({},) * 3, bytes_sent=1_200_000)
    line = round_line(replace(status, seconds_left=4000.0))
    assert line == "round 41 of 60, loss 2.3457, held-out 2.4000, 3 peers, 1.2 MB sent, 67 min left"
    assert round_line(Status(round=2, loss=1.0)) == "round 2, loss 1.0000"  # a baseline: nobody, nothing sent


def test_spans_bytes_and_names_are_told_as_they_read_best() -> None:
    spans = {0: "0 s", 90: "90 s", 150: "2 min", 7100: "118 min", 9000: "2.5 h", 250_000: "2.9 days"}
    assert {seconds: in_time(seconds) for seconds in spans} == spans
    nbytes = {0: "0.0 kB", 900: "0.9 kB", 120_000: "0.1 MB", 5.25e6: "5.2 MB", 2e9: "2.0 GB"}
    assert {number: in_units(number) for number in nbytes} == nbytes
    assert short_name(A) == "…AAAAAA"
    assert short_name("peer-1") == "peer-1"


ME, OTHER = "12D3KooWmyselfmyself", "12D3KooWaaaaaaaaaAAA"
OUTLIER = {"round": 7, "peer": OTHER, "norm": 31.0, "median": 1.0, "times": 31.0}
TWINS = {"round": 9, "peers": [OTHER, ME], "cosine": 0.99}


@pytest.mark.parametrize(
    ("event", "fields", "says"),
    [
        ("outlier", OUTLIER, "the update of …aaaAAA is 31 times as large as the others' (round 7)"),
        ("outlier", OUTLIER, 'norm_clip = "median"'),
        ("outlier", {**OUTLIER, "peer": ME}, "your update is 31 times as large"),
        (
            "twins",
            TWINS,
            "you and …aaaAAA send nearly the same update: do both use the same seed and data? "
            "see peer.seed, peer.shard",
        ),
    ],
)
def test_a_notice_names_the_peer_the_figure_and_the_way_out(event: str, fields: dict[str, Any], says: str) -> None:
    sentence = Notices().hear(event, fields, ME)
    assert sentence is not None
    assert says in sentence


def test_the_newest_notice_is_the_health_of_a_peer_that_trains_and_ends_after_a_while():
    notices = Notices()
    notices.hear("outlier", OUTLIER, ME)
    notices.hear("twins", TWINS, ME)
    assert notices.hear("commit", {"round": 9}, ME) is None
    assert [sentence[:3] for sentence in notices.now(10)] == ["you", "the"]
    status = Status(state="training", round=10, rounds_seen=4, rounds_contributed=4, notices=notices.now(10))
    assert health_sentence(status).startswith("attention: you and …aaaAAA send nearly the same update")
    assert health_sentence(status).endswith("0.0 kB sent per round")
    assert notices.now(7 + SAID_FOR) == notices.now(8 + SAID_FOR)[:1]
    assert notices.now(9 + SAID_FOR) == ()


def test_who_is_in_every_second_round_is_not_healthy_and_late_by_turns() -> None:
    words, said = [], ""
    for seen in (*range(4, 40), 100):
        contributed = 62 if seen == 100 else seen // 2
        status = Status(state="training", rounds_seen=seen, rounds_contributed=contributed, health=said)
        said = health_sentence(status)
        assert health_sentence(replace(status, health=said)) == said, "who reads it says the same"
        words.append(said.partition(":")[0])
    assert words == ["healthy"] + 35 * ["late"] + ["healthy"]


HOSTILE = ["\x1b[2J", "a" * 10_000, "<b>Anna</b>", "…BBBBBB", "An na", "\uff57\uff49\uff44\uff45", "", 7, None]


def test_a_name_stands_beside_the_letters_of_its_key_in_every_sentence() -> None:
    status = Status(state="waiting", waiting_for=(B, C, D), names={B: "Anna", D: "x" * 16})
    assert health_sentence(status) == (
        f"waiting: round 1 needs Anna (BBBBBB), …CCCCCC, {'x' * 16} (DDDDDD); training goes on after it"
    )
    alone = Status(state="looking", gone=(B,), gone_left=True, names={B: "Anna"})
    assert health_sentence(alone) == "alone: Anna (BBBBBB) left; the invite still lets others in"


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_no_name_is_shown_nowhere(name: Any) -> None:
    status = Status(state="waiting", waiting_for=(B,), names={B: name})
    assert health_sentence(status) == "waiting: round 1 needs …BBBBBB; training goes on after it"


def test_who_made_a_key_with_the_letters_of_another_takes_no_name_from_it_and_gives_it_none() -> None:
    assert names_in(Status(names={B: "Anna", f"x{B}": "Mallory", f"y{B}": "Anna", C: "Ben"})) == {"…CCCCCC": "Ben"}
    assert names_in(Status(names="none")) == {}  # type: ignore[arg-type]  # of another version's file


def test_a_sentence_that_others_wrote_is_not_made_long_by_names() -> None:
    told = with_names(100 * "…BBBBBB ", {"…BBBBBB": "x" * 16})
    assert len(told) < 1000
    assert told.count("x" * 16) == 8
