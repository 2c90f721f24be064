"""Events as sentences: each that the docs have, and rounds by who was in them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from decentral.observe.events import plain_words
from decentral.observe.story import LONGEST, Story, sentence_of
from tests.kit.site import ME, OTHER, THIRD

ROOT = Path(__file__).parents[2]
NO_SENTENCE = {"commit", "membership", "pair", "metrics"}  # rounds, and what a loop logs
FIELDS: dict[str, Any] = {  # a value of each field that an event has, by its name
    **dict.fromkeys(
        ("round", "step", "outer_step", "missed", "steps", "counted", "asked", "named", "records", "stop", "of"), 3
    ),
    **dict.fromkeys(("why", "what", "method", "name"), "because"),
    **dict.fromkeys(("peer", "leader"), OTHER),
    **{name: [OTHER, THIRD] for name in ("peers", "given_up", "members")},
    **dict.fromkeys(("seconds", "away", "norm", "median", "times", "cosine", "value", "low", "high"), 2.5),
    **dict.fromkeys(("bytes", "sent", "limit"), 5_000_000),
    "figure": "mean_cosine",
    "left": True,
    "first": 1,
    "stage": 1,
    "micro_batches": 16,
    "rounding": "int8",
    "left_out": [2, 3],
    "on": ["192.168.1.2"],
    "off": None,
    "resumed": False,
}


def documented() -> dict[str, list[str]]:
    """The fields of every event that docs/run-directory.md has."""
    text = (
        (ROOT / "docs/run-directory.md")
        .read_text(encoding="utf-8")
        .partition("## Events")[2]
        .partition("## Metrics")[0]
    )
    found = {}
    for names, fields in re.findall(r"^\| (`[^|]+`) \| ([^|]*) \|", text, re.MULTILINE):
        for name in re.findall(r"`(\w+)`", names):
            found[name] = [field.strip() for field in fields.split(",")]
    found |= {name: fields.split(", ") for name, fields in re.findall(r"`(outlier|twins)` \(([^)]+)\)", text)}
    return found


def test_what_happens_in_a_round_has_the_number_that_people_see() -> None:
    """Of a checkpoint it was the height of the chain, which no other sentence names."""
    counted = {name: fields for name, fields in documented().items() if "round" in fields}
    of_the_chain = {name for name, fields in counted.items() if "outer_step" not in fields}
    assert of_the_chain == {"joined", "undecided"}, "their round is no height"
    assert sentence_of({"event": "checkpoint", "round": 9, "outer_step": 7, "bytes": 2_000_000}) == (
        "a checkpoint of round 7 is kept, 2.0 MB"
    )


@pytest.mark.parametrize(
    ("given_up", "told"),
    [(None, ""), (0, ""), (1, ", and 1 round of its own part counts"), (6, ", and 6 rounds of its own part count")],
)
def test_how_many_rounds_are_given_up_is_told_where_it_is_known(given_up: int | None, told: str) -> None:
    said = "the run had parted in two: this peer goes on with the other part"
    assert sentence_of({"event": "healed", "given_up": given_up}) == said + (told and f"{told} no more")


@pytest.mark.parametrize("event", sorted(documented().keys() - NO_SENTENCE))
def test_every_event_that_the_docs_have_is_told_in_a_sentence(event: str) -> None:
    row = {"event": event} | {field: FIELDS[field] for field in documented()[event] if field in FIELDS}
    said = sentence_of(row)
    assert said not in (None, plain_words(row))
    assert "None" not in str(said)


def commit(contributors: list[str], members: list[str], *, mine: bool, **more: Any) -> dict[str, Any]:
    row = {"event": "commit", "outer_step": 64, "round": 71, "seconds": 2.71}
    return row | {"contributors": contributors, "members": members, "contributed": mine} | more


ALL = [ME, OTHER, THIRD]
ROUNDS = [
    (commit([ME], [ME], mine=True), "round 64: you alone, 2.7 s"),
    (commit(ALL, ALL, mine=True), "round 64: all three, you too, 2.7 s"),
    (commit([ME, OTHER], ALL, mine=True), f"round 64: two of three, you too, without …{THIRD[-6:]}, 2.7 s"),
    (commit([OTHER, THIRD], ALL, mine=False), "round 64: two of three, without you, 2.7 s"),
    (commit([OTHER], ALL, mine=False), "round 64: one of three, without you and 1 more, 2.7 s"),
    (commit([], [], mine=True, truncated=True), "round 64: you too, 2.7 s"),
    ({"event": "pair", "step": 4, "partner": OTHER, "seconds": 1.0}, f"round 5: with …{OTHER[-6:]}, 1.0 s"),
    ({"event": "pair", "step": 4, "partner": None}, "round 5: alone, as no partner came"),
]


@pytest.mark.parametrize(("row", "said"), ROUNDS)
def test_a_round_is_told_by_who_was_in_it_and_how_long_it_took(row: dict[str, Any], said: str) -> None:
    assert Story().tell(row) == [said]


def test_who_comes_with_a_commit_was_not_missed_in_its_round() -> None:
    story = Story()
    story.tell(commit([ME, OTHER], [ME, OTHER], mine=True))
    assert story.tell(commit([ME, OTHER], ALL, mine=True)) == [
        "round 64: both, you too, 2.7 s",
        f"…{THIRD[-6:]} was let in",
    ]


def test_a_newcomer_is_not_late_before_it_has_had_time_to_begin() -> None:
    """It was called late for as long as it took the model."""
    story = Story()
    for _ in range(2):
        story.tell(commit([ME, OTHER], [ME, OTHER], mine=True))
    story.tell(commit([ME, OTHER], ALL, mine=True))
    said = [
        story.tell_round(row)
        for row in [commit([ME, OTHER], ALL, mine=True)]
        for _ in range(7)
        if not story.tell_beside(row)
    ]
    assert said[:5] == ["round 64: both, you too, 2.7 s"] * 5
    assert said[-1] == f"round 64: two of three, you too, without …{THIRD[-6:]}, 2.7 s"
    assert story.tell(commit(ALL, ALL, mine=True)) == ["round 64: all three, you too, 2.7 s"]


ODD = [
    {"event": "joined", "round": float("inf")},
    {"event": "stalled", "outer_step": float("inf"), "why": "?"},
    {"event": "checkpoint", "bytes": 10**400},
    {"event": "commit", "outer_step": 1, "seconds": 10**400, "contributors": 3, "members": None},
    {"event": "sync_failed", "peer": OTHER, "why": "\x1b]0;taken\x07" + "x" * 9000},
]


@pytest.mark.parametrize("row", ODD, ids=lambda row: row["event"])
def test_a_row_of_another_shape_is_told_plainly_and_steers_no_terminal(row: dict[str, Any]) -> None:
    for said in Story().tell(row):
        assert said.isprintable()
        assert len(said) <= LONGEST


def test_an_invite_is_in_no_sentence() -> None:
    assert "decentral1:" not in str(sentence_of({"event": "of another version", "invite": "decentral1:AAAA"}))
