"""Events and metrics folded into what the page shows."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from decentral.dashboard.history import ROUNDS, History, Series, split_of
from decentral.observe.story import LONGEST
from tests.kit.site import ME, OTHER, THIRD


def commit(step: int, contributors: list[str], members: list[str], **more: Any) -> dict[str, Any]:
    row = {"event": "commit", "t": 1000.0 + step, "mono": 10.0 * step, "outer_step": step}
    return {**row, "contributors": contributors, "members": members, "contributed": ME in contributors, **more}


def test_a_round_tells_who_was_in_it_and_who_was_not() -> None:
    history = History()
    history.event(commit(1, [ME, THIRD], [ME, OTHER, THIRD]))
    (made,) = history.rounds
    assert (made["contributors"], made["late"]) == ([ME, THIRD], [OTHER])
    assert made["contributed"] is True


def test_a_round_without_times_took_as_long_as_lies_between_it_and_the_one_before() -> None:
    history = History()
    for step in (1, 2):
        history.event(commit(step, [ME], [ME]))
    assert [made["seconds"] for made in history.rounds] == [None, 10.0]


def test_the_time_over_a_restart_is_not_known() -> None:
    """The monotonic clock of another boot may be anywhere."""
    history = History()
    history.event(commit(1, [ME], [ME]) | {"mono": 5000.0})
    history.event(commit(2, [ME], [ME]) | {"mono": 3.0})
    assert history.rounds[-1]["seconds"] is None


def test_what_a_peer_tells_of_a_round_is_shown_as_it_told_it() -> None:
    history = History()
    told = {"seconds": 8.0, "waited": 3.0, "sending": 1.0, "applying": 0.5, "leader": OTHER, "ballot": 1, "votes": 3}
    history.event(commit(1, [ME], [ME, OTHER], **told))
    (made,) = history.rounds
    assert (made["seconds"], made["ballot"], made["votes"]) == (8.0, 1, 3)
    assert made["leader"] == OTHER
    assert made["split"] == {"computing": 5.0, "sending": 1.0, "waiting": 1.5, "applying": 0.5}


@pytest.mark.parametrize(("seconds", "waited"), [(8.0, 0.0), (8.0, 3.0), (8.0, 9.0), (0.0, 0.0)])
@pytest.mark.parametrize(("sending", "applying"), [(0.0, 0.0), (1.0, 0.5), (20.0, 20.0)])
def test_the_parts_of_a_round_are_the_whole_of_it(
    seconds: float, waited: float, sending: float, applying: float
) -> None:
    parts = split_of(seconds, waited, sending, applying)
    assert sum(parts.values()) == pytest.approx(seconds)
    assert all(part >= 0 for part in parts.values())


def test_rounds_that_another_branch_made_anew_take_the_place_of_the_old_ones() -> None:
    history = History()
    for step in (1, 2, 3, 2):
        history.event(commit(step, [ME], [ME]))
    assert [made["step"] for made in history.rounds] == [1, 2]


def test_rounds_that_were_given_up_for_another_branch_are_none_any_more() -> None:
    history = History()
    for step in range(1, 9):
        history.event(commit(step, [ME], [ME]))
    history.event({"event": "healed", "t": 1009.0, "round": 12, "epoch": 3, "parted": 2, "given_up": 6})
    assert [made["step"] for made in history.rounds] == [1, 2]
    history.event({"event": "healed", "t": 1010.0, "round": 12, "epoch": 3, "parted": None, "given_up": None})
    assert [made["step"] for made in history.rounds] == [1, 2]


def test_a_gossip_step_has_a_partner_or_none() -> None:
    history = History()
    history.event({"event": "pair", "step": 1, "partner": OTHER, "disagreement": 0.02})
    history.event({"event": "pair", "step": 2, "partner": None, "disagreement": None})
    met, alone = history.rounds
    assert (met["step"], alone["step"]) == (2, 3), "steps made: they are counted from 0"
    assert (met["contributors"], met["disagreement"]) == ([OTHER], 0.02)
    assert (alone["contributors"], alone["disagreement"]) == ([], None)


def test_rounds_are_bounded() -> None:
    history = History()
    for step in range(1, 2 * ROUNDS):
        history.event(commit(step, [ME], [ME]))
    assert len(history.rounds) == ROUNDS


def test_an_invite_is_in_no_sentence() -> None:
    """Whoever has it may join; the page may be looked at by more."""
    history = History()
    history.event({"event": "joined", "t": 1.0, "invite": "decentral1:secret", "round": 0, "resumed": False})
    history.event({"event": "something new", "t": 1.0, "invite": "decentral1:secret", "why": "a word"})
    said = [one["text"] for one in history.sentences]
    assert said == ["joined at round 0: the model is checked, training goes on from it", "something new why=a word"]


NOTHINGS: list[Any] = [None, "", "<b>", -1, 1e308, True, [], ["x"], [None], {}, {"a": 1}]


@pytest.mark.parametrize("event", ["commit", "pair", "joined", "alone", "out_of_band", "dropped", "lan", "shrunk", 7])
def test_rows_of_another_shape_are_passed_over(event: object) -> None:
    history = History()
    keys = ("outer_step", "step", "contributors", "members", "partner", "peers", "leader", "t", "mono", "seconds")
    for key, value in itertools.product(keys, NOTHINGS):
        history.event({"event": event, "outer_step": 3, "step": 3, key: value})
        history.metric({"scope": "outer", "round": 3, key: value})
        history.metric({"scope": "inner", "step": 3, key: value})
    json.dumps([list(history.rounds), list(history.sentences), history.held_out.columns()])


def test_the_clock_of_metrics_goes_on_over_restarts() -> None:
    history = History()
    for step, seconds in ((10, 5.0), (20, 9.0), (30, 2.0)):
        history.metric({"scope": "inner", "step": step, "seconds": seconds, "loss": 1.0})
    assert history.training.columns()["seconds"] == [5.0, 9.0, 11.0]


def test_a_series_of_any_length_has_its_first_its_last_and_few_points_between() -> None:
    series = Series("step", ("step", "loss"), limit=50)
    for step in range(12_345):
        series.add({"step": step, "loss": step / 2})
        assert series.columns()["step"][-1] == step
    steps = series.columns()["step"]
    assert steps[0] == 0
    assert 25 <= len(steps) <= 52
    assert steps == sorted(set(steps))


def test_what_a_resumed_peer_repeats_is_shown_once() -> None:
    series = Series("step", ("step", "loss"))
    for step, loss in ((1, 4.0), (2, 3.0), (3, 2.0), (2, 3.5), (3, 2.5)):
        series.add({"step": step, "loss": loss})
    assert series.columns() == {"step": [1, 2, 3], "loss": [4.0, 3.5, 2.5]}


def test_who_was_let_in_by_a_commit_did_not_miss_its_round() -> None:
    """A commit names the members of the next round."""
    history = History()
    history.event({"event": "membership", "members": [ME, OTHER]})
    history.event(commit(1, [ME, OTHER], [ME, OTHER, THIRD]))
    history.event(commit(2, [ME], [ME, OTHER, THIRD]))
    assert [made["late"] for made in history.rounds] == [[], [OTHER]], "who has just come still takes the model"


def test_of_lists_that_were_cut_nobody_is_said_to_be_missing() -> None:
    """A line has 16 KiB at most: of some 150 members its lists name the first 64."""
    history = History()
    history.event({"event": "membership", "members": [ME, OTHER]})
    history.event(commit(1, [ME], [ME], truncated=True))
    (made,) = history.rounds
    assert (made["late"], made["truncated"], list(history.sentences)) == ([], True, [])


def test_a_sentence_is_no_longer_than_a_page_can_show() -> None:
    history = History()
    history.event({"event": "dropped", "what": "a", "why": "b" * 10_000})
    assert len(history.sentences[0]["text"]) == LONGEST


def test_who_comes_and_who_goes_is_said() -> None:
    history = History()
    for step, members in enumerate([[ME, OTHER], [ME, OTHER, THIRD], [ME, THIRD]]):
        history.event({"event": "membership", "members": members} if step < 2 else commit(1, [ME], members))
    said = [one["text"] for one in history.sentences]
    assert said == [f"…{THIRD[-6:]} was let in", f"the run goes on without …{OTHER[-6:]}"]
