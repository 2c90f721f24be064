"""When a figure of the swarm is said to be unusual, in which words, and where it is shown."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from decentral.cli.train import progress_of_status
from decentral.observe.diagnostics import (
    BANDS,
    BEHIND_ALONE,
    DEBT_RATIO,
    LOSS_DISPERSION,
    MEAN_COSINE,
    NAMES,
    NEVER_SENT,
    NORM_DISPERSION,
    REPLICA_DISTANCE,
    REPLICA_VARIANCE,
    ROUNDS,
    STILL_GAINED,
    BandWatch,
    Crossing,
    Diagnostics,
    Figures,
    in_words,
)
from decentral.observe.health import SAID_FOR, Notices, health_sentence
from decentral.observe.metrics import peer_exposition
from decentral.observe.status import Status

USUAL = {
    NORM_DISPERSION: 0.05,
    LOSS_DISPERSION: 0.02,
    MEAN_COSINE: 0.1,
    DEBT_RATIO: 3.0,
    NEVER_SENT: 0.1,
    REPLICA_DISTANCE: 0.01,
    REPLICA_VARIANCE: 0.0004,
    BEHIND_ALONE: -0.3,
    STILL_GAINED: 0.05,
}


def seen(values: Sequence[float | None], figure: str, contributors: int = 4, rounds: int = 1000) -> list[Crossing]:
    """The crossings of one figure over rounds; None: a round that did not have it."""
    watch, found = BandWatch(), list[Crossing]()
    for step, value in enumerate(values, 1):
        told = {} if value is None else {figure: value}
        found += watch.see(Figures(step, contributors, rounds, values=told))
    return found


# ---- leaving a band, and coming back ----


def test_a_figure_is_out_after_three_rounds_running_and_back_after_three() -> None:
    crossings = seen([0.9] * 5 + [0.1] * 5, NORM_DISPERSION)
    assert [(one.outer_step, one.is_out) for one in crossings] == [(ROUNDS, True), (5 + ROUNDS, False)]
    assert [one.value for one in crossings] == [0.9, 0.1]


@pytest.mark.parametrize(
    ("values", "out_at"),
    [
        ([0.9, 0.9, 0.1] * 5, []),  # out for less than three rounds running is nothing
        ([0.1] * 20, []),
        ([0.9], []),
        ([], []),
        ([0.9] * 3 + [0.1, 0.1, 0.9] * 5, [3]),  # what comes and goes stays out
        ([0.9, None, 0.9, None, None, 0.9], [6]),  # rounds without the figure count for neither
    ],
)
def test_three_rounds_running_decide(values: list[float | None], out_at: list[int]) -> None:
    assert [one.outer_step for one in seen(values, NORM_DISPERSION)] == out_at


@pytest.mark.parametrize(("contributors", "is_out"), [(2, False), (3, False), (4, True), (16, True)])
def test_how_far_updates_may_undo_one_another_goes_by_how_many_there_are(contributors: int, is_out: bool) -> None:
    """The mean cosine of K vectors is never below -1 / (K - 1)."""
    assert bool(seen([-0.2] * ROUNDS, MEAN_COSINE, contributors)) == is_out


def test_what_was_never_sent_is_looked_at_once_there_were_rounds_enough() -> None:
    assert seen([0.99] * 10, NEVER_SENT, rounds=20) == []
    assert seen([0.99] * 10, NEVER_SENT, rounds=1000) != []


def test_usual_figures_are_in_their_bands_and_what_this_version_has_no_band_for_is_passed_over() -> None:
    assert [figure for figure in NAMES if seen([USUAL[figure]] * 10, figure)] == []
    assert BandWatch().see(Figures(1, 2, values={"of_next_year": 1e9})) == []


# ---- words ----


@pytest.mark.parametrize(
    ("figure", "value", "says", "cause"),
    [
        (NORM_DISPERSION, 0.9, "the peers' updates differ in length by 90% of their mean", "another learning rate"),
        (LOSS_DISPERSION, 0.9, "the peers' losses differ by 90% of their mean", "one of them diverges"),
        (MEAN_COSINE, -0.4, "the peers' updates have a mean cosine of -0.40", "undo one another's steps"),
        (MEAN_COSINE, 0.99, "the peers' updates have a mean cosine of 0.99", "the same data in the same order"),
        (DEBT_RATIO, 900.0, "this peer owes 900 times what it learnt in a round", "the compressor sends too little"),
        (NEVER_SENT, 0.97, "97% of the parameters were never sent by anybody", "the same few values"),
        (REPLICA_VARIANCE, 0.5, "the replicas have a variance of 0.5 of their own square", "drives them apart"),
    ],
)
def test_a_warning_says_what_is_unusual_and_its_probable_cause(
    figure: str, value: float, says: str, cause: str
) -> None:
    told: list[tuple[str, dict[str, object]]] = []
    diagnostics, notices = Diagnostics(lambda event, fields: told.append((event, fields))), Notices()
    for step in range(1, ROUNDS + 1):
        diagnostics.add_round(Figures(step, 4, 1000, values={figure: value}))
    ((event, fields),) = told
    assert (event, fields["figure"], fields["value"]) == ("out_of_band", figure, value)
    sentence = notices.hear(event, fields, "me")
    assert sentence is not None
    assert sentence.startswith(says)
    assert cause in sentence
    assert diagnostics.out == (figure,)


def test_every_band_has_a_cause_for_each_bound_and_nothing_for_what_it_has_not() -> None:
    for band in BANDS:
        assert bool(band.if_low) == (band.low > float("-inf"))
        assert bool(band.if_high) == (band.high < float("inf"))


def test_a_warning_holds_in_the_status_until_its_figure_is_back() -> None:
    notices = Notices()
    diagnostics = Diagnostics(lambda event, fields: told.append(notices.hear(event, fields, "me")))
    told: list[str | None] = []
    for step in range(1, 10 * SAID_FOR):
        diagnostics.add_round(Figures(step, 4, values={NORM_DISPERSION: 0.9}))
    (sentence,) = notices.now(10 * SAID_FOR)
    status = Status(state="training", round=10, rounds_seen=4, rounds_contributed=4, notices=(sentence,))
    assert health_sentence(status).startswith("attention: the peers' updates differ in length by 90% of their mean")
    for step in range(3):
        diagnostics.add_round(Figures(10 * SAID_FOR + step, 4, values={NORM_DISPERSION: 0.05}))
    assert notices.now(10 * SAID_FOR) == ()
    assert (
        told[-1]
        == f"the peers' updates differ in length by 5% of their mean (round {10 * SAID_FOR + 2}); that is usual again"
    )


# ---- where figures are shown ----

STATUS = Status(
    state="training", round=12, loss=2.5, bytes_sent=10, diagnostics=USUAL, diagnosed_round=12,
    out_of_band=(NEVER_SENT,), members=({"peer": "a"}, {"peer": "b"}),
)  # fmt: skip


def test_every_figure_has_words_in_the_line_of_the_status() -> None:
    line = in_words(USUAL)
    assert line.startswith("norms differ by 5%, losses differ by 2%, mean cosine 0.100")
    assert not any(name in line for name in NAMES)
    assert in_words({"of_next_year": 1.5}) == "of_next_year 1.5"


def test_a_status_keeps_its_figures_over_the_disk() -> None:
    assert Status.from_mapping(json.loads(json.dumps(asdict(STATUS)))) == STATUS


def test_the_numbers_for_prometheus_are_valid_and_all_there() -> None:
    families = {one.name: one for one in text_string_to_metric_families(peer_exposition(STATUS, alive=True))}
    for name in NAMES:
        (sample,) = families[f"decentral_peer_{name}"].samples
        assert sample.value == USUAL[name]
        assert families[f"decentral_peer_{name}"].documentation
    out = {sample.labels["figure"]: sample.value for sample in families["decentral_peer_out_of_band"].samples}
    assert out == {band.figure: float(band.figure == NEVER_SENT) for band in BANDS}
    assert families["decentral_peer_sent_bytes"].type == "counter"
    assert families["decentral_peer_round"].samples[0].value == 12.0


def test_what_a_peer_does_not_know_is_not_told_to_prometheus() -> None:
    told = peer_exposition(Status(), alive=False)
    assert "decentral_peer_up 0.0" in told
    assert not any(f"decentral_peer_{name}" in told for name in (*NAMES, "loss", "out_of_band", "diagnosed_round"))
    some = replace(STATUS, diagnostics={MEAN_COSINE: -0.25}, out_of_band=())
    families = {one.name for one in text_string_to_metric_families(peer_exposition(some, alive=True))}
    assert families & {f"decentral_peer_{name}" for name in NAMES} == {"decentral_peer_mean_cosine"}


def test_a_row_of_metrics_has_the_figures_and_which_round_they_are_of() -> None:
    row = progress_of_status(STATUS)
    assert {name: row[name] for name in NAMES} == USUAL
    assert row["diagnosed_round"] == 12
    assert "diagnosed_round" not in progress_of_status(Status())


@pytest.mark.parametrize(
    ("given", "value"),
    [
        ({"problem": "the disk is full; free some space", "write_failed": 1}, 1.0),
        ({"problem": "this process holds 9.00 GB, more than the 8.00 GB of max-memory, and leaves"}, 0.0),
        ({}, 0.0),
    ],
)
def test_who_was_ended_by_a_write_is_told_apart_from_who_left(given: dict[str, Any], value: float) -> None:
    text = peer_exposition(Status(state="left", disk_free=7, checkpoint_nbytes=3, **given), alive=False)
    found = {family.name: family.samples[0].value for family in text_string_to_metric_families(text)}
    names = ("write_failed", "disk_free_bytes", "checkpoint_bytes")
    assert [found[f"decentral_peer_{name}"] for name in names] == [value, 7.0, 3.0]
