"""When together is said to be behind what a peer would have learnt alone, by traces of runs (experiments/defaults)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from decentral.observe.diagnostics import (
    BANDS,
    BEHIND_ALONE,
    DOZEN,
    KEPT,
    ROUNDS,
    STILL_GAINED,
    Alone,
    Diagnostics,
    Figures,
    Gains,
    Look,
    likely_cause,
)
from decentral.observe.health import Notices
from experiments.defaults.traces import _length, evaluated, warned_at

TRACES = Path(__file__).parents[2] / "experiments/defaults/traces.jsonl"

# A byte-level GPT of 0.05 M parameters, two peers, 20 rounds of 30 steps, of the first peer: held-out loss before each
# commit and after it. Alone ends at 3.00.
START = 5.56
USUAL = """4.75/4.48 3.67/3.52 3.45/3.66 3.44/3.46 3.41/3.40 3.41/3.38 3.39/3.38 3.41/3.40 3.41/3.41 3.39/3.38 3.36/3.35
3.33/3.31 3.27/3.25 3.21/3.16 3.09/3.10 2.99/2.99 2.95/2.95 2.91/2.90 2.86/2.86 2.85/2.85"""  # diloco, .8 and .7
OVERSHOOTS = """4.75/4.25 3.59/3.54 3.45/3.80 3.44/3.43 3.42/3.42 3.42/3.39 3.38/3.37 3.39/3.38 3.37/3.36 3.32/3.29
3.25/3.21 3.16/3.14 3.10/3.09 3.07/3.03 3.00/2.99 2.94/2.93 2.93/2.91 2.91/2.90 2.85/2.83 2.83/2.82"""  # .9 and .9
SPARSE = """4.75/5.54 4.22/5.44 4.09/4.83 3.77/4.12 3.61/4.12 3.54/4.28 3.48/3.92 3.46/3.74 3.45/3.98 3.43/4.71
3.47/4.47 3.36/3.94 3.36/3.63 3.33/4.03 3.33/3.98 3.28/3.69 3.28/3.44 3.26/3.65 3.25/3.46 3.23/3.34"""  # k 64, 2.5


def looks(trace: str) -> list[Look]:
    rounds = [tuple(map(float, one.split("/"))) for one in trace.split()]
    starts = [START, *(after for _, after in rounds)]
    return [Look(n, start, *each) for n, (start, each) in enumerate(zip(starts, rounds, strict=False), 1)]


def crossings(seen: list[Look]) -> list[dict[str, object]]:
    told: list[dict[str, object]] = []
    diagnostics = Diagnostics(lambda event, fields: told.append({"event": event, **fields}), lambda: "the cause")
    for look in seen:
        diagnostics.add_look(look)
    return told


@pytest.mark.parametrize("trace", [USUAL, OVERSHOOTS])
def test_a_run_that_is_ahead_of_alone_is_never_warned_of_though_momentum_raises_its_loss(trace: str) -> None:
    assert any(look.after > look.before for look in looks(trace))
    assert crossings(looks(trace)) == []


def test_a_run_whose_commits_take_back_what_its_steps_gain_is_warned_of_with_the_cause() -> None:
    (told,) = [one for one in crossings(looks(SPARSE)) if one["event"] == "out_of_band"]
    assert told["outer_step"] == 10
    assert told["figure"] == BEHIND_ALONE
    assert told["why"] == "the cause"


def test_what_alone_would_have_reached_is_near_what_a_peer_alone_did() -> None:
    """Its held-out losses, from a run of one peer with the same data; the trace is of the sparse one."""
    alone = [4.75, 3.77, 3.46, 3.44, 3.42, 3.41, 3.39, 3.42, 3.41, 3.38]
    judge = Alone()
    shares = [judge.see(look) for look in looks(SPARSE)[: len(alone)]]
    now = sorted(look.after for look in looks(SPARSE)[7:10])[1]
    estimate = (now - shares[-1] * START) / (1 - shares[-1])
    assert estimate == pytest.approx(alone[-1], abs=0.15)


def test_looks_at_every_third_round_tell_the_same() -> None:
    """Evaluations are spaced where they take long."""
    assert crossings(looks(OVERSHOOTS)[::2]) == []
    longer = looks(SPARSE) + [Look(n, 3.9, 3.3, 3.9) for n in range(21, 60)]
    assert [one["event"] for one in crossings(longer[::3])] == ["out_of_band"]


def test_a_few_looks_are_not_judged() -> None:
    (band,) = (band for band in BANDS if band.figure == BEHIND_ALONE)
    worst = [Look(n, 5.0, 4.0, 5.0) for n in range(1, band.after + ROUNDS)]
    assert crossings(worst[:-1]) == []
    assert len(crossings(worst)) == 1


def test_a_run_that_only_rises_is_worse_than_alone_and_a_share_is_within_one() -> None:
    judge = Alone()
    shares = [judge.see(Look(n, 1.0 + n, 0.5 + n, 2.0 + n)) for n in range(20)]
    assert all(-1 <= share <= 1 for share in shares)
    assert shares[-1] == 1.0


def test_no_gain_at_all_is_neither() -> None:
    assert Alone().see(Look(1, 3.0, 3.0, 3.0)) == 0.0


def test_what_is_kept_of_a_long_run_does_not_grow() -> None:
    judge = Alone()
    for n in range(5 * KEPT):
        share = judge.see(Look(n, 9.0 - 1e-3 * n, 8.9 - 1e-3 * n, 8.9 - 1e-3 * n))
    assert len(judge._looks) <= KEPT
    assert share <= 0.1


# ---- whether anything is still learnt ----


def test_of_runs_that_end_ahead_of_alone_at_most_one_in_twenty_is_warned_of_and_the_convolutional_net_is() -> None:
    """The traces of experiments/defaults, by the code that a peer runs."""
    cells = [json.loads(line) for line in TRACES.read_text(encoding="utf-8").splitlines()]
    alone = {_length(cell): cell["trace"][-1][3] for cell in cells if cell["terms"] is None}
    warned = [
        (
            cell["problem"],
            cell["trace"][-1][4] < alone[_length(cell)],
            warned_at(evaluated(cell["trace"]), held_out=True),
        )
        for cell in cells
        if cell["terms"] is not None
    ]
    ahead = [told for _, is_ahead, told in warned if is_ahead]
    assert len(ahead) == 20
    assert sum(map(bool, ahead)) <= 1
    assert [told[0][0] for name, _, told in warned if name == "conv"] == [STILL_GAINED] * 2


@pytest.mark.parametrize(
    ("start", "before", "after", "fall"),
    [(1.0, 1.5, 1.0, 0.0), (1.5, 1.0, 1.5, 0.0), (1.0, 1.0, 1.0, 0.1)],
    ids=["commits undo what own data did", "steps undo what momentum did", "it falls slowly"],
)
def test_a_run_that_still_gains_by_one_of_three_does_not_stand(
    start: float, before: float, after: float, fall: float
) -> None:
    gains = Gains()
    gains.see(Look(0, 5.0, 4.0, 3.0))
    found = [gains.see(Look(n, start - n * fall, before - n * fall, after - n * fall)) for n in range(1, 2 * DOZEN)]
    assert found[:-1] == [None] * (2 * DOZEN - 2)
    assert found[-1] > 0.02
    stands = [gains.see(Look(n, 1.0, 1.0, 1.0)) for n in range(2 * DOZEN)]
    assert stands[-1] == 0.0


def test_logged_losses_tell_nothing_of_whether_more_is_to_be_learnt() -> None:
    diagnostics = Diagnostics(lambda event, fields: None)
    for n in range(3 * DOZEN):
        diagnostics.add_look(Look(n, 2.0, 1.0, 1.5), held_out=False)
    assert set(diagnostics.values) == {BEHIND_ALONE}


# ---- the likely cause ----


@pytest.mark.parametrize(
    ("gain", "lost", "rounds", "says"),
    [
        (2.5, 0.94, 100, "too little is sent: 94% of a round's change is left for later rounds"),
        (13.0, 0.01, 100, "the outer rate is too high: in the end a change moves the anchor by 13 times its length"),
        (9.0, 0.01, 20, "outer momentum is too long for 20 rounds: it carries a change on to 9 times its length"),
        (9.0, 0.01, 100, "another seed would do better, or there is little left to learn"),
    ],
)
def test_the_cause_goes_by_the_terms_and_the_command_is_named(gain: float, lost: float, rounds: int, says: str) -> None:
    said = likely_cause(gain, lost, rounds, waits=True, held_out=True)
    assert said.startswith(says)
    assert said.endswith("decentral tune SCRIPT.py:FUNCTION tries terms on your model, beside a peer alone")
    assert "evaluate=" not in said
    assert "pass evaluate= to join to be surer" in likely_cause(gain, lost, rounds, waits=True, held_out=False)


def test_what_is_not_sent_is_lost_without_feedback() -> None:
    assert "94% of a round's change is lost for good" in likely_cause(1.0, 0.94, 100, waits=False, held_out=True)


def test_figures_of_rounds_and_those_of_looks_are_shown_together() -> None:
    notices = Notices()
    diagnostics = Diagnostics(lambda event, fields: notices.hear(event, fields, "me"), lambda: "why")
    diagnostics.add_round(Figures(1, 2, values={"mean_cosine": 0.1}))
    for look in looks(SPARSE)[:10]:
        diagnostics.add_look(look)
    assert set(diagnostics.values) == {"mean_cosine", BEHIND_ALONE}
    (sentence,) = notices.now(10)
    assert sentence.startswith("together lacks ")
    assert sentence.endswith("of what this peer's own steps would have learnt alone (round 10); probably why")
